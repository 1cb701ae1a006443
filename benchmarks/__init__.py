"""Benchmarks: compare this package's delayed tasks with plain Celery. Run: ``make bench``."""
