"""A reminder that moves with its appointment and dies with it."""

from datetime import UTC, datetime, timedelta

from celery import Celery

from celery_native_delay import Delay, install
from celery_native_delay.clock import Clock

app = Celery("clinic", broker="amqp://")
install(app, store="postgresql+psycopg://localhost/clinic")
sent = []  # instead of a text message


@app.task(name="clinic.remind")
def remind(appointment):
    sent.append(appointment)


def book(appointment, at):
    """Your own id for the task: nothing to store beside the appointment."""
    day_before = at - timedelta(days=1)
    remind.apply_async((appointment,), eta=day_before, task_id=f"reminder-{appointment}")


def move(appointment, at):
    moved = Delay(app).reschedule(f"reminder-{appointment}", eta=at - timedelta(days=1))
    if not moved:  # it has been sent: remind of the new time, too
        book(appointment, at)


def call_off(appointment):
    Delay(app).cancel(f"reminder-{appointment}")


def test_the_reminder_follows_its_appointment():
    with Clock(app) as clock:
        monday = datetime.now(UTC) + timedelta(days=7)
        for appointment in 1, 2, 3:
            book(appointment, at=monday)
        move(2, at=monday + timedelta(days=2))
        call_off(3)
        clock.advance(days=6)
        assert sent == [1]
        clock.advance(days=2)
        assert sent == [1, 2]
        assert clock.run_all() == 0  # nothing of appointment 3
