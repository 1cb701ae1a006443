"""An app whose users may not declare anything; another user runs `delay declare`."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from copy import copy
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import Connection

from celery_native_delay.app.installation import admin_part
from celery_native_delay.testing import PrivateRabbitMQ
from celery_native_delay.transports.rabbitmq.topology import Topology
from tests.acceptance.worker import FEW_LEVELS, fleet_on
from tests.brokers import on_one_version
from tests.documents import ROOT, only
from tests.processes import running
from tests.waiting import wait_until

CONF = {
    "native_delay_declare": False,
    "native_delay_levels": FEW_LEVELS,
    "native_delay_fused_bits": 3,
    "no_declare": True,
}

pytestmark = on_one_version

#: Celery's own remote control, events and heartbeats declare things, too.
QUIET = ("--without-heartbeat",)


def declare(url: str, app: Celery) -> Topology:
    """Declare what *app* needs, as the administrator of *url*; returns the plan."""
    queues = list(app.amqp.queues.values())
    with Connection(url) as owner:
        for queue in queues:
            mine = copy(queue)
            mine.no_declare = mine.exchange.no_declare = False
            mine(owner.default_channel).declare()
    with app.connection_for_write(url) as connection:
        admin_part(app, connection).declare(queues)
    return Topology(app._native_delay.settings())


def permissions_of_the_guide() -> dict[str, dict[str, str]]:
    """The permission patterns of the guide, by role and permission."""
    page = (ROOT / "docs/guides/infrastructure-as-code.md").read_text()
    rows = re.findall(r"^(producers|workers) +(configure|write|read) +(\S+)$", page, re.M)
    by_user = {
        who: {permission: pattern for name, permission, pattern in rows if name == who}
        for who in ("producers", "workers")
    }
    assert [len(patterns) for patterns in by_user.values()] == [3, 3]
    return by_user


def test_the_permissions_of_the_guide_are_enough(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str, tmp_path: Path
) -> None:
    """Every kind of exchange, remote control, and parked tasks whose queue is not bound."""
    urls = {
        who: rabbitmq.add_user(
            f"{who}-{vhost}",
            "secret",
            vhost=vhost,
            **{
                permission: pattern.replace("shop", "shop|billing|broadcast").replace(
                    "orders", "default|side|orders|parcels|invoices|news"
                )
                for permission, pattern in patterns.items()
            },
        )
        for who, patterns in permissions_of_the_guide().items()
    }
    with fleet_on(urls["producers"], tmp_path, **CONF) as fleet:
        app = fleet.app()
        topology = declare(vhost_url, app)
        with Connection(vhost_url) as admin:
            channel = admin.default_channel
            pattern = topology.delivery_pattern("%.side")
            channel.queue_unbind("side", topology.delivery_exchange, pattern)
            routes = [{"queue": name} for name in ("default", "side", "invoices", "news")]
            routes.append({"queue": "orders", "routing_key": "orders.new"})
            sent = [app.send_task("note", countdown=0.5, **route).id for route in routes]
            wait_until(lambda: channel.queue_declare(topology.parking_queue, passive=True)[1] == 1)
        worker = fleet.worker(broker_url=urls["workers"])
        fleet.record.wait_for_ids(sent)
        worker.wait_for_log("native delay: 1 parked message(s) delivered")
        asking = fleet.app(broker_url=vhost_url)
        assert asking.control.ping(destination=[worker.name], timeout=10)


GUIDES_APP = """
from celery import Celery
from celery_native_delay import install

app = Celery("shop", broker={url!r}, set_as_current=False)
app.conf.native_delay_levels = {levels}
{example}
install(app)

@app.task(name="shop.remind", shared=False)
def remind(user):
    pass
"""


def test_the_app_of_the_guide_runs_tasks_as_the_users_of_the_guide(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str, tmp_path: Path
) -> None:
    """Immediate and delayed tasks, with the queue and the exchange of the guide only."""
    sources = {}
    for who, patterns in permissions_of_the_guide().items():
        url = rabbitmq.add_user(f"guides-{who}-{vhost}", "secret", vhost=vhost, **patterns)
        example = only("declare-off").text
        sources[who] = GUIDES_APP.format(url=url, levels=FEW_LEVELS, example=example)
    names: dict[str, Any] = {}
    exec(sources["producers"], names)
    (tmp_path / "shop.py").write_text(sources["workers"])
    with closing(names["app"]) as app:
        declare(vhost_url, app)
        ids = [names["remind"].apply_async((7,), countdown=wait).id for wait in (None, 0.5)]
    command = (sys.executable, "-m", "celery", "-A", "shop", "worker", "--pool=solo", "-l", "INFO")
    log = tmp_path / "worker.log"
    with running(*command, log=log, cwd=tmp_path):
        wait_until(lambda: all(f"{each}] succeeded" in log.read_text() for each in ids))
    assert "access" not in log.read_text().lower()


def test_a_worker_without_delay_queues_names_them(vhost_url: str, tmp_path: Path) -> None:
    with fleet_on(vhost_url, tmp_path, **CONF | {"no_declare": False}) as fleet:
        worker = fleet.worker(more=QUIET)
        worker.wait_for_log("native delay is OFF", ".ready is missing", "delay declare")
        task_id = fleet.app().send_task("note").id
        fleet.record.wait_for(task_id=task_id)
