"""Read queues, exchanges, bindings and policies from RabbitMQ's management API."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from ...errors import ManagementUnavailable
from ...finding import WRONG, Finding
from ...settings import DelaySettings
from .topology import Topology

TIMEOUT_SECONDS = 3.0

#: Policy keys that change how long a message waits, or whether it survives the wait.
OVERRIDING_KEYS = (
    "message-ttl",
    "max-length",
    "max-length-bytes",
    "max-in-memory-length",
    "overflow",
    "expires",
    "dead-letter-exchange",
    "dead-letter-routing-key",
    "dead-letter-strategy",
    "delivery-limit",
    # RabbitMQ 4.3: a message that is returned to the queue waits again.
    "delayed-retry-type",
    "delayed-retry-min",
    "delayed-retry-max",
)

_PAGE = 500


class ManagementAPI:
    """A client of RabbitMQ's management API for one virtual host."""

    def __init__(self, url: str, user: str, password: str, vhost: str, cluster: str) -> None:
        self.url = url.rstrip("/").removesuffix("/api")
        self.vhost = vhost
        self._cluster = cluster
        self._checked = False
        token = b64encode(f"{user}:{password}".encode()).decode()
        self._headers = {"Authorization": f"Basic {token}"}

    def named(self, kind: str, prefix: str) -> list[dict[str, Any]]:
        """Return items of *kind* ("queues" or "exchanges") whose names begin with *prefix*."""
        return [item for item in self._containing(kind, prefix) if item["name"].startswith(prefix)]

    def names(self, kind: str, *, containing: str) -> list[str]:
        return [item["name"] for item in self._containing(kind, containing)]

    def described(self, text: str = "") -> list[dict[str, Any]]:
        """Return the queues with *text* in their names, with their arguments and policies."""
        columns = "name,arguments,effective_policy_definition,policy,operator_policy"
        return self._containing("queues", text, columns=columns)

    def bindings_from(self, exchange: str) -> list[dict[str, Any]]:
        path = f"exchanges/{quote(self.vhost, safe='')}/{quote(exchange, safe='')}/bindings/source"
        found: list[dict[str, Any]] = self._get(path)
        return found

    def _containing(self, kind: str, text: str, *, columns: str = "") -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        page, pages = 1, 1
        while page <= pages:
            answer = self._get(
                f"{kind}/{quote(self.vhost, safe='')}"
                f"?pagination=true&page={page}&page_size={_PAGE}&name={quote(text, safe='')}"
                + (f"&columns={columns}" if columns else "")
            )
            items += answer["items"]
            page, pages = page + 1, answer["page_count"]
        return items

    def _get(self, path: str) -> Any:
        if not self._checked and path != "overview":
            found = self._get("overview").get("cluster_name")
            if found != self._cluster:
                raise ManagementUnavailable(
                    f"the management API at {self.url} belongs to the broker {found!r}, "
                    f"the AMQP connection to {self._cluster!r}: set native_delay_management_url"
                )
            self._checked = True
        request = Request(f"{self.url}/api/{path}", headers=self._headers)
        try:
            with urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                return json.load(response)
        except (URLError, OSError, ValueError) as exc:
            raise ManagementUnavailable(
                f"RabbitMQ's management API at {self.url} does not answer ({exc}): where you may, "
                f"enable the plugin rabbitmq_management and give the user the tag monitoring, or "
                f"set native_delay_management_url"
            ) from exc


def management_of(connection: Any, settings: DelaySettings) -> ManagementAPI:
    user, password = connection.userid or "guest", connection.password or "guest"
    password = password() if callable(password) else password
    url = settings.management_url or f"http://{connection.hostname or 'localhost'}:15672"
    parts = urlsplit(url)
    if parts.username:
        user, password = unquote(parts.username), unquote(parts.password or "")
        url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    vhost = connection.virtual_host or "/"
    # Another broker on this host may have the default port.
    cluster = connection.connection.server_properties.get("cluster_name", "")
    return ManagementAPI(url, user, password, vhost, cluster)


def overriding_policies(api: ManagementAPI, topology: Topology) -> list[Finding]:
    """Find RabbitMQ policies that override the arguments of this package's queues.

    The management API shows the policy of a new queue only after some seconds.
    """
    described = {queue["name"]: queue for queue in api.described(topology.space)}
    touched: dict[tuple[str, str], list[str]] = {}
    for name in (*(hop.queue for hop in topology.level_queues), topology.parking_queue):
        queue = described.get(name, {})
        definition = queue.get("effective_policy_definition") or {}
        if keys := [key for key in OVERRIDING_KEYS if key in definition]:
            touched.setdefault((_policies_of(queue), ", ".join(keys)), []).append(name)
    return [
        Finding(
            "policies",
            WRONG,
            f"{policies} sets {keys} on {len(found)} delay queue(s) such as {found[0]}: "
            f"delayed messages may come early or get lost",
            f"narrow its pattern, or give a policy for ^{re.escape(topology.space)} without these "
            f"keys a higher priority. Only an administrator can change an operator policy",
        )
        for (policies, keys), found in touched.items()
    ]


@dataclass(frozen=True)
class Refusing:
    """A queue that refuses messages when it is full, and has no landing queue in front of it."""

    queue: str
    #: The policy or the arguments that let the queue refuse messages.
    reason: str
    #: The binding keys with which the queue is bound to the delivery exchange.
    patterns: tuple[str, ...]

    def __str__(self) -> str:
        return f"queue {self.queue!r} may refuse messages, and {self.reason}"


def refusing_queues(api: ManagementAPI, topology: Topology) -> list[Refusing]:
    """Find queues that could hold up the delayed messages of other queues when they are full."""
    exchanges = api.names("exchanges", containing=topology.delivery_exchange)
    if topology.delivery_exchange not in exchanges:
        return []
    bound: dict[str, list[str]] = {}
    for binding in api.bindings_from(topology.delivery_exchange):
        queue, pattern = binding["destination"], binding["routing_key"]
        # A queue with a landing queue in front of it is bound with its own pattern.
        if pattern != topology.own_pattern(queue) and not topology.is_landing(queue):
            bound.setdefault(queue, []).append(pattern)
    return [
        Refusing(name, reason, tuple(bound[name]))
        for queue in (api.described() if bound else ())
        if (name := queue["name"]) in bound and (reason := _refuses_by(queue))
    ]


def refusing_findings(api: ManagementAPI, topology: Topology) -> list[Finding]:
    """Name the queues that could hold up the delayed messages of other queues."""
    return [
        Finding(
            "full queues",
            WRONG,
            f"{found}: 32 due messages for it would stop the delayed messages of all queues",
            f"start an installed worker that may read the management API, or add {found.queue!r} "
            f"to native_delay_landing",
        )
        for found in refusing_queues(api, topology)
    ]


def _refuses_by(queue: Mapping[str, Any]) -> str | None:
    """Return the arguments or the policy by which a full queue refuses messages; None if neither.

    The arguments of a queue count more than its policy.
    """
    by_arguments = (queue.get("arguments") or {}).get("x-overflow")
    by_policy = (queue.get("effective_policy_definition") or {}).get("overflow")
    if not str(by_arguments or by_policy).startswith("reject-publish"):
        return None
    if by_arguments:
        return f"its arguments set x-overflow: {by_arguments}"
    return f"{_policies_of(queue)} sets overflow: {by_policy}"


def _policies_of(queue: Mapping[str, Any]) -> str:
    kinds = {"policy": queue.get("policy"), "operator policy": queue.get("operator_policy")}
    return " with ".join(f"{kind} {name!r}" for kind, name in kinds.items() if name)
