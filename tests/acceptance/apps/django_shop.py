"""A Django project in one module, whose tasks write rows and die at a step that a file names.

The environment tells the database, the broker and the folder of the files:
``SHOP_DATABASE`` (JSON of Django), ``SHOP_BROKER``, ``SHOP_FOLDER``.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import django
from celery import Celery
from django.conf import settings

if not settings.configured:
    settings.configure(
        INSTALLED_APPS=["celery_native_delay.django"],
        DATABASES={"default": json.loads(os.environ["SHOP_DATABASE"])},
    )
    django.setup()

from django.db import connection, transaction

from celery_native_delay import install

FOLDER = Path(os.environ.get("SHOP_FOLDER", "."))

app = install(
    Celery("shop", broker=os.environ.get("SHOP_BROKER", "memory://")),
    store="django",
    namespace="shop",
)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=4,
    broker_connection_timeout=1,
    broker_transport_options={"visibility_timeout": 2, "max_retries": 1},
)


def dies(number: int, step: str) -> None:
    """Kill this process if the file of the task names this step; once only."""
    file = FOLDER / f"{number}.{step}"
    if file.exists():
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def write(table: str, number: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {table} (number) VALUES (%s)", [number])


@app.task(name="shop.charge", once="transaction")
def charge(number: int) -> None:
    dies(number, "before")
    transaction.on_commit(lambda: dies(number, "committed"))
    write("effects", number)
    dies(number, "written")
    mail.apply_async((number,), task_id=f"mail-{number}")
    dies(number, "sent")
    transaction.on_commit(lambda: dies(number, "published"))


@app.task(name="shop.mail", once="transaction")
def mail(number: int) -> None:
    write("mails", number)


@app.task(name="shop.flaky", bind=True, once="transaction", max_retries=3)
def flaky(self: Any, number: int) -> None:
    """Fails twice; each failure rolls back what it wrote and sent."""
    write("effects", number)
    mail.apply_async((number,), task_id=f"mail-{number}-{self.request.retries}")
    if self.request.retries < 2:
        raise self.retry(countdown=0.5)
