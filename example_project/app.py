"""The Celery app of a small shop. Only the last call in this module, `install(app)`, is about
delays.
"""

import os
from typing import Any

from celery import Celery
from celery.schedules import crontab
from kombu import Exchange, Queue

from celery_native_delay import Rate, install
from example_project.folder_broker import settings_of

BROKER_URL = os.environ.get("BROKER_URL", "amqp://guest:guest@localhost:5672//")

URL = os.environ.get("CELERY_BROKER_URL", BROKER_URL)  # this name outranks every other setting

STORE = os.environ.get("DELAY_STORE")  # this one and telemetry: none unless asked for

app = Celery(
    "example_project",
    broker=BROKER_URL,
    backend=os.environ.get("RESULT_BACKEND"),  # none unless asked for
    include=["example_project.tasks", "example_project.recorder"],
)

REMIND = "example_project.tasks.remind"
TICK = {"task": "example_project.tasks.tick", "schedule": 1.0}

shop = Exchange("shop", type="topic")

app.conf.update(
    task_serializer="json",
    accept_content=["json"],
    timezone="UTC",
    task_queues=[
        Queue("default"),
        Queue("reminders", shop, routing_key="reminders.#"),
        Queue("emails", shop, routing_key="emails.#"),
    ],
    task_default_queue="default",
    task_routes={
        # The route names the queue, so that producers declare the queue. Except for RabbitMQ, no
        # broker stores exchanges.
        REMIND: {
            "queue": "reminders",
            "exchange": "shop",
            "routing_key": "reminders.order",
        },
        "example_project.tasks.send_email": {
            "queue": "emails",
            "exchange": "shop",
            "routing_key": "emails.customer",
        },
    },
    beat_schedule={
        # The task is sent at midnight. The task runs at a quarter past midnight, when the day's
        # last orders are booked.
        "daily-report": {
            "task": "example_project.tasks.daily_report",
            "schedule": crontab(hour=0, minute=0),
            "options": {"countdown": 15 * 60},
        },
        # Only the demo ticks each second.
        **({"tick": TICK} if "EXAMPLE_RECORD" in os.environ else {}),
    },
    **settings_of(URL),
)


def can_count(broker_url: str, store: str | None) -> bool:
    """Return True if rates and schedules work with this broker, which needs a store or is one.

    Redis and a database are their own store, and `folder_broker` sets one.
    """
    return bool(store) or not broker_url.startswith(("amqp", "pyamqp", "sqs"))


def stored_in(store: str | None) -> dict[str, Any]:
    """Return the settings for a store beside the broker; empty without a store."""
    # A customer may cancel an order, so reminders wait in the store, where they can be cancelled.
    # Retries and e-mails only wait, and do so in the broker.
    return {} if store is None else {"store": store, "store_tasks": [REMIND]}


install(
    app,
    **stored_in(STORE),
    telemetry=os.environ.get("EXAMPLE_TELEMETRY"),
    # All workers together start at most two bookings a second for each courier.
    rates={"example_project.tasks.book_courier": Rate("2/s", key="courier")}
    if can_count(URL, STORE)
    else {},
    # Workers publish the next run of each entry of `beat_schedule`. No beat is needed.
    schedules=can_count(URL, STORE),
)
