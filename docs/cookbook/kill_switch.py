"""A kill switch: stop a partner's tasks at three in the morning, and let them go at nine."""

from celery import Celery

from celery_native_delay import Delay, install
from celery_native_delay.clock import Clock

app = Celery("pay", broker="amqp://")
install(app, store="postgresql+psycopg://localhost/pay")
done = []


@app.task(name="pay.charge")
def charge(order):
    done.append(order)


@app.task(name="pay.thank")
def thank(order):
    done.append(f"thanks for {order}")


def stop():
    """Like `celery -A pay delay hold pay.charge`; workers know it within five seconds."""
    Delay(app).hold("pay.charge", by="ada, ticket 7")


def go_on():
    """They were due long ago: let them go one after the other, not all at once."""
    Delay(app).release("pay.charge", rate="10/s")


def test_held_tasks_wait_and_lose_nothing():
    with Clock(app) as clock:
        stop()
        clock.advance(seconds=5)
        for order in range(30):
            charge.delay(order)
            thank.delay(order)
        clock.advance(hours=6)
        assert done == [f"thanks for {order}" for order in range(30)]
        (hold,) = Delay(app).holds()
        assert (hold.by, hold.held) == ("ada, ticket 7", 30)
        go_on()
        clock.advance(seconds=1)
        assert 5 <= len(done) - 30 <= 11
        clock.run_all()
        assert sorted(done[30:]) == list(range(30))
