"""Read queues, exchanges, bindings and policies from RabbitMQ's management API."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
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

#: The field in a queue's description that names its policy, by kind of policy.
POLICY_KINDS = {"policy": "policy", "operator policy": "operator_policy"}

_WAYS_OUT = {
    "policy": "narrow its pattern, or give a policy for ^{ours} without these keys a higher "
    "priority",
    "operator policy": "ask the broker's administrator to narrow its pattern: your own policies "
    "cannot override it",
}

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

    def described(self) -> list[dict[str, Any]]:
        """Return all queues, with their arguments, policies and numbers of ready messages."""
        columns = "name,arguments,effective_policy_definition,policy,messages_ready"
        return self._containing("queues", "", columns=columns)

    def policies(self, kind: str) -> list[dict[str, Any]] | None:
        """Return all policies of *kind* ("policy" or "operator policy"), or None after an error."""
        path = kind.replace("policy", "policies").replace(" ", "-")
        try:
            found: list[dict[str, Any]] = self._get(f"{path}/{quote(self.vhost, safe='')}")
        except ManagementUnavailable:
            return None
        return found

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
    """Find RabbitMQ policies that override the arguments of this package's queues."""
    levels = "quorum_queues"
    queues = {hop.queue: levels for hop in topology.level_queues}
    queues[topology.parking_queue] = "quorum_queues"
    touched: dict[tuple[str, str, str], list[str]] = {}
    # The management API shows the policy of a new queue only after some seconds. So this function
    # compares the patterns of the policies with the names of the queues.
    for kind, key in POLICY_KINDS.items():
        policies = api.policies(kind)
        described = {} if policies is not None else _described(api, topology, key)
        for queue, kinds in queues.items():
            name, definition = described.get(queue) or applied_policy(policies, queue, kinds)
            if keys := [key for key in OVERRIDING_KEYS if key in definition]:
                touched.setdefault((kind, name, ", ".join(keys)), []).append(queue)
    return [
        Finding(
            "policies",
            WRONG,
            f"{kind} {name!r} sets {keys} on {len(found)} delay queue(s) such as {found[0]}: "
            f"delayed messages may come early or get lost",
            _WAYS_OUT[kind].format(ours=re.escape(topology.space)),
        )
        for (kind, name, keys), found in touched.items()
    ]


@dataclass(frozen=True)
class Refusing:
    """A queue that refuses messages when it is full, and has no landing queue in front of it."""

    queue: str
    #: The policy or the arguments that let the queue refuse messages.
    reason: str
    #: True if the queue was full at the last count.
    is_full: bool
    #: The binding keys with which the queue is bound to the delivery exchange.
    patterns: tuple[str, ...]

    def __str__(self) -> str:
        return f"queue {self.queue!r} {'refuses' if self.is_full else 'may refuse'} messages"


def refusing_queues(api: ManagementAPI, topology: Topology) -> list[Refusing]:
    """Find queues that could hold up the delayed messages of other queues when they are full."""
    bound: dict[str, list[str]] = {}
    exchanges = api.names("exchanges", containing=topology.delivery_exchange)
    is_declared = topology.delivery_exchange in exchanges
    for binding in api.bindings_from(topology.delivery_exchange) if is_declared else ():
        queue, pattern = binding["destination"], binding["routing_key"]
        is_own = topology.is_landing(queue) or pattern == topology.own_pattern(queue)
        if binding["destination_type"] == "queue" and not is_own:
            bound.setdefault(queue, []).append(pattern)
    policies = api.policies("policy") if bound else None
    found = []
    for queue in api.described() if bound else ():
        if queue["name"] not in bound:
            continue
        arguments = queue.get("arguments") or {}
        if policies is None:
            name, policy = queue.get("policy"), queue.get("effective_policy_definition") or {}
        else:
            # As above: the management API shows the policy of a new queue only after some seconds.
            kinds = f"{arguments.get('x-queue-type', 'classic')}_queues"
            name, policy = applied_policy(policies, queue["name"], kinds)
        overflow = arguments.get("x-overflow") or policy.get("overflow") or ""
        if overflow.startswith("reject-publish"):
            by_policy = f"policy {name!r} sets overflow: {overflow}"
            by_arguments = f"its arguments set x-overflow: {overflow}"
            reason = by_arguments if "x-overflow" in arguments else by_policy
            limits = [arguments.get("x-max-length"), policy.get("max-length")]
            most = min((each for each in limits if each is not None), default=inf)
            is_full = queue.get("messages_ready", 0) >= most
            found.append(Refusing(queue["name"], reason, is_full, tuple(bound[queue["name"]])))
    return found


def refusing_findings(api: ManagementAPI, topology: Topology) -> list[Finding]:
    """Name the queues that could hold up the delayed messages of other queues."""
    return [
        Finding(
            "full queues",
            WRONG,
            f"{refusing}, and {refusing.reason}: 32 due messages for it would stop the delayed "
            f"messages of all queues",
            f"start an installed worker that may read the management API, or add "
            f"{refusing.queue!r} to native_delay_landing",
        )
        for refusing in refusing_queues(api, topology)
    ]


def applied_policy(
    policies: Sequence[Mapping[str, Any]] | None, queue: str, kinds: str
) -> tuple[str, Mapping[str, Any]]:
    """Return the name and definition of the policy of *queue*, or ("", {}) without a policy.

    *kinds* is the queue's type in ``apply-to``, such as "quorum_queues".
    """
    matching = [
        policy
        for policy in policies or []
        if policy.get("apply-to", "all") in ("all", "queues", kinds)
        and _matches(policy["pattern"], queue)
    ]
    # https://www.rabbitmq.com/docs/policies
    best = max(matching, key=lambda policy: policy.get("priority", 0), default=None)
    return (best["name"], best["definition"]) if best else ("", {})


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # a pattern of PCRE that Python does not know
        return False


def _described(
    api: ManagementAPI, topology: Topology, key: str
) -> dict[str, tuple[str, Mapping[str, Any]]]:
    return {
        queue["name"]: (queue[key], queue.get("effective_policy_definition") or {})
        for queue in api.named("queues", f"{topology.space}.")
        if queue.get(key)
    }
