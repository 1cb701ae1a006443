"""No promise is lost: each section of the guides names the tests that hold it."""

from __future__ import annotations

from functools import cache

from scripts.promises import functions_of, headings, pages, promises


def test_every_section_of_guarantees_and_guides_has_a_promise() -> None:
    told = {(page, heading) for page, heading, _, _ in promises()}
    written = {(page, heading) for page in pages() for heading in headings(page)}
    assert sorted(written - told) == [], "add these to tests/promises.toml"
    assert sorted(told - written) == [], "these are no headings any more"


def test_every_promise_is_held_by_tests_that_exist() -> None:
    known = cache(functions_of)
    for page, heading, promise, tests in promises():
        assert tests or not promise, (page, heading)
        for test in tests:
            module, name = test.split("::")
            assert name in known(module), test
