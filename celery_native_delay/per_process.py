"""Caches values per process, such as connections to a server, and acts in forked children.

A forked child must not use the sockets of its parent. It may close its copy of a socket, but must
not shut the socket down: that would end the parent's connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import RLock
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def in_forked_children(act: Callable[[], object]) -> None:
    """Call *act* in each child process that ``os.fork`` makes, before any other code runs there.

    ``multiprocessing``, gunicorn, uWSGI and Celery's prefork pool make their children so.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=act)


class PerProcess(Generic[Key, Value]):
    """A cache of values by key, which is empty in each forked child process.

    After a fork, the child process calls the function *abandon* with each value from its parent.
    """

    def __init__(self, abandon: Callable[[Value], object] = lambda value: None) -> None:
        self._abandon = abandon
        self._values: dict[Key, Value] = {}
        self._making = RLock()
        in_forked_children(self._leave_to_parent)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the cached value of *key*, or make and cache a new value."""
        value = self._values.get(key)
        if value is None:
            with self._making:
                value = self._values.get(key)
                if value is None:
                    value = self._values[key] = make()
        return value

    def forget(self, key: Key) -> Value | None:
        """Remove the cached value of *key*, and return it."""
        return self._values.pop(key, None)

    def values(self) -> list[Value]:
        return list(self._values.values())

    def _leave_to_parent(self) -> None:
        self._making = RLock()  # another thread of the parent may have held it
        for value in self._values.values():
            self._abandon(value)
        self._values.clear()
