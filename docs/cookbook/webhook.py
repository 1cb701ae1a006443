"""A webhook that is tried again for three days, ever more rarely, and then given up."""

from celery import Celery

from celery_native_delay import install
from celery_native_delay.clock import Clock

app = Celery("hooks", broker="amqp://")
install(app)  # retries wait in RabbitMQ: three days cost a worker nothing
tries = []
down = True


def post(url, body):
    """Instead of requests.post()."""
    tries.append(url)
    if down:
        raise ConnectionError(f"{url} does not answer")


@app.task(
    name="hooks.deliver",
    autoretry_for=(OSError,),
    retry_backoff=60,  # 1, 2, 4, … minutes
    retry_backoff_max=6 * 3600,
    retry_jitter=False,  # leave the jitter on if many hooks have one receiver
    max_retries=20,  # 8.5 hours for the first nine, 6 hours for each of the rest
)
def deliver(url, body):
    post(url, body)


def test_it_gives_up_after_three_days():
    with Clock(app, raises=False) as clock:
        deliver.delay("https://example.com/hook", {"order": 7})
        clock.advance(days=3)
        assert clock.errors == []
        clock.advance(hours=3)
        assert (len(tries), len(clock.errors)) == (21, 1)
        assert clock.run_all() == 0


def test_it_arrives_when_the_receiver_is_back():
    global down
    tries.clear()
    with Clock(app) as clock:
        deliver.delay("https://example.com/hook", {"order": 8})
        clock.advance(minutes=10)
        down = False
        assert clock.run_all() == 1
        assert len(tries) == 5
