"""The operations on NATS clients: who is connected, who fills and reads a mailbox, and disconnecting (A7)."""

import time
from dataclasses import replace
from typing import Any, Final

from mediator.broker import Broker
from mediator.gateway.server import ClientConnection, Gateway
from mediator.mailboxes.creating import get_live_mailbox
from mediator.nats.client import ClientInfo
from mediator.nats.door import MAX_NAME, RECENT_SECONDS, RecentRequests
from mediator.operate.mailbox_operations import read_place
from mediator.operate.operations import (
    COUNT,
    FLAG,
    PLACE,
    TEXT,
    Answer,
    OperationRequest,
    Right,
    about,
    limit,
    many,
    object_schema,
    operation,
    whole,
)
from mediator.operate.records import ClientView, MailboxClientView

MAX_LISTED: Final = 1000
MAX_CLIENTS: Final = 1_000_000
DISCONNECTED: Final = "disconnected by an operator"


class ClientOperations:
    """The operations, on the clients of this instance."""

    def __init__(self, broker: Broker, gateway: Gateway | None, recent: RecentRequests) -> None:
        """``gateway``: None where clients connect to nats-server itself."""
        self._broker = broker
        self._gateway = gateway
        self._recent = recent

    @operation(
        "client-list",
        Right.READ,
        "The NATS clients of this instance, the latest first",
        object_schema(
            clients=many(ClientView.schema()),
            total=COUNT,
            gateway=about(FLAG, "Whether clients connect to this instance; else nats-server alone knows them."),
        ),
        fields={
            "tenant": about(TEXT, "Of this tenant alone."),
            "skip": whole("Leave out the first.", 0, MAX_CLIENTS, default=0),
            "limit": limit(MAX_LISTED),
        },
        path="/nats/clients",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        tenant, skip = request.get("tenant", ""), request["skip"]
        found = [each for each in self._connections() if not tenant or each.tenant == tenant]
        found.sort(key=lambda each: -each.since)
        shown = found[skip : skip + request["limit"]]
        views = [view.to_json() for view in map(_view, shown) if view is not None]
        return {"clients": views, "total": len(found), "gateway": self._gateway is not None}

    @operation(
        "client-disconnect",
        Right.OPERATE,
        "Disconnect a NATS client; most connect again by themselves, unless their user is removed first",
        object_schema(client=TEXT, disconnected=about(COUNT, "0: it was gone already.")),
        fields={"client": about(TEXT, "As in the list of clients.")},
        method="DELETE",
        path="/nats/clients/{client}",
    )
    async def _disconnect(self, request: OperationRequest) -> Answer:
        found = [each for each in self._connections() if each.id == request["client"]]
        for each in found:
            each.close_with_error(DISCONNECTED)
        return {"client": request["client"], "disconnected": len(found)}

    @operation(
        "mailbox-clients",
        Right.READ,
        f"NATS clients of this instance that sent to a mailbox in the last {RECENT_SECONDS / 60:.0f} minutes, "
        "fetched from it, or subscribe to it",
        object_schema(clients=many(MailboxClientView.schema())),
        fields={**PLACE, "limit": limit(MAX_LISTED)},
        path="/mailboxes/{mail_address}/clients",
    )
    async def _of_mailbox(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        send_only = await self._broker.read(
            lambda tx, now: tx.mailboxes.send_only(get_live_mailbox(tx, tenant, address, now))
        )
        connections = {each.name: each for each in self._connections() if each.name}
        passed = time.time() - time.perf_counter()
        merged: dict[tuple[Any, ...], MailboxClientView] = {}
        for each in self._recent.of(tenant, {address, send_only}):
            connection = connections.get(each.client.connection)
            view = _mailbox_client(each.action, each.client, connection, each.requests, each.last + passed)
            # Connections that ended are one for each name and user: commands make one for each request.
            key = view.action, view.client, view.name, view.user
            former = merged.get(key)
            requests = each.requests + (former.requests or 0) if former is not None else each.requests
            merged[key] = replace(view if former is None else former, requests=requests)
        found = list(merged.values())
        for connection in self._connections():
            if (protocol := connection.protocol) is not None:
                client = ClientInfo(connection.name, protocol.name[:MAX_NAME], protocol.login)
                found += [
                    _mailbox_client("subscribes", client, connection, None, connection.since, subscription.queue)
                    for subscription in protocol.subscriptions_to(tenant, address)
                ]
        return {"clients": [each.to_json() for each in found[: request["limit"]]]}

    def _connections(self) -> list[ClientConnection]:
        return [] if self._gateway is None else list(self._gateway.clients)


def _mailbox_client(
    action: str,
    client: ClientInfo,
    connection: ClientConnection | None,
    requests: int | None,
    at: float,
    queue: str = "",
) -> MailboxClientView:
    known = None if connection is None else connection.id
    return MailboxClientView(action, client.name, client.login or None, known, queue, requests, at)


def _view(connection: ClientConnection) -> ClientView | None:
    protocol, transport = connection.protocol, connection.transport
    if transport is None:
        return None
    peer = transport.get_extra_info("peername")
    connected = protocol is not None and protocol.connected
    return ClientView(
        client=connection.id,
        tenant=connection.tenant,
        user=(protocol.login if protocol is not None else "") or None,
        name="" if protocol is None else protocol.name[:MAX_NAME],
        address=f"{peer[0]}:{peer[1]}" if peer else "",
        subscriptions=0 if protocol is None else protocol.subscriptions,
        state="slow" if connection.is_slow else "ok" if connected else "connecting",
        unread_bytes=transport.get_write_buffer_size(),
        since=connection.since,
    )
