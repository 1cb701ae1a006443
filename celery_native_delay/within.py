"""Calls with a time limit, for drivers that have none: they run in threads of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from queue import Empty, SimpleQueue
from threading import Lock, Thread, local
from typing import Any, TypeVar

from .errors import errors_ignored

T = TypeVar("T")

#: Calls that run at the same time. Further calls wait for one of these to return.
MOST_AT_ONCE = 8

#: Seconds that a caller waits longer for a call that is committing.
COMMIT_SECONDS = 1.0

_running = local()

_Job = tuple[Callable[[], Any], "Future[Any]", Callable[[Any], object]]


class Within:
    """Runs calls in daemon threads, and waits for each call at most *seconds*.

    A call that takes longer raises TimeoutError, and goes on in its thread. It may still succeed.
    But if *rolls_back* is True, a call that is committing is waited for, and another one ends in
    :func:`before_commit`.
    """

    def __init__(
        self, seconds: float, *, name: str = "native-delay-calls", rolls_back: bool = False
    ) -> None:
        self.seconds = seconds
        self._name = name
        self._rolls_back = rolls_back
        self._forget_threads()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._forget_threads)

    def _forget_threads(self) -> None:
        self._idle: SimpleQueue[SimpleQueue[_Job]] = SimpleQueue()
        self._count = 0
        self._counting = Lock()

    def __call__(
        self, call: Callable[[], T], *, undo: Callable[[T], object] = lambda result: None
    ) -> T:
        """Return the result of *call*, or raise its error, or TimeoutError.

        *undo* is called with a result that comes after the TimeoutError.
        """
        jobs = self._free_thread()
        future: Future[T] = Future()
        jobs.put((call, future, undo))
        try:
            return future.result(self.seconds)
        except TimeoutError:
            if future.cancel():
                raise TimeoutError(f"no answer within {self.seconds:g} s") from None
            if not wait([future], COMMIT_SECONDS).done:
                raise TimeoutError("no answer to a commit, which may still succeed") from None
            return future.result()  # it came at the last moment, or is the call's own error

    def _free_thread(self) -> SimpleQueue[_Job]:
        try:
            return self._idle.get_nowait()
        except Empty:
            pass
        with self._counting:
            is_new = self._count < MOST_AT_ONCE
            self._count += is_new
        if is_new:
            jobs: SimpleQueue[_Job] = SimpleQueue()
            Thread(target=self._run, args=(jobs,), name=self._name, daemon=True).start()
            return jobs
        try:
            return self._idle.get(timeout=self.seconds)
        except Empty:
            raise TimeoutError(f"{MOST_AT_ONCE} earlier calls have not returned") from None

    def _run(self, jobs: SimpleQueue[_Job]) -> None:
        while True:
            call, future, undo = jobs.get()
            _running.future = future if self._rolls_back else None
            try:
                result = call()
            except BaseException as exc:  # the caller's thread raises it
                error: BaseException | None = exc
            else:
                error = None
            # Before the caller goes on, so that its next call finds this thread.
            self._idle.put(jobs)
            try:
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
            except InvalidStateError:  # the caller has given up
                if error is None:
                    with errors_ignored():
                        undo(result)
            del call, future, undo, error


def before_commit() -> None:
    """Raise TimeoutError if the caller of this thread's call has given it up.

    So a transaction that its caller was told has failed, for example as it waited for a lock, is
    rolled back. In other threads than those of a :class:`Within` that rolls back, do nothing.
    """
    future: Future[Any] | None = getattr(_running, "future", None)
    if future is None or future.running():
        return
    if not future.set_running_or_notify_cancel():
        raise TimeoutError("the caller has given up")
