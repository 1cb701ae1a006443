"""``celery inspect delayed``: what waits, in the shape of ``inspect scheduled``.

Every worker gives the same answer, so ask one (``--destination``), or ``celery -A PROJ delay ls``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery.worker.control import inspect_command

from ..durations import duration
from ..errors import NativeDelayError
from ..records.waiting import Waiting
from .delay import Delay

#: What Celery gives the tasks of its own timer.
_PRIORITY = 6

#: So long a worker waits for the records, in seconds: it does nothing else meanwhile, and ``celery
#: inspect`` waits no longer by itself.
PATIENCE_SECONDS = 1.0

_WAY_OUT = "ask again, or `celery -A PROJ delay ls`"

_asking = ThreadPoolExecutor(1, thread_name_prefix="native-delay-inspect")


@inspect_command(signature="[limit=50]", args=[("limit", int)])  # type: ignore[untyped-decorator]
def delayed(state: Any, limit: int = 50, **_: Any) -> Any:
    """Tasks that wait in the broker, the same from every worker."""
    asked = _asking.submit(Delay(state.app).ls, limit=limit)
    try:
        page = asked.result(PATIENCE_SECONDS)
    except TimeoutError:
        asked.cancel()
        return {
            "error": f"no answer from the records within {duration(PATIENCE_SECONDS)}: {_WAY_OUT}"
        }
    except NativeDelayError as exc:
        return {"error": str(exc)}
    return [_as_scheduled(task) for task in page.tasks]


def _as_scheduled(task: Waiting) -> dict[str, Any]:
    return {
        "eta": task.due.isoformat(),
        "priority": _PRIORITY,
        "request": {
            "id": task.id,
            "name": task.name,
            "args": task.args,
            "kwargs": task.kwargs,
            "type": task.name,
            "hostname": None,
            "time_start": None,
            "acknowledged": False,
            "delivery_info": {
                "exchange": task.exchange,
                "routing_key": task.routing_key,
                "priority": None,
                "redelivered": False,
            },
            "worker_pid": None,
        },
    }
