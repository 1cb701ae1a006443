"""scripts/mutations.py: each mutation has a place in the code, and tests that must notice it."""

from __future__ import annotations

import pytest

from scripts.mutations import MUTATIONS, ROOT


@pytest.mark.tools
def test_each_mutation_changes_one_place_and_names_tests_that_exist() -> None:
    for each in MUTATIONS:
        text = (ROOT / "celery_native_delay" / each.file).read_text()
        assert text.count(each.before) == 1, (each.file, each.before)
        assert (ROOT / "tests" / each.tests.split()[0]).exists(), each.tests
    assert len(MUTATIONS) >= 20
