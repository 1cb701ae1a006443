"""What is stored of a message comes out again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay.transports.redis.entry import Destination, entry_of, opened_entry

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(
    st.builds(
        Destination,
        st.lists(names, min_size=1, max_size=5).map(tuple),
        st.integers(0, 10**10),
        st.booleans(),
    ),
    names,
)
def test_an_entry_opens_to_what_it_was_made_of(destination: Destination, envelope: str) -> None:
    opened = opened_entry(entry_of(destination, envelope))
    assert opened == (destination, envelope.encode())


def test_the_entry_of_version_1_is_frozen() -> None:
    """Redis holds them in production, and Lua reads them."""
    assert entry_of(Destination(("jobs",)), '{"a": 1}') == b'push 0 4\njobs{"a": 1}'
    expiring = Destination(("jobs\x06\x163", "jöbs"), ttl_ms=500)
    assert entry_of(expiring, "{}") == b"push 500 7 5\njobs\x06\x163j\xc3\xb6bs{}"
    broadcast = Destination(("/0.news",), broadcast=True)
    assert entry_of(broadcast, "{}") == b"publish 0 7\n/0.news{}"
