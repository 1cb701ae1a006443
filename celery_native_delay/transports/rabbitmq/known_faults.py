"""Releases of RabbitMQ whose faults delayed messages meet. Pure."""

from __future__ import annotations

from ...finding import ADVICE, WRONG, Finding

_CHECK = "release"


def known_faults(version: tuple[int, ...], *, replicated: bool | None) -> list[Finding]:
    """Known faults of a release such as (4, 3, 6), and the way out where there is a choice.

    *replicated*: the delay levels have several members; None where that is not known.
    """
    name = f"RabbitMQ {'.'.join(map(str, version))}"
    found = []
    # https://github.com/rabbitmq/rabbitmq-server/pull/16203
    if replicated is not False and ((4, 2) <= version < (4, 2, 7) or (4, 3) <= version < (4, 3, 1)):
        problem = (
            f"{name}: at-least-once dead lettering may ask the wrong replica (rabbitmq-server "
            f"#16203), so that delayed messages of a cluster hang between two levels"
        )
        found.append(Finding(_CHECK, WRONG, problem, _upgrade(version)))
    # https://github.com/rabbitmq/rabbitmq-server/issues/16085
    if (4, 3) <= version < (4, 3, 1):
        problem = (
            f"{name}: even looking whether a queue is there takes the permission configure "
            f"(rabbitmq-server #16085), which producers and `delay status` may lack"
        )
        found.append(Finding(_CHECK, ADVICE, problem, _upgrade(version)))
    if version[:1] == (3,):
        problem = (
            f"{name}: messages that were between two levels when a node died or restarted hang for "
            f"dead_letter_worker_publisher_confirm_timeout, 180 s by default"
        )
        way_out = (
            "where you may write advanced.config, set it to 10000-30000 ms (application rabbit); "
            "RabbitMQ 4 is quicker by itself"
        )
        found.append(Finding(_CHECK, ADVICE, problem, way_out))
    return found


def _upgrade(version: tuple[int, ...]) -> str:
    fixed = "4.3.1" if version >= (4, 3) else "4.2.7"
    return f"upgrade to {fixed} or newer, where you may choose the release"
