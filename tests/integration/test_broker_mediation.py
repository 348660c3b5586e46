"""Forwards through the group commit: recipients apart, SENDs by NATS with their recipient, and who waits is woken."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from mediator.broker import Broker
from mediator.errors import BadRequestError, MessageTooLargeError
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.mediation import connecting, granting, keylist, taking
from mediator.mediation.forwarding import Forward, Outcome
from mediator.mediation.keylist import Change
from mediator.mediation.records import Connection, Generation, NewConnection, Rules
from mediator.store.sqlite import SqliteStore
from tests.unit.mediation import key, payloads
from tests.unit.test_mediation_forwarding import v1

RULES = Rules()
AMPLE = 1 << 20


@pytest.fixture
async def broker(tmp_path) -> AsyncIterator[Broker]:
    store = SqliteStore(tmp_path / "m.db")
    broker = Broker(store, Bounds(max_message=1000))
    yield broker
    await broker.close()
    store.close()


async def holder(broker: Broker, number: int, *keys: str) -> Connection:
    def enrol(tx, now):
        new = NewConnection("default", Generation.V1, "did:x:peer", "did:x:me", (key(number),), now)
        connection = granting.grant(tx, broker.bounds, os.urandom, RULES, connecting.connect(tx, RULES, new, now), now)
        keylist.update(tx, RULES, connection, [Change(name, "add") for name in keys], frozenset(), now)
        return connection

    return await broker.write(enrol)


async def waiting(broker: Broker, connection: Connection) -> list[bytes]:
    place = (connection.tenant, str(connection.address))
    return payloads(await broker.write(lambda tx, now: taking.deliver(tx, connection, 100, None, AMPLE, now), place))


@pytest.mark.rule("D4")
async def test_recipients_are_served_apart(broker):
    alice, bob = await holder(broker, 1, key(10)), await holder(broker, 2, key(20))
    outcome = await broker.forward(Forward("default", (key(10), key(20), key(99), key(10)), (b"a", b"b")), RULES)
    assert (outcome.queued, outcome.unroutable, outcome.full) == (4, 2, 0)
    assert set(outcome.places) == {("default", alice.address), ("default", bob.address)}
    assert await waiting(broker, alice) == await waiting(broker, bob) == [b"a", b"b"]


@pytest.mark.rule("D8")
async def test_a_key_that_moved_leads_to_its_new_holder(broker):
    alice, bob = await holder(broker, 1, key(10)), await holder(broker, 2)
    forward = Forward("default", (key(10),), (b"mail",))
    await broker.forward(forward, RULES)
    await broker.write(
        lambda tx, now: keylist.update(tx, RULES, bob, [Change(key(10), "add")], frozenset({key(10)}), now)
    )
    assert (await broker.forward(forward, RULES)).queued == 1
    await broker.write(lambda tx, now: connecting.disconnect(tx, bob, now))
    assert await broker.forward(forward, RULES) == Outcome(unroutable=1)
    assert await waiting(broker, alice) == [b"mail"]


@pytest.mark.rule("D9", "N7")
async def test_a_message_that_is_too_large_is_refused_for_all(broker):
    alice = await holder(broker, 1, key(10))
    with pytest.raises(MessageTooLargeError):
        await broker.forward(Forward("default", (key(10), key(99)), (b"x" * 1001,)), RULES)
    assert await waiting(broker, alice) == []


@pytest.mark.rule("D11")
async def test_a_send_by_nats_is_an_envelope_and_counts_for_its_key(broker):
    alice = await holder(broker, 1, key(10))
    with pytest.raises(BadRequestError, match="payload: expected a DIDComm envelope"):
        await broker.send(Send("default", str(alice.address), Draft(b"hello")))
    await broker.send(Send("default", str(alice.address), Draft(v1(key(10)))))
    status = await broker.read(lambda tx, now: taking.status(tx, alice, key(10), now))
    assert status.count == 1


@pytest.mark.rule("D6")
async def test_a_forward_wakes_who_watches_its_mailbox(broker):
    alice = await holder(broker, 1, key(10))
    _, cursor = await broker.read(lambda tx, now: taking.open_live(tx, alice, now))
    with broker.watching((alice.tenant, str(alice.address))) as woken:
        await broker.forward(Forward("default", (key(10),), (b"live",)), RULES)
        await asyncio.wait_for(woken.wait(), 5)
    found, _ = await broker.write(lambda tx, now: taking.arrived(tx, alice, cursor, 10, AMPLE, now))
    assert payloads(found) == [b"live"]
