"""Sends three batches in a process with Sentry, and prints the spans and messages.

``python -m tests.conformance.sentry_process URL`` prints JSON: the ids of what was sent, and
Sentry's spans of publishing.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import sentry_sdk
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

from celery_native_delay.bulk import bulk
from tests.conformance.test_bulk_conformance import make_app

events: list[dict[str, Any]] = []


class Keeping(Transport):
    """Sends nothing anywhere."""

    def capture_envelope(self, envelope: Any) -> None:
        event = envelope.get_transaction_event()
        if event is not None:
            events.append(event)


def main(url: str) -> None:
    logging.basicConfig(level=logging.INFO)
    early = make_app(url)
    sentry_sdk.init(
        dsn="https://key@sentry.invalid/1",
        transport=Keeping,
        traces_sample_rate=1.0,
        default_integrations=False,
        integrations=[CeleryIntegration()],
    )
    late, ids, by_template = make_app(url), [], 0
    for app, task in ((early, "shop.remind"), (late, "shop.remind"), (early, "elsewhere.task")):
        with bulk(app) as batch:
            for number in range(6):
                with sentry_sdk.start_transaction(name=f"order {number}"):
                    ids.append(batch.send(task, (number,), countdown=0.2))
        by_template += batch.result.by_template
    early.close()
    late.close()
    spans = list(publishes())
    sys.stdout.write(json.dumps({"ids": ids, "by_template": by_template, "publishes": spans}))


def publishes() -> Iterator[dict[str, str]]:
    for event in events:
        for span in event["spans"]:
            if span["op"] == "queue.publish":
                yield {"id": span["data"]["messaging.message.id"], "trace_id": span["trace_id"]}


if __name__ == "__main__":
    main(sys.argv[1])
