#!/usr/bin/env bash
# Runs tests that failed beside others once more, alone: what fails again is broken, and what passes
# is named, for it is a fault as well, of the test or of the product, that only a busy machine shows.
# A test is let through like this once: then it is written into tests/failed_beside_others.txt, and
# its next failure counts. Whoever mends the fault removes the line.
#
# Usage: scripts/test_alone.sh EXIT_STATUS_OF_PYTEST
#        scripts/test_alone.sh --told    names the tests that the last run let through
set -euo pipefail
cd "$(dirname "$0")/.."

MOST=3 # more than that is no bad luck
TESTS_FAILED=1
ONCE=tests/failed_beside_others.txt
TOLD=.pytest_cache/failed_beside_others.txt

tell() {
    echo "FAILED BESIDE OTHERS, PASSED ALONE. Mend these, or write them into $ONCE:"
    cat "$TOLD"
}

if [ "$1" = --told ]; then
    if [ -e "$TOLD" ]; then tell; fi
    rm -f "$TOLD"
    exit 0
fi

[ "$1" = "$TESTS_FAILED" ] || exit "$1"
mapfile -t failed < <(.venv/bin/python -c '
import json
print(*json.load(open(".pytest_cache/v/cache/lastfailed")), sep="\n")
')
[ "${#failed[@]}" -le "$MOST" ] || exit "$1"
if twice=$(printf '%s\n' "${failed[@]}" | grep --fixed-strings --line-regexp --file="$ONCE"); then
    printf 'FAILED BESIDE OTHERS AGAIN, see %s: %s\n' "$ONCE" "$twice"
    exit "$1"
fi

echo "failed beside others, now alone:" "${failed[@]}"
.venv/bin/python -m pytest -v "${failed[@]}"
printf '%s\n' "${failed[@]}" >"$TOLD"
tell
