"""What the shop does later: reminders, e-mails, charges, and a chain of all three.

Everything here is ordinary Celery. Whatever waits, waits in the broker: no worker holds it.
"""

from datetime import datetime, timedelta

from celery import Task, chain
from celery.result import AsyncResult
from celery.utils.log import get_task_logger

from example_project.app import app

DAY_SECONDS = 24 * 60 * 60

log = get_task_logger(__name__)


class MailServerBusy(Exception):
    """The mail server asks to come back later."""


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
    retry_backoff=2,  # seconds, doubled each time …
    retry_backoff_max=600,
    retry_jitter=True,  # … of which a random part is waited
)
def send_email(self: Task, address: str, subject: str, busy_attempts: int = 0) -> None:
    """Send an e-mail; the first *busy_attempts* find the mail server busy."""
    if self.request.retries < busy_attempts:
        raise MailServerBusy(address)
    log.info("%s: %s", address, subject)


@app.task(bind=True, max_retries=5)
def charge(
    self: Task, order_id: int, declined_attempts: int = 0, retry_seconds: float = DAY_SECONDS
) -> None:
    """Charge the card, again a day later while the bank declines: *declined_attempts* times."""
    if self.request.retries < declined_attempts:
        raise self.retry(countdown=retry_seconds, exc=CardDeclined(order_id))
    log.info("order %s: charged", order_id)


@app.task
def escalate(order_id: int) -> None:
    """Hand an unpaid order over to a person."""
    log.info("order %s: to the accounting department", order_id)


@app.task
def daily_report() -> None:
    """Report the day's orders; sent by beat, see `app`."""
    log.info("yesterday's orders: …")


def remind_before_delivery(order_id: int, delivery: datetime) -> AsyncResult:
    """Remind the customer two days before *delivery*, or now if that has passed."""
    return remind.apply_async((order_id,), eta=delivery - timedelta(days=2))


def collect(order_id: int, *, wait_seconds: float = 2 * DAY_SECONDS) -> AsyncResult:
    """Remind at once, charge after *wait_seconds*, escalate after as long again."""
    return chain(
        remind.si(order_id),
        charge.si(order_id).set(countdown=wait_seconds),
        escalate.si(order_id).set(countdown=wait_seconds),
    ).apply_async()
