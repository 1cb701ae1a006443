"""Records of fenced runs in Redis or Valkey: one string of JSON per run, changed by scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, sleep
from types import TracebackType
from typing import Self, TypeVar

from ..errors import FenceUnavailable
from ..finding import Finding
from ..urls import redis_py_url, without_password
from .run import Record

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    from ..redis_server import findings
except ImportError as exc:
    raise FenceUnavailable(
        "a fence in Redis needs its client: pip install 'celery_native_delay[redis]'"
    ) from exc

T = TypeVar("T")

PREFIX = "native_delay_fence:"

_OPEN = """
local held = redis.call('GET', KEYS[1])
local record = held and cjson.decode(held)
if record and record.state ~= 'open' and not (record.state == 'aborted' and ARGV[3] == '1') then
    return held
end
local new = ARGV[1]
if record and record.state == 'open' then
    if record.deadline < cjson.decode(new).deadline then
        record.deadline = cjson.decode(new).deadline
    end
    new = cjson.encode(record)
end
redis.call('SET', KEYS[1], new, 'EX', ARGV[2])
return new
"""

_SEAL = """
local held = redis.call('GET', KEYS[1])
if held and cjson.decode(held).state ~= 'open' then
    return held
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return ARGV[1]
"""


class Store:
    """See :class:`~celery_native_delay.fence.contract.FenceStore`. Thread-safe."""

    def __init__(self, url: str, *, timeout_seconds: float, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._where = without_password(url)
        try:
            # redis-py's own retries would sleep for seconds, also where nobody has time.
            self._client = redis.Redis.from_url(
                redis_py_url(url),
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as exc:
            raise FenceUnavailable(f"expected the URL of a Redis: {exc}") from exc
        self._open = self._client.register_script(_OPEN)
        self._seal = self._client.register_script(_SEAL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()

    def open(self, run: str, record: Record, *, ttl_seconds: float, reopen: bool = False) -> Record:
        args = [record.to_json(), _whole(ttl_seconds), int(reopen)]
        return Record.from_json(self._ask(lambda: self._open([PREFIX + run], args)))

    def seal(self, run: str, record: Record, *, ttl_seconds: float) -> Record:
        args = [record.to_json(), _whole(ttl_seconds)]
        return Record.from_json(self._ask(lambda: self._seal([PREFIX + run], args)))

    def load(self, runs: Sequence[str]) -> list[Record | None]:
        found = self._ask(lambda: self._client.mget([PREFIX + run for run in runs]))
        return [None if text is None else Record.from_json(text) for text in found]

    def findings(self) -> list[Finding]:
        """See :class:`~celery_native_delay.fence.contract.FenceStore`."""
        return list(
            findings(
                self._client,
                key=f"{PREFIX}trial",
                check="fence",
                kept="the records of runs",
                where=f"native_delay_fence at {self._where}",
            )
        )

    def _ask(self, ask: Callable[[], T]) -> T:
        deadline = monotonic() + self._patience_seconds
        while True:
            try:
                return ask()
            except redis.RedisError as exc:
                lost = isinstance(exc, redis.ConnectionError | redis.TimeoutError)
                refused = isinstance(exc, redis.AuthenticationError)
                if refused or not lost or monotonic() >= deadline:
                    raise FenceUnavailable(
                        f"the fence's store does not serve: {type(exc).__name__}: {exc}"
                    ) from exc
            sleep(0.2)


def _whole(seconds: float) -> int:
    return max(round(seconds), 1)
