"""Publishes the periodic tasks of schedule entries in a worker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any

from celery import signals
from celery.utils.log import get_logger

from ..app.schedules import Schedules
from ..errors import described
from ..schedules.state import BEAT_TASK, EXPIRED, HEADER, occurrence_of
from .arrival import Arrival, AskAgain, Drop, Ruling

logger = get_logger(__name__)

#: Seconds between two checks of the schedule entries.
LOOK_SECONDS = 30.0


class Scheduling:
    """Publishes a schedule entry's next message when the worker receives the current message."""

    def __init__(self, app: Any, timer: Any) -> None:
        self._schedules = Schedules(app)
        self._timer = timer
        self._look_seconds = min(app.conf.beat_max_loop_interval or LOOK_SECONDS, LOOK_SECONDS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="native-delay-schedules")
        self._beat_noted = -LOOK_SECONDS
        self._app = app
        signals.task_revoked.connect(self._note_revoked)
        signals.task_unknown.connect(self._note_unknown)

    def __call__(self, arrival: Arrival) -> Ruling | None:
        headers = arrival.fields if arrival.has_headers else {}
        occurrence = occurrence_of(headers)
        if occurrence is None:
            # An occurrence that waited again, or is retried, comes back without its mark.
            is_sent_now = arrival.delayed is None and not headers.get("retries")
            if headers.get(BEAT_TASK) and is_sent_now:
                # Plain Celery's beat does not send the entry's name.
                self._note_beat(str(headers.get("periodic_task_name") or arrival.name))
            return None
        redelivered = bool((arrival.message.delivery_info or {}).get("redelivered"))
        message = arrival.message
        app, entry, number = occurrence
        schedules = self._schedules.of(app)
        decided: Future[tuple[str | None, bool]] | None = getattr(message, "decided", None)
        if decided is None:
            # In another thread: the store and the broker may take their time.
            decided = message.decided = Future()
            decide = partial(_decide, schedules, entry, number, arrival, redelivered, decided)
            self.in_thread(decide)
        if not decided.done():
            begins = partial(_when, decided)
            return AskAgain(0.0, beside_prefetch=True, from_here=True, begin_when=begins)
        try:
            why, runs = decided.result()
        except Exception as exc:  # then the occurrence waits, so that no run is lost
            text = "native delay: schedule entry %s waits: %s"
            logger.warning(text, entry, described(exc))
            del message.decided
            return arrival.until_store_answers()
        # Another gate may let the message wait again, longer than until the next occurrence.
        arrival.message.headers.pop(HEADER)
        if runs:
            self.in_thread(lambda: schedules.note_run(entry))
        return None if why is None else Drop(why)

    def start(self) -> None:
        """Check the schedule entries now, and then at least every 30 s.

        Each check publishes the messages of new and changed entries, and replaces lost messages.
        Call this method again after each reconnect: Celery cancels the worker's timers when the
        connection is lost.
        """
        publish = (self._schedules.publish,)
        self.in_thread(*publish)
        self._timer.call_repeatedly(self._look_seconds, self.in_thread, publish)

    def close(self) -> None:
        signals.task_revoked.disconnect(self._note_revoked)
        signals.task_unknown.disconnect(self._note_unknown)
        self._thread.shutdown(cancel_futures=True)

    def _note_beat(self, name: str) -> None:
        if monotonic() - self._beat_noted >= LOOK_SECONDS:
            self._beat_noted = monotonic()
            self.in_thread(lambda: self._schedules.note_beat(name))

    def _note_revoked(
        self, sender: Any, request: Any, *, terminated: bool, expired: bool, **_: Any
    ) -> None:
        """Store that Celery discarded an occurrence after this gate had let it pass."""
        name = vars(request).get("periodic_task_name")
        if name is None or terminated or sender.app is not self._app:
            return
        note = self._schedules.note_left_out
        self.in_thread(lambda: note(name, request.id, EXPIRED if expired else None))

    def _note_unknown(self, sender: Any, message: Any, name: str, id: str, **_: Any) -> None:
        """Store that a worker does not know the task of an occurrence; no gate sees such a task."""
        occurrence = occurrence_of(message.headers or {})
        if occurrence is None or sender.app is not self._app:
            return
        note = self._schedules.of(occurrence.app).note_left_out
        self.in_thread(
            lambda: note(occurrence.entry, id, f"a worker does not know the task {name}")
        )

    def in_thread(self, job: Callable[[], object]) -> None:
        """Run *job* in the thread for schedule entries, and log errors."""
        self._thread.submit(_logged, job)


def _decide(
    schedules: Schedules,
    entry: str,
    number: int,
    arrival: Arrival,
    redelivered: bool,
    decided: Future[tuple[str | None, bool]],
) -> None:
    """Publish the next occurrence; decide why this one is dropped, if so, and if it runs."""
    try:
        discarded = arrival.discarded
        why = schedules.advance(
            entry, number, arrival.id, redelivered=redelivered, discarded=discarded
        )
        runs = why is None and discarded is None
        if runs:
            why = schedules.send_anew(entry, arrival.name, arrival.id)
    except BaseException as exc:  # the gate raises it
        decided.set_exception(exc)
    else:
        decided.set_result((why, runs))


def _when(decided: Future[Any], start: Callable[[], object]) -> None:
    """Call *start* when the decision has been made, in the thread that made it."""
    decided.add_done_callback(lambda _: start())


class LeftToBeat(Scheduling):
    """Drops the occurrences of a draining app, whose entries ``celery beat`` sends again."""

    def __call__(self, arrival: Arrival) -> Ruling | None:
        occurrence = occurrence_of(arrival.fields) if arrival.has_headers else None
        if occurrence is not None and occurrence.app == str(self._app.main or ""):
            return Drop('native_delay_enabled is "drain", so celery beat sends this entry')
        return super().__call__(arrival)

    def start(self) -> None:
        """Publish no entries."""


def _logged(job: Callable[[], object]) -> None:
    try:
        job()
    except Exception as exc:  # of the store, or of a scheduler with a database
        logger.warning("native delay: cannot publish schedule entries: %s", described(exc))
