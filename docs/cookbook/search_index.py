"""Ten edits of a document reindex it once, and the last edit counts."""

from celery import Celery

from celery_native_delay import Delay, install
from celery_native_delay.clock import Clock

app = Celery("wiki", broker="amqp://")
install(app, store="redis://localhost/1")
pages = {}
index = {}
writes = []


@app.task(name="wiki.reindex")
def reindex(page):
    index[page] = pages[page]
    writes.append(page)


def save(page, text):
    """Wait for five quiet seconds, but for a minute at most."""
    pages[page] = text
    Delay(app).debounce(reindex.s(page), key=page, seconds=5, max_wait_seconds=60)


def test_a_burst_of_edits_is_one_write():
    with Clock(app) as clock:
        for number in range(10):
            save("home", f"edit {number}")
            clock.advance(seconds=1)
        assert writes == []
        clock.advance(seconds=5)
        assert (writes, index) == (["home"], {"home": "edit 9"})


def test_an_author_who_never_stops_is_indexed_once_a_minute():
    writes.clear()
    with Clock(app) as clock:
        for number in range(180):
            save("log", f"edit {number}")
            clock.advance(seconds=1)
        assert 2 <= len(writes) <= 3
