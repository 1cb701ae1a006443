"""Records of fenced runs in Redis or Valkey: one string of JSON per run, changed by scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from ..errors import FenceUnavailable
from ..finding import Finding
from ..settings import FENCE_URLS_TEXT, is_fence_url
from ..urls import redis_py_url, without_password
from .run import Record

T = TypeVar("T")

PREFIX = "native_delay_fence:"

_OPEN = """
local held = redis.call('GET', KEYS[1])
local record = held and cjson.decode(held)
local aborted = record and record.state == 'aborted' and not record.jobs[ARGV[3]]
if record and record.state ~= 'open' and not aborted then
    return held
end
local new = cjson.decode(ARGV[1])
if record and not aborted then
    record.deadline = math.max(record.deadline, new.deadline)
    new = record
end
new.jobs[ARGV[3]] = true
new = cjson.encode(new)
redis.call('SET', KEYS[1], new, 'EX', ARGV[2])
return new
"""

_SEAL = """
local held = redis.call('GET', KEYS[1])
local record = held and cjson.decode(held)
if record and record.state ~= 'open' then
    return held
end
local new = cjson.decode(ARGV[1])
new.jobs = record and record.jobs or new.jobs
new = cjson.encode(new)
redis.call('SET', KEYS[1], new, 'EX', ARGV[2])
return new
"""


def fence_store(
    url: str, *, timeout_seconds: float = 5.0, patience_seconds: float = 0.0
) -> FenceStore:
    """The store at *url*, whose connections end with the ``with`` block; or FenceUnavailable.

    Args:
        url: redis://, rediss:// or redis+socket://.
        timeout_seconds: of connecting, and of each answer.
        patience_seconds: to try on while it cannot be reached.
    """
    if not is_fence_url(url):
        raise FenceUnavailable(
            f"expected a fence URL that starts with {FENCE_URLS_TEXT}, "
            f"got {urlsplit(url).scheme or 'no scheme'!r}"
        )
    try:
        import redis
    except ImportError as exc:
        raise FenceUnavailable(
            "a fence in Redis needs its client: pip install 'celery_native_delay[redis]'"
        ) from exc
    return FenceStore(
        redis, url, timeout_seconds=timeout_seconds, patience_seconds=patience_seconds
    )


class FenceStore:
    """Records of runs, for drivers, executors and workers. Thread-safe.

    Every method raises FenceUnavailable when the store cannot be asked.
    """

    def __init__(
        self, redis: Any, url: str, *, timeout_seconds: float, patience_seconds: float
    ) -> None:
        self._redis = redis
        self._patience_seconds = patience_seconds
        self._where = without_password(url)
        try:
            # redis-py's own retries would sleep for seconds, also where there is no patience.
            self._client = redis.Redis.from_url(
                redis_py_url(url),
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1),
            )
        except ValueError as exc:
            raise FenceUnavailable(f"expected the URL of a Redis: {exc}") from exc
        self._open = self._client.register_script(_OPEN)
        self._seal = self._client.register_script(_SEAL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def open(self, run: str, record: Record, *, ttl_seconds: float, job: str) -> Record:
        """Keep an open *record* so long, and answer with the one in force: a sealed one stays.

        One that is open already gets the later deadline. An aborted one is replaced, unless *job*
        had opened that: workers may have dropped what the job has sent.
        """
        args = [record.to_json(), _whole(ttl_seconds), job]
        return Record.from_json(self._ask(lambda: self._open([PREFIX + run], args)))

    def seal(self, run: str, record: Record, *, ttl_seconds: float) -> Record:
        """Replace an open record, or none, by *record*; the record in force: a sealed one stays."""
        args = [record.to_json(), _whole(ttl_seconds)]
        return Record.from_json(self._ask(lambda: self._seal([PREFIX + run], args)))

    def load(self, runs: Sequence[str]) -> list[Record | None]:
        """The records of these runs, None for those that the store has not."""
        found = self._ask(lambda: self._client.mget([PREFIX + run for run in runs]))
        return [None if text is None else Record.from_json(text) for text in found]

    def findings(self) -> list[Finding]:
        """Faults of the store; that it is away as well."""
        from ..redis_server import findings  # imports redis-py

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
        lost = self._redis.ConnectionError, self._redis.TimeoutError
        while True:
            try:
                return ask()
            except self._redis.RedisError as exc:
                refused = isinstance(exc, self._redis.AuthenticationError)
                if refused or not isinstance(exc, lost) or monotonic() >= deadline:
                    raise FenceUnavailable(
                        f"the fence's store does not serve: {type(exc).__name__}: {exc}"
                    ) from exc
            sleep(0.2)


def _whole(seconds: float) -> int:
    return max(round(seconds), 1)
