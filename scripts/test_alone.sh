#!/usr/bin/env bash
# Runs tests that failed beside others once more, alone: what fails again is broken, and what passes
# is named, for it is a fault as well, of the test or of the product, that only a busy machine shows.
#
# Usage: scripts/test_alone.sh EXIT_STATUS_OF_PYTEST
set -euo pipefail
cd "$(dirname "$0")/.."

MOST=3 # more than that is no bad luck
TESTS_FAILED=1

[ "$1" = "$TESTS_FAILED" ] || exit "$1"
mapfile -t failed < <(.venv/bin/python -c '
import json
print(*json.load(open(".pytest_cache/v/cache/lastfailed")), sep="\n")
')
[ "${#failed[@]}" -le "$MOST" ] || exit "$1"

echo "failed beside others, now alone:" "${failed[@]}"
.venv/bin/python -m pytest -v "${failed[@]}"
printf 'FAILED BESIDE OTHERS, PASSED ALONE, to be mended: %s\n' "${failed[@]}"
