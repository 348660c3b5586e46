"""What clients leave unread: bounded for all of them, at the cost of who leaves most (N7)."""

import asyncio
from dataclasses import dataclass

import pytest

from mediator.endpoint import Endpoint
from mediator.gateway.identity import ClientIdentities
from mediator.gateway.server import ALL_UNREAD_BYTES, LEAST_UNREAD_BYTES, UNREAD_BYTES, ClientConnection, Gateway
from mediator.gateway.subscription import InFlightCounter
from mediator.gateway.subscriptions import Subscriptions
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection
from mediator.settings.sections import GatewaySettings, PushSettings


@dataclass
class Door:
    """Counts what it is told to hold."""

    held: int = 0
    counted: int = 0
    """How often it was told anything."""

    def receive(self, message: Request) -> None: ...

    def add_bytes_in_flight(self, size: int) -> None:
        self.held += size
        self.counted += 1


def gateway() -> Gateway:
    clock = asyncio.get_running_loop().time
    identities = ClientIdentities(NatsConnection(b""), clock)
    subscriptions = Subscriptions({}, PushSettings(), InFlightCounter(lambda _count: None), clock)
    return Gateway(Endpoint("127.0.0.1", 0), GatewaySettings(), [], identities, subscriptions)


def leaves_unread(at: Gateway, size: int) -> ClientConnection:
    """Add a client that leaves so much unread."""
    client = ClientConnection(at)
    at.admit(client)
    client.unread = size
    at.count_unread(size)
    return client


@pytest.mark.rule("N7")
async def test_who_leaves_most_unread_is_disconnected() -> None:
    at, door = gateway(), Door()
    small = leaves_unread(at, LEAST_UNREAD_BYTES)
    with at.short_way_to(door):
        assert door.held == LEAST_UNREAD_BYTES, "what waits already counts"
        most = [leaves_unread(at, UNREAD_BYTES - number) for number in range(4)]
        assert door.held <= ALL_UNREAD_BYTES
        assert [client.unread for client in most] == [0, 0, 0, UNREAD_BYTES - 3]
        assert small.unread == LEAST_UNREAD_BYTES


@pytest.mark.rule("N7")
async def test_many_that_leave_a_little_stay() -> None:
    at, door = gateway(), Door()
    with at.short_way_to(door):
        clients = [leaves_unread(at, LEAST_UNREAD_BYTES) for _ in range(ALL_UNREAD_BYTES // LEAST_UNREAD_BYTES + 9)]
        assert door.held == sum(client.unread for client in clients) > ALL_UNREAD_BYTES


@pytest.mark.rule("N7")
async def test_nothing_is_counted_where_nothing_changes() -> None:
    at, door = gateway(), Door()
    client = ClientConnection(at)
    at.admit(client)
    with at.short_way_to(door):
        before = door.counted
        client.resume_writing()
        assert door.counted == before
