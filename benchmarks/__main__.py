import sys

if __name__ == "__main__":  # the processes that scenarios start import this, too
    from benchmarks.command import main

    sys.exit(main())
