"""The operations on DIDComm connections, totals over them, live sessions, and what is on its way to endpoints."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.mailboxes.bounds import DAY
from mediator.operate.operations import (
    COUNT,
    FLAG,
    TENANT,
    TEXT,
    Answer,
    OperationRequest,
    Right,
    about,
    is_allowed,
    limit,
    many,
    object_schema,
    operation,
    table,
    whole,
)
from pickup.broker import MediationBroker
from pickup.connection_use import HOUR
from pickup.dids.identities import OwnIdentities
from pickup.endpoint_relay import MAX_WORKERS, EndpointRelay
from pickup.live_sessions import MAX_SESSIONS, LiveSessions
from pickup.operate.records import (
    ConnectionDetails,
    ConnectionSummary,
    LiveSessionView,
    RankedConnection,
    RouteView,
    TrafficOfHour,
)
from pickup.outbound import MAX_BYTES, MAX_MESSAGES, OutboundQueue
from pickup.rules import listing
from pickup.rules.granting import is_denied
from pickup.rules.listing import ConnectionView
from pickup.rules.names import MAX_NAME, canonical
from pickup.rules.records import Route, Verdict
from pickup.rules.tables import ConnectionRow

PAGE = 1000
"""Connections read at once, so that other reads get their turn."""
MAX_COUNTED = 200_000
"""Connections that are looked at, the oldest ones; the total counts all."""
SHOWN_HOURS = 24

AGES = (("hour", HOUR), ("day", DAY), ("week", 7 * DAY), ("month", 30 * DAY))
OLDER = "older"
QUEUES = (("0", 0), ("1-9", 9), ("10-99", 99), ("100-999", 999), ("1000-9999", 9999))
LONGER = "10000+"


async def collect(mediation: MediationBroker, tenant: str) -> dict[str, Any]:
    """Return the totals; ``hours`` are of all tenants and instances."""
    now, after, more, total = mediation.clock(), 0, True, 0
    counts: dict[str, Counter[str]] = {
        "didcomm": Counter(), "pickup": Counter(), "transport": Counter(),
        "created": Counter(dict.fromkeys((*dict(AGES), OLDER), 0)),
        "seen": Counter(dict.fromkeys((*dict(AGES), OLDER), 0)),
        "queues": Counter(dict.fromkeys((*dict(QUEUES), LONGER), 0)),
    }  # fmt: skip
    counted = messages = size = 0
    while more and counted < MAX_COUNTED:
        page = await mediation.list_connections(tenant, after, PAGE)
        more, total = page.more, page.total
        for view in page.views:
            _count(counts, view, now)
            counted += 1
            if view.mailbox is not None:
                messages += view.mailbox.messages
                size += view.mailbox.bytes
        after = page.views[-1].connection.id if page.views else after
    await mediation.uses.flush()
    since = now - now % HOUR - (SHOWN_HOURS - 1) * HOUR
    hours = await mediation.read(lambda tx, _now: tx.uses.hours(since))
    return {
        "connections": total,
        "counted": counted,
        "messages": messages,
        "bytes": size,
        **{name: dict(counter) for name, counter in counts.items()},
        "hours": [TrafficOfHour.of(traffic, began_at=at).to_json() for at, traffic in hours],
    }


def _count(counts: dict[str, Counter[str]], view: ConnectionView, now: int) -> None:
    connection, use = view.connection, view.use
    counts["didcomm"][connection.generation.value] += 1
    counts["pickup"][use.pickup or "none"] += 1
    counts["transport"][use.transport or "none"] += 1
    counts["created"][_age(now - connection.created_at)] += 1
    counts["seen"][_age(now - view.seen_at)] += 1
    waiting = 0 if view.mailbox is None else view.mailbox.messages
    counts["queues"][next((name for name, limit in QUEUES if waiting <= limit), LONGER)] += 1


def _age(span: int) -> str:
    return next((name for name, limit in AGES if span < limit), OLDER)


class OperationTenants:
    """The tenants that have an identity."""

    def __init__(self, names: Sequence[str], identities: OwnIdentities) -> None:
        """``names`` may change while the service runs."""
        self._names = names
        self._identities = identities

    async def of(self, request: OperationRequest) -> str:
        """Return the tenant of a request, ``default`` if it has none; :class:`BadRequestError` lists those known."""
        tenant = request.get("tenant", "") or DEFAULT_TENANT
        if tenant not in self._names:
            raise BadRequestError("tenant", f"expected one of {', '.join(self._names)}")
        await self._identities.ensure()
        return tenant


MAX_LISTED: Final = 500
MAX_ROUTES: Final = 100
"""Keys of a connection that are shown; a DID may have thousands of characters."""
MAX_NUMBER: Final = 1 << 62
LOOKED_AT: Final = 10_000
"""Connections of one tenant that are compared, the newest: the index has them in order of their numbers alone."""
FRESH_SECONDS: Final = 4.0
"""What was read for one question serves its next pages for so long."""
ORDERS: Final = ("newest", "depth", "size", "age", "idle")

_COUNTS = table(COUNT)
_NOTHING: Final = ("", "", False), 0.0, list[ConnectionRow]()
_KEYS: Final[Mapping[str, Callable[[ConnectionRow], int]]] = {
    "depth": lambda row: -row.messages,
    "size": lambda row: -row.bytes,
    "age": lambda row: row.oldest_at or MAX_NUMBER,
    "idle": lambda row: row.seen_at,
}

_TENANT = {"tenant": TENANT}
_ONE = {**_TENANT, "connection": whole("The number of a connection.", 0, MAX_NUMBER)}


class ConnectionOperations:
    """Times in replies are Unix seconds."""

    def __init__(self, mediation: MediationBroker, sessions: LiveSessions, tenants: OperationTenants) -> None:
        self._mediation = mediation
        self._sessions = sessions
        self._tenants = tenants
        self._search_lock = asyncio.Lock()
        self._found_rows: tuple[tuple[str, str, bool], float, list[ConnectionRow]] = _NOTHING
        """The last question, when it was asked, and what was found."""

    @operation(
        "connections-list",
        Right.READ,
        "The DIDComm connections of a tenant",
        object_schema(connections=many(ConnectionSummary.schema()), more=FLAG, total=COUNT),
        fields={
            **_TENANT,
            "after": whole("Begin behind this connection.", 0, MAX_NUMBER, default=0),
            "limit": limit(MAX_LISTED),
        },
        path="/connections",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        tenant = await self._tenants.of(request)
        after, limit = request["after"], request["limit"]
        page = await self._mediation.list_connections(tenant, after, limit)
        return {
            "connections": [ConnectionSummary(**self._listed(view)).to_json() for view in page.views],
            "more": page.more,
            "total": page.total,
        }

    @operation(
        "connections-rank",
        Right.READ,
        "DIDComm connections sorted by age, mail or last use: all, or those that match a text",
        object_schema(
            connections=many(RankedConnection.schema()),
            found=about(COUNT, "How many there are to be paged through."),
            complete=about(FLAG, f"Whether these are all; at most {LOOKED_AT} are compared."),
        ),
        fields={
            **_TENANT,
            "text": about(TEXT, "In the label, or what a key, DID or mailbox begins with, as for mailbox-list."),
            "order": about(
                {"type": "string", "enum": list(ORDERS), "default": "newest"},
                "The newest, those with most mail, most bytes or the oldest mail, or those longest unused.",
            ),
            "waiting": about(FLAG, "Only those for which mail waits.", default=False),
            "skip": whole("Leave out the first.", 0, LOOKED_AT, default=0),
            "limit": limit(MAX_LISTED),
        },
        path="/connection-ranking",
    )
    async def _rank(self, request: OperationRequest) -> Answer:
        tenant, text, order = await self._tenants.of(request), request.get("text", ""), request.get("order", "")
        skip, limit = request["skip"], request["limit"]
        if len(text) > MAX_NAME:
            raise BadRequestError("text", f"expected at most {MAX_NAME} characters")
        looked_at = await self._find_rows(tenant, text.strip())
        rows = [row for row in looked_at if row.messages] if request.get("waiting") is True else looked_at
        if order in _KEYS:
            rows = sorted(rows, key=_KEYS[order])
        shown = {row.id: row for row in rows[skip : skip + limit]}
        return {
            "connections": [
                RankedConnection(**self._listed(view), oldest_at=shown[view.connection.id].oldest_at or None).to_json()
                for view in await self._mediation.view_connections(tenant, list(shown))
            ],
            "found": len(rows),
            "complete": (await self._mediation.list_connections(tenant, 0, 1)).total <= LOOKED_AT,
        }

    async def _find_rows(self, tenant: str, text: str) -> list[ConnectionRow]:
        """Search one at a time: each reads thousands of rows."""
        asked = tenant, text, is_allowed(Right.READ_PAYLOAD)
        async with self._search_lock:
            question, at, rows = self._found_rows
            now = time.monotonic()
            if question != asked or now - at > FRESH_SECONDS:
                rows = await self._mediation.read(
                    lambda tx, _now: listing.find_rows(tx, tenant, text, LOOKED_AT, whole_addresses=asked[2])
                )
                self._found_rows = asked, now, rows
            return rows

    @operation(
        "connections-show",
        Right.READ,
        "One DIDComm connection with its keys",
        ConnectionDetails.schema(),
        fields=_ONE,
        path="/connections/{connection}",
    )
    async def _show(self, request: OperationRequest) -> Answer:
        tenant, connection_id = await self._tenants.of(request), request["connection"]
        view = await self._mediation.show_connection(tenant, connection_id, MAX_ROUTES)
        connection, rules = view.connection, self._mediation.rules
        allowed = not rules.allowed.isdisjoint((*connection.callers, canonical(connection.their_did)))
        return ConnectionDetails(
            **self._listed(view),
            their_did=connection.their_did,
            callers=connection.callers,
            endpoint=connection.endpoint,
            push=None if connection.device is None else connection.device.platform,
            invitation=connection.invitation,
            policy=rules.policy,
            on_list=Verdict.DENY if is_denied(rules, connection) else Verdict.ALLOW if allowed else None,
            routes=[view_route(route) for route in view.routes],
        ).to_json()

    @operation(
        "connections-remove",
        Right.OPERATE,
        "Remove a DIDComm connection with its queue",
        object_schema(connection=COUNT, removed=FLAG),
        fields=_ONE,
        method="DELETE",
        path="/connections/{connection}",
    )
    async def _remove(self, request: OperationRequest) -> Answer:
        tenant, connection_id = await self._tenants.of(request), request["connection"]
        await self._mediation.disconnect(tenant, connection_id)
        # Whoever removed it finds it no more, also in a list that is not read again yet.
        self._found_rows = _NOTHING
        return {"connection": connection_id, "removed": True}

    def _listed(self, view: ConnectionView) -> dict[str, Any]:
        """Return the fields of a summary."""
        connection, mailbox = view.connection, view.mailbox
        return {
            "connection": connection.id,
            "label": connection.label,
            "didcomm": connection.generation,
            "created_at": connection.created_at,
            "seen_at": view.seen_at,
            "keys": view.keys,
            "mail_address": None if mailbox is None else mailbox.address,
            "mailbox_number": None if mailbox is None else mailbox.id,
            "messages": 0 if mailbox is None else mailbox.messages,
            "bytes": 0 if mailbox is None else mailbox.bytes,
            "live": self._sessions.has(connection.id),
            "relayed": connection.endpoint is not None,
            "transport": view.use.transport,
            "pickup": view.use.pickup,
            "client": view.use.client,
            **asdict(view.use.traffic),
        }

    @operation(
        "didcomm-stats",
        Right.READ,
        "Totals over the connections of a tenant",
        object_schema(
            connections=COUNT,
            counted=COUNT,
            live=about(COUNT, "Holders with a session on this instance, of all tenants."),
            messages=COUNT,
            bytes=COUNT,
            didcomm=_COUNTS,
            pickup=_COUNTS,
            transport=_COUNTS,
            created=_COUNTS,
            seen=_COUNTS,
            queues=_COUNTS,
            hours=many(TrafficOfHour.schema()),
        ),
        fields=_TENANT,
        path="/didcomm/stats",
    )
    async def _statistics(self, request: OperationRequest) -> Answer:
        collected = await collect(self._mediation, await self._tenants.of(request))
        return {"live": self._sessions.count, **collected}


def view_route(route: Route) -> RouteView:
    """Return a key and where it leads."""
    return RouteView.of(route, mail_address=route.address)


class DeliveryOperations:
    """What this instance delivers by itself; other instances have sessions and queues of their own."""

    def __init__(self, sessions: LiveSessions, outbound: OutboundQueue, relay: EndpointRelay) -> None:
        self._sessions = sessions
        self._outbound = outbound
        self._relay = relay

    @operation(
        "live-sessions",
        Right.READ,
        "Wallets that get their mail pushed by this instance, the newest sessions first",
        object_schema(
            sessions=many(LiveSessionView.schema()),
            total=COUNT,
        ),
        fields={
            "tenant": about(TEXT, "Of this tenant alone."),
            "skip": whole("Leave out the first.", 0, MAX_SESSIONS, default=0),
            "limit": limit(MAX_LISTED),
        },
        path="/didcomm/sessions",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        skip, limit = request["skip"], request["limit"]
        found, total = self._sessions.list(request.get("tenant", ""), skip, limit)
        shown = [
            LiveSessionView(
                tenant=each.connection.tenant,
                connection=each.connection.id,
                label=each.connection.label,
                since=each.since,
                mode="live" if each.live else "implicit",
                pushed=each.pushed,
                client=each.client,
            ).to_json()
            for each in found
        ]
        return {"sessions": shown, "total": total}

    @operation(
        "didcomm-outbound",
        Right.READ,
        "Envelopes that this instance is sending to endpoints of peers",
        object_schema(
            messages=COUNT,
            bytes=COUNT,
            max_messages=COUNT,
            max_bytes=COUNT,
            relayed=about(COUNT, "Connections with an endpoint of their own whose mail is being sent there."),
            max_relayed=COUNT,
            servers=many(object_schema(server=TEXT, messages=COUNT)),
        ),
        fields={"limit": limit(MAX_MESSAGES)},
        path="/didcomm/outbound",
    )
    async def _show(self, request: OperationRequest) -> Answer:
        messages, size = self._outbound.usage
        servers = self._outbound.servers[: request["limit"]]
        return {
            "messages": messages,
            "bytes": size,
            "max_messages": MAX_MESSAGES,
            "max_bytes": MAX_BYTES,
            "relayed": self._relay.workers,
            "max_relayed": MAX_WORKERS,
            "servers": [{"server": server, "messages": count} for server, count in servers],
        }
