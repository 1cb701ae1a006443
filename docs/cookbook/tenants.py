"""Each tenant calls an API at its own rate, and a 429 stops only that tenant."""

from celery import Celery

from celery_native_delay import Rate, RetryAfter, install
from celery_native_delay.clock import Clock

app = Celery("sync", broker="amqp://")
install(
    app,
    store="redis://localhost/1",
    rates={"sync.push": Rate("60/m", key="tenant", overrides={"gold": "600/m"})},
)
calls = []
busy = {"acme"}  # whom the API turns away


class Answer:
    """Instead of requests.post()."""

    def __init__(self, tenant):
        self.status_code = 429 if tenant in busy else 200
        self.headers = {"Retry-After": "120"}


@app.task(name="sync.push")
def push(tenant, number):
    answer = Answer(tenant)
    if answer.status_code == 429:
        raise RetryAfter(answer.headers["Retry-After"])
    calls.append(tenant)


def test_tenants_do_not_wait_for_each_other():
    with Clock(app) as clock:
        for tenant in "acme", "globex", "gold":
            for number in range(30):
                push.delay(tenant, number)
        clock.advance(seconds=10)
        assert calls.count("acme") == 0  # one was turned away: the others wait, too
        assert 9 <= calls.count("globex") <= 11
        assert calls.count("gold") == 30
        busy.clear()
        clock.advance(seconds=109)
        assert calls.count("acme") == 0
        clock.run_all()
        assert calls.count("acme") == 30
