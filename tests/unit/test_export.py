"""Exports: frozen on paper, and all formats say what the plan says.

``python -m tests.unit.test_export`` writes the golden files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Choice
from hypothesis import given, settings
from kombu import Exchange as KombuExchange
from kombu import Queue as KombuQueue

from celery_native_delay import DelaySettings
from celery_native_delay.cli.export import export as command
from celery_native_delay.transports.exports import ExportAs
from celery_native_delay.transports.rabbitmq.blueprint import blueprint
from celery_native_delay.transports.rabbitmq.export import FORMATS, export
from celery_native_delay.transports.rabbitmq.topology import Binding, Exchange, Queue, Topology
from tests.brokers import in_ci
from tests.exporting import QUEUES, READERS, in_order
from tests.terraform import defaults, resources
from tests.unit.test_topology import delay_settings

GOLDEN = Path(__file__).parent / "golden"

SMALL: dict[str, Any] = {
    "levels": 6,
    "fused_bits": 3,
    "landing_exchanges": ("billing",),
}

ENDINGS = {
    "definitions": "json",
    "terraform": "tf",
    "kubernetes": "yaml",
    "dot": "dot",
    "mermaid": "mmd",
}

each_reader = pytest.mark.parametrize("form", READERS)


def exported(form: str, **how: Any) -> str:
    return export(DelaySettings(**SMALL), QUEUES, ExportAs(form, "shop/eu", **how)).text


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_is_as_it_was(form: str) -> None:
    """What users have under version control: a difference is theirs to apply."""
    assert exported(form) == (GOLDEN / f"export.{ENDINGS[form]}").read_text()


@each_reader
def test_a_format_says_what_the_plan_says(form: str) -> None:
    plan = blueprint(Topology(DelaySettings(**SMALL)), QUEUES)
    found = READERS[form](exported(form), vhost="shop/eu")
    assert in_order(found) == in_order(plan.declarations())


@pytest.mark.ci
@settings(deadline=None, max_examples=25)
@given(delay_settings(max_levels=14))
def test_the_expressions_of_terraform_are_the_plan_whatever_the_settings(
    chosen: DelaySettings,
) -> None:
    text = export(chosen, QUEUES[:1], ExportAs("terraform", "/")).text
    plan = blueprint(Topology(chosen), QUEUES[:1])
    found = READERS["terraform"](text, vhost="/")
    assert in_order(found) == in_order(plan.declarations())


@pytest.mark.parametrize("fused_bits", [in_ci(0), 15, 31])
def test_the_expressions_of_terraform_are_the_plan_of_all_levels(fused_bits: int) -> None:
    chosen = DelaySettings(fused_bits=fused_bits)
    text = export(chosen, [], ExportAs("terraform", "/")).text
    assert in_order(READERS["terraform"](text, vhost="/")) == in_order(Topology(chosen).plan())
    assert len(text.splitlines()) < 350


def test_terraform_takes_another_virtual_host_and_namespace() -> None:
    """And the names of the app's own queues stay."""
    text = exported("terraform")
    assert defaults(text) == {"vhost": "shop/eu", "namespace": "celery_delay"}
    changed = DelaySettings(**SMALL, namespace="shop.delays")
    other = export(changed, QUEUES, ExportAs("terraform", "other")).text
    found = resources(text, vhost="other", namespace="shop.delays")
    assert sorted(map(repr, found)) == sorted(map(repr, resources(other)))


def test_terraform_makes_the_marks_of_a_complete_set_last() -> None:
    last = resources(exported("terraform"))[-1]
    assert last.values["name"] == Topology(DelaySettings(**SMALL)).ready_exchange


def test_what_is_without_queues_binds_to_them_all_the_same() -> None:
    plan = blueprint(Topology(DelaySettings(**SMALL)), QUEUES)
    for form, read in READERS.items():
        found = read(exported(form, own_queues=False), vhost="shop/eu")
        assert in_order(found) == in_order(plan.delays())


def test_manifests_refer_to_the_cluster() -> None:
    def references(cluster: str) -> list[dict[str, str]]:
        documents = yaml.safe_load_all(exported("kubernetes", cluster=cluster))
        found = [document["spec"]["rabbitmqClusterReference"] for document in documents]
        assert all(each == found[0] for each in found)
        return found

    assert references("broker")[0] == {"name": "broker"}
    assert references("data/broker")[0] == {"name": "broker", "namespace": "data"}


@pytest.mark.parametrize("form", ["dot", "mermaid"])
def test_a_picture_of_the_default_levels_can_be_read(form: str) -> None:
    """A box for each level, whatever is fused; every queue of the app is in it."""
    how = ExportAs(form, "/")
    fused = export(DelaySettings(), QUEUES, how).text
    binary = export(DelaySettings(fused_bits=0), QUEUES, how).text
    assert len(fused.splitlines()) < len(binary.splitlines()) < 110
    assert "15 queues: 1 s to 15 s" in fused
    for queue in QUEUES[:-1]:
        assert queue.name in fused
    assert "orders.#".replace("#", "#35;" if form == "mermaid" else "#") in fused


# ---- the plan ----------------------------------------------------------------------------------


def plan_of(*queues: KombuQueue, **changes: Any) -> Any:
    return blueprint(Topology(DelaySettings(levels=2, **changes)), queues)


def test_what_comes_and_goes_is_left_out_and_named() -> None:
    exchange = KombuExchange("shop", type="topic")
    plan = plan_of(
        KombuQueue("lasting", exchange, routing_key="#"),
        KombuQueue("passing", exchange, routing_key="#", auto_delete=True),
        KombuQueue("mine", exchange, routing_key="#", exclusive=True),
        KombuQueue("forgotten", KombuExchange("lost", durable=False), durable=False),
    )
    assert plan.left_out == (
        "queue 'forgotten'",
        "exchange 'lost'",
        "queue 'mine'",
        "queue 'passing'",
    )
    assert plan.own == (
        Exchange("shop", "topic"),
        Queue("lasting"),
        Binding("shop", "lasting", "#"),
    )
    bound = {each.destination for each in plan.surroundings if isinstance(each, Binding)}
    assert bound == {"lasting"}


def test_exchanges_that_foreign_consumers_bind_to_land() -> None:
    plan = plan_of(landing_exchanges=("theirs",))
    topology = plan.topology
    names = {each.name for each in plan.surroundings if not isinstance(each, Binding)}
    assert names == {topology.landing_queue("theirs"), topology.lands_marker("theirs")}


def test_queue_arguments_are_those_that_kombu_makes() -> None:
    plan = plan_of(KombuQueue("few", expires=1.5, max_priority=3, message_ttl=2))
    assert plan.own == (
        Queue("few", {"x-expires": 1500, "x-max-priority": 3, "x-message-ttl": 2000}),
    )


def test_the_command_knows_every_format() -> None:
    (option,) = (param for param in command.params if param.name == "form")
    assert isinstance(option.type, Choice)
    assert sorted(option.type.choices) == sorted(FORMATS)


if __name__ == "__main__":
    for name, ending in ENDINGS.items():
        (GOLDEN / f"export.{ending}").write_text(exported(name))
