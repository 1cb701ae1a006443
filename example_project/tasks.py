"""The delayed tasks of the shop: reminders, e-mails, charges, and a chain of all three.

This module is ordinary Celery. The delayed tasks wait in the broker, or in a store as the module
`app` says, and no worker holds them.
"""

from datetime import datetime, timedelta

from celery import Task, chain
from celery.result import AsyncResult
from celery.utils.log import get_task_logger

from celery_native_delay import Delay, RetryAfter
from example_project.app import app

DAY_SECONDS = 24 * 60 * 60

log = get_task_logger(__name__)

#: On RabbitMQ, the last functions need a store: ``DELAY_STORE=sqlite:////var/lib/shop/delays.db``.
delay = Delay(app)


class MailServerBusy(Exception):
    """The mail server is busy: try again later."""


class CardDeclined(Exception):
    """The bank refuses the charge."""


@app.task
def remind(order_id: int) -> None:
    """Tell the customer that the order is on its way."""
    log.info("order %s: arrives soon", order_id)


@app.task(
    bind=True,
    autoretry_for=(MailServerBusy,),
    max_retries=10,
    retry_backoff=2,  # seconds; each retry doubles the wait
    retry_backoff_max=600,
    retry_jitter=True,  # the actual wait is a random part
)
def send_email(self: Task, address: str, subject: str, busy_attempts: int = 0) -> None:
    """Send an e-mail; in the first *busy_attempts* attempts the mail server is busy."""
    if self.request.retries < busy_attempts:
        raise MailServerBusy(address)
    log.info("%s: %s", address, subject)


@app.task(bind=True, max_retries=5)
def charge(
    self: Task, order_id: int, declined_attempts: int = 0, retry_seconds: float = DAY_SECONDS
) -> None:
    """Charge the card; the bank declines the first *declined_attempts* attempts.

    Each declined attempt is retried a day later.
    """
    if self.request.retries < declined_attempts:
        raise self.retry(countdown=retry_seconds, exc=CardDeclined(order_id))
    log.info("order %s: charged", order_id)


@app.task(bind=True, max_retries=10)
def book_courier(self: Task, order_id: int, courier: str, busy_attempts: int = 0) -> None:
    """Book a courier.

    `rates` in the module `app` limits the bookings per second. If the courier is busy, all bookings
    of this courier wait.
    """
    if self.request.retries < busy_attempts:
        raise RetryAfter(60)  # all other bookings of this courier wait as long
    log.info("order %s: goes with %s", order_id, courier)


@app.task
def escalate(order_id: int) -> None:
    """Pass an unpaid order to the accounting department."""
    log.info("order %s: to the accounting department", order_id)


@app.task
def count_stock(product: str) -> None:
    """Count the stock of a product."""
    log.info("%s: counted", product)


@app.task
def tick() -> None:
    """Run each second in the demo."""


@app.task
def daily_report() -> None:
    """Report the day's orders; workers send this task, as the module `app` says."""
    log.info("yesterday's orders: …")


def remind_before_delivery(order_id: int, delivery: datetime) -> AsyncResult:
    """Remind the customer two days before *delivery*, or now if that time has passed."""
    return remind.apply_async((order_id,), eta=delivery - timedelta(days=2))


def cancel_reminder(reminder: AsyncResult) -> bool:
    """Cancel the reminder of an order that the customer has cancelled; False if it was sent."""
    return bool(delay.cancel(reminder))


def collect(order_id: int, *, wait_seconds: float = 2 * DAY_SECONDS) -> AsyncResult:
    """Remind at once, charge after *wait_seconds*, and escalate after another *wait_seconds*."""
    return chain(
        remind.si(order_id),
        charge.si(order_id).set(countdown=wait_seconds),
        escalate.si(order_id).set(countdown=wait_seconds),
    ).apply_async()


def stock_has_changed(product: str, *, quiet_seconds: float = 5) -> AsyncResult:
    """Count a product's stock when no order has come for *quiet_seconds*, but within a minute."""
    task = count_stock.s(product)
    return delay.debounce(task, key=product, seconds=quiet_seconds, max_wait_seconds=60)


def remind_once(order_id: int, *, pause_seconds: float = DAY_SECONDS) -> AsyncResult:
    """Remind the customer at most once per *pause_seconds*, even if called more often."""
    return delay.throttle(remind.s(order_id), key=f"order:{order_id}", seconds=pause_seconds)


def charge_once(order_id: int, *, wait_seconds: float = DAY_SECONDS) -> AsyncResult:
    """Charge the card later, unless a charge of the same order waits, runs or will be retried."""
    return delay.unique(charge.s(order_id), key=f"order:{order_id}", countdown=wait_seconds)
