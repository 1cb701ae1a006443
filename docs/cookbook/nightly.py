"""A nightly report without beat: any worker sends it, and none sends it twice."""

from datetime import datetime
from zoneinfo import ZoneInfo

from celery import Celery
from celery.schedules import crontab

from celery_native_delay import install
from celery_native_delay.clock import Clock

app = Celery("books", broker="amqp://")
app.conf.timezone = "Europe/Berlin"
app.conf.beat_schedule = {
    "nightly": {"task": "books.report", "schedule": crontab(hour=2, minute=30)},
}
install(app, store="postgresql+psycopg://localhost/books", schedules=True)
reports = []


@app.task(name="books.report")
def report():
    reports.append(datetime.now(ZoneInfo("Europe/Berlin")))


def test_a_report_a_night():
    with Clock(app) as clock:
        clock.advance(days=7)
    assert len(reports) == 7
    assert {(at.hour, at.minute) for at in reports} == {(2, 30)}
