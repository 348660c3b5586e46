"""Forwards through the group commit: recipients apart, SENDs by NATS with their recipient, and who waits is woken."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.mailbox import Kind
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.store.sqlite import SqliteStore
from pickup.broker import MEDIATION_HOOKS, MediationBroker
from pickup.rules.forwarding import Forward, ForwardOutcome
from pickup.rules.granting import KeylistUpdate
from pickup.rules.records import MediationRules
from tests.harness.mediation import AMPLE, enrol, key, payloads
from tests.harness.stores import migrated
from tests.unit.test_mediation_forwarding import v1


@pytest.fixture
async def mediation(tmp_path) -> AsyncIterator[MediationBroker]:
    store = SqliteStore(migrated(tmp_path / "m.db"))
    broker = Broker(store, Bounds())
    broker.hooks[Kind.MEDIATION] = MEDIATION_HOOKS
    yield MediationBroker(broker, MediationRules())
    await broker.close()
    store.close()


@pytest.mark.rule("D4")
async def test_recipients_are_served_apart(mediation):
    alice, bob = await enrol(mediation, 1, key(10)), await enrol(mediation, 2, key(20))
    outcome = await mediation.forward(Forward("default", (key(10), key(20), key(99), key(10)), (b"a", b"b")))
    assert (outcome.queued, outcome.unroutable, outcome.full) == (4, 2, 0)
    assert set(outcome.mailbox_keys) == {("default", alice.address), ("default", bob.address)}
    for holder in (alice, bob):
        assert payloads(await mediation.deliver(holder, 100, AMPLE)) == [b"a", b"b"]


@pytest.mark.rule("D8")
async def test_a_key_that_moved_leads_to_its_new_holder(mediation):
    alice, bob = await enrol(mediation, 1, key(10)), await enrol(mediation, 2)
    forward = Forward("default", (key(10),), (b"mail",))
    await mediation.forward(forward)
    await mediation.update_keylist(bob, [KeylistUpdate(key(10), "add")], frozenset({key(10)}), ())
    assert (await mediation.forward(forward)).queued == 1
    await mediation.disconnect("default", bob.id)
    assert await mediation.forward(forward) == ForwardOutcome(unroutable=1)
    assert payloads(await mediation.deliver(alice, 100, AMPLE)) == [b"mail"]


@pytest.mark.rule("D11")
async def test_a_send_by_nats_is_an_envelope_and_counts_for_its_key(mediation):
    alice = await enrol(mediation, 1, key(10))
    with pytest.raises(BadRequestError, match="payload: expected a DIDComm envelope"):
        await mediation.broker.send(Send("default", str(alice.address), Draft(b"hello")))
    await mediation.broker.send(Send("default", str(alice.address), Draft(v1(key(10)))))
    assert (await mediation.get_status(alice, key(10))).count == 1


@pytest.mark.rule("D6")
async def test_a_forward_wakes_who_watches_its_mailbox(mediation):
    alice = await enrol(mediation, 1, key(10))
    _, cursor = await mediation.open_live(alice)
    with mediation.broker.watching((alice.tenant, str(alice.address))) as woken:
        await mediation.forward(Forward("default", (key(10),), (b"live",)))
        await asyncio.wait_for(woken.wait(), 30)
    assert payloads((await mediation.next_arrived(alice, cursor, 10, AMPLE)).messages) == [b"live"]
