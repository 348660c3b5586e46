"""The operations on what is on its way to wallets: live sessions, and the queue of envelopes to endpoints."""

from typing import Final

from mediator.operate.operations import (
    COUNT,
    TEXT,
    TIME,
    Answer,
    OperationRequest,
    Right,
    about,
    limit,
    many,
    obj,
    operation,
    read_number,
    read_text,
    whole,
)
from pickup.endpoint_relay import MAX_WORKERS, EndpointRelay
from pickup.live_sessions import MAX_SESSIONS, LiveSessions
from pickup.outbound_queue import MAX_BYTES, MAX_MESSAGES, OutboundQueue

MAX_LISTED: Final = 500


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
        obj(
            sessions=many(
                obj(
                    tenant=TEXT,
                    connection=COUNT,
                    label=TEXT,
                    since=TIME,
                    mode=about(TEXT, "live, or implicit: bare envelopes (RFC 0212)."),
                    pushed=about(COUNT, "Messages since then."),
                    client=TEXT,
                )
            ),
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
        skip, limit = read_number(request, "skip", 0, MAX_SESSIONS), read_number(request, "limit", 1, MAX_LISTED)
        found, total = self._sessions.list(read_text(request, "tenant"), skip, limit)
        shown = [
            {
                "tenant": each.connection.tenant,
                "connection": each.connection.no,
                "label": each.connection.label,
                "since": each.since / 1000,
                "mode": "live" if each.live else "implicit",
                "pushed": each.pushed,
                "client": each.client,
            }
            for each in found
        ]
        return {"sessions": shown, "total": total}

    @operation(
        "didcomm-outbound",
        Right.READ,
        "Envelopes that this instance is sending to endpoints of peers",
        obj(
            messages=COUNT,
            bytes=COUNT,
            max_messages=COUNT,
            max_bytes=COUNT,
            relayed=about(COUNT, "Connections with an endpoint of their own whose mail is being sent there."),
            max_relayed=COUNT,
            servers=many(obj(server=TEXT, messages=COUNT)),
        ),
        fields={"limit": limit(MAX_MESSAGES)},
        path="/didcomm/outbound",
    )
    async def _show(self, request: OperationRequest) -> Answer:
        messages, size = self._outbound.usage
        servers = self._outbound.servers[: read_number(request, "limit", 1, MAX_MESSAGES)]
        return {
            "messages": messages,
            "bytes": size,
            "max_messages": MAX_MESSAGES,
            "max_bytes": MAX_BYTES,
            "relayed": self._relay.workers,
            "max_relayed": MAX_WORKERS,
            "servers": [{"server": server, "messages": count} for server, count in servers],
        }
