"""Forwards, and mail that comes by NATS into a mediation mailbox (D4, D9, D11)."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BadRequestError, MessageTooLargeError
from mediator.fields import Fields
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.mailboxes.events import EventType
from mediator.mailboxes.fetching import Deliver
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Retention
from mediator.nats.protocol import read_create
from mediator.store.base import Store, Transaction
from pickup.rules import forwarding as envelope
from pickup.rules import names
from pickup.rules.forwarding import MAX_DELAYED, ForwardOutcome
from pickup.rules.granting import KeylistResult
from pickup.rules.records import MediationRules
from tests.harness.broker import DAY, HOUR, SECOND, START, TENANT
from tests.harness.mediation import Mediation, ids, key, payloads

SUCCESS, NO_CHANGE, CLIENT_ERROR = KeylistResult


@pytest.mark.rule("D4")
def test_each_recipient_gets_a_copy_of_its_own(house: Mediation) -> None:
    alice, bob = house.holder(1, key(10)), house.holder(2, key(20))
    outcome = house.forward([key(10), key(20), key(99)], b"one", b"two")
    assert (outcome.queued, outcome.unroutable, outcome.full) == (4, 2, 0)
    assert set(outcome.mailbox_keys) == {(TENANT, alice.address), (TENANT, bob.address)}
    assert payloads(house.deliver(alice)) == payloads(house.deliver(bob)) == [b"one", b"two"]
    assert house.acknowledge(alice, 0, 1) == 2
    assert (house.status(alice).count, house.status(bob).count) == (0, 2)
    assert payloads(house.deliver(bob)) == [b"one", b"two"]


@pytest.mark.rule("D4")
def test_a_holder_of_two_recipient_keys_gets_two_copies(house: Mediation) -> None:
    holder = house.holder(1, key(10), key(11))
    house.forward([key(10), key(11), key(10)])
    assert ids(house.deliver(holder)) == [0, 1]
    assert house.acknowledge(holder, 0) == 1
    assert [message.recipient for message in house.deliver(holder)] == [key(11)]


@pytest.mark.rule("D9")
def test_a_forward_that_reaches_nobody_writes_all_the_same(house: Mediation, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []
    house.holder(1, key(10))
    monkeypatch.setattr(Transaction, "write_heartbeat", lambda self, now: beats.append(now))
    assert house.forward(key(10)).queued == 1
    assert beats == []
    assert house.forward(key(99)) == ForwardOutcome(unroutable=1)
    assert house.forward(key(10), expire_at=START) == ForwardOutcome(unroutable=1)
    assert beats == [START, START]


@pytest.mark.rule("D9", "N7")
@pytest.mark.parametrize("recipient", [10, 99])
def test_too_large_a_message_is_refused_for_any_recipient(store: Store, recipient: int) -> None:
    house = Mediation(store, bounds=Bounds(max_message=10))
    holder = house.holder(1, key(10))
    with pytest.raises(MessageTooLargeError):
        house.forward(key(recipient), b"small", b"x" * 11)
    assert house.status(holder).count == 0


@pytest.mark.rule("D4", "S5")
def test_mail_expires_by_the_rules_or_earlier_by_its_sender(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), b"week")
    house.forward(key(10), b"hour", expire_at=START + HOUR)
    house.forward(key(10), b"year", expire_at=START + 365 * DAY)
    house.advance(HOUR)
    assert payloads(house.deliver(holder)) == [b"week", b"year"]
    house.advance(7 * DAY - HOUR - 1)
    assert payloads(house.deliver(holder)) == [b"week", b"year"]
    house.advance(1)
    assert house.deliver(holder) == []
    assert house.clean_up().messages == 3


def test_rules_without_a_span_keep_mail_for_ever(store: Store) -> None:
    house = Mediation(store, MediationRules(keep=0))
    holder = house.holder(1, key(10))
    house.forward(key(10))
    house.advance(10_000 * DAY)
    assert house.status(holder).count == 1


@pytest.mark.rule("D4", "S4")
def test_delayed_mail_comes_when_it_is_due(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    assert house.forward(key(10), delay=5 * SECOND).queued == 1
    house.advance(5 * SECOND)
    assert house.status(holder, key(10)).count == 0
    house.release()
    assert (house.status(holder).count, house.status(holder, key(10)).count) == (1, 1)
    assert [message.recipient for message in house.deliver(holder, recipient=key(10))] == [key(10)]


@pytest.mark.rule("D9")
@pytest.mark.parametrize("rules", [MediationRules(max_messages=2), MediationRules(max_bytes=10)])
def test_a_full_queue_drops_and_tells_the_sender_nothing(store: Store, rules: MediationRules) -> None:
    house = Mediation(store, rules)
    alice, bob = house.holder(1, key(10)), house.holder(2, key(20))
    house.forward(key(10), b"5byte", b"5byte")
    assert house.forward([key(10), key(20)], b"5byte") == ForwardOutcome(1, 0, 1, ((TENANT, str(bob.address)),))
    assert house.forward(key(10), b"5byte", delay=SECOND).full == 1
    assert ids(house.deliver(alice)) == [0, 1]
    house.acknowledge(alice, 0)
    assert house.forward(key(10), b"5byte").queued == 1


@pytest.mark.rule("D9")
def test_delayed_mail_is_counted_and_bounded(house: Mediation) -> None:
    house.holder(1, key(10))
    assert house.forward(key(10), *[b"x"] * (MAX_DELAYED + 5), delay=HOUR).full == 5
    assert house.forward(key(10)).queued == 1


@pytest.mark.rule("D9", "S7")
@pytest.mark.parametrize("bounds", [Bounds(mailbox=Quota(messages=1)), Bounds(tenant=Quota(rate=1))])
def test_a_quota_refuses_without_a_word(store: Store, bounds: Bounds) -> None:
    house = Mediation(store, bounds=bounds)
    house.holder(1, key(10))
    assert house.forward(key(10), b"a", b"b", b"c") == ForwardOutcome(1, 0, 2, (house.mailbox_of(house.holder(1)).key,))


@pytest.mark.rule("D11", "S7")
def test_holders_limits_do_not_bind_attached_mailboxes(store: Store) -> None:
    house = Mediation(store, MediationRules(max_messages=1))
    house.create(retention=Retention.UNTIL_ACK)
    house.attach(key(10), "task")
    assert house.forward(key(10), b"a", b"b").queued == 2


@pytest.mark.rule("A8")
def test_a_forward_wakes_who_waits_for_it_and_is_told(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10))
    assert house.woken == {(TENANT, holder.address)}
    assert house.told(EventType.STORED) == [0]


# By another name than the registered one.


@pytest.mark.rule("D3", "D4")
def test_mail_may_name_a_key_inside_the_did(house: Mediation) -> None:
    holder = house.holder(1)
    assert house.add(holder, "did:peer:2.x", inside=[key(10), key(11)]) == [SUCCESS]
    for name in ("did:peer:2.x", key(10), key(11)):
        assert house.forward(name, name.encode()).queued == 1
    mail = house.deliver(holder)
    assert payloads(mail) == [b"did:peer:2.x", key(10).encode(), key(11).encode()]
    # It counts and is filtered as mail for what was registered.
    assert {message.recipient for message in mail} == {"did:peer:2.x"}
    assert house.keys(holder) == (["did:peer:2.x"], 1)
    assert house.remove(holder, key(10)) == [NO_CHANGE]
    assert house.remove(holder, "did:peer:2.x") == [SUCCESS]
    assert house.forward(key(10)) == ForwardOutcome(unroutable=1)


@pytest.mark.rule("D8")
def test_a_key_inside_a_did_is_held_as_others_are(house: Mediation) -> None:
    alice, mallory = house.holder(1), house.holder(2)
    house.add(alice, "did:peer:2.alice", inside=[key(10)])
    house.advance(1)
    # Nobody proves the keys of a DID that is registered: who had the key first keeps its mail.
    assert house.add(mallory, "did:peer:2.mallory", inside=[key(10)]) == [SUCCESS]
    assert house.add(mallory, key(10)) == [CLIENT_ERROR]
    house.forward(key(10), b"secret")
    assert (house.status(alice).count, house.status(mallory).count) == (1, 0)
    # What was registered by itself comes before what is inside of something.
    assert house.add(mallory, key(10), proven=[key(10)]) == [SUCCESS]
    house.forward(key(10), b"proven")
    assert (house.status(alice).count, house.status(mallory).count) == (1, 1)


@pytest.mark.rule("D8")
def test_a_key_that_another_seals_with_is_not_had_by_a_did(house: Mediation) -> None:
    alice, mallory = house.holder(1), house.holder(2)
    assert house.add(mallory, "did:peer:2.mallory", inside=[key(1), key(2)]) == [SUCCESS]
    assert house.forward(key(1)) == ForwardOutcome(unroutable=1)
    assert house.forward(key(2)).queued == 1
    assert house.add(alice, key(1)) == [SUCCESS]


@pytest.mark.rule("D8")
def test_a_key_inside_two_dids_outlives_the_first(house: Mediation) -> None:
    holder, other = house.holder(1), house.holder(2)
    for did in ("did:peer:2.a", "did:peer:2.b"):
        house.add(holder, did, inside=[key(10)])
        house.advance(1)
    house.remove(holder, "did:peer:2.a")
    assert house.forward(key(10)).queued == 1
    house.disconnect(holder)
    assert house.forward(key(10)) == ForwardOutcome(unroutable=1)
    assert house.add(other, key(10)) == [SUCCESS]


@pytest.mark.rule("D8")
def test_registering_a_did_again_finds_its_keys(house: Mediation) -> None:
    holder = house.holder(1, "did:peer:4z")
    assert house.forward(key(10)).unroutable == 1
    assert house.add(holder, "did:peer:4z", inside=[key(10)]) == [NO_CHANGE]
    assert house.forward(key(10)).queued == 1


@pytest.mark.rule("D11")
def test_an_attached_did_is_found_by_its_keys(house: Mediation) -> None:
    house.create(retention=Retention.UNTIL_ACK)
    house.attach("did:peer:2.x", "task", inside=[key(10)])
    assert house.forward(key(10)).queued == 1
    assert house.add(house.holder(1), key(10)) == [CLIENT_ERROR]
    house.detach("did:peer:2.x")
    assert house.forward(key(10)).unroutable == 1


@pytest.mark.rule("D4", "D9")
def test_an_unknown_name_is_found_by_the_envelope(house: Mediation) -> None:
    alice, bob = house.holder(1, key(10), key(11)), house.holder(2, key(20))
    outcome = house.forward("", b"one", b"two", b"none", inside=[[key(98), key(11), key(10)], [key(10), key(20)], []])
    assert (outcome.queued, outcome.unroutable) == (3, 1)
    assert [message.recipient for message in house.deliver(alice)] == [key(11), key(10)]
    assert payloads(house.deliver(bob)) == [b"two"]
    # A name that is known is enough.
    house.forward(key(20), b"three", inside=[[key(10)]])
    assert (house.status(alice).count, house.status(bob).count) == (2, 2)


@pytest.mark.rule("D9")
def test_what_is_denied_is_not_found_by_another_name(house: Mediation) -> None:
    allowed, denied = house.holder(1, key(12)), house.holder(2, key(30))
    house.add(denied, "did:peer:2.x", inside=[key(10)])
    house.rules = MediationRules(denied=frozenset({"did:peer:2.x", key(20), key(30)}))
    for name, inside in ((key(10), []), (key(99), [key(10)]), (key(99), [key(30)]), (key(20), [key(12)])):
        assert house.forward(name, inside=[inside]) == ForwardOutcome(unroutable=1)
    assert house.forward(key(99), inside=[[key(12)]]).queued == 1
    assert (house.status(allowed).count, house.status(denied).count) == (1, 0)


@pytest.mark.rule("D11")
def test_by_nats_too_a_key_inside_a_did_is_mail_for_it(house: Mediation) -> None:
    holder = house.holder(1)
    house.add(holder, "did:peer:2.x", inside=[key(10)])
    house.post(v1(key(10)), holder.address)
    assert [message.recipient for message in house.deliver(holder)] == ["did:peer:2.x"]


# By NATS.


def v1(*keys: str) -> bytes:
    protected = {
        "enc": "xchacha20poly1305_ietf",
        "typ": "JWM/1.0",
        "alg": "Authcrypt",
        "recipients": [
            {"encrypted_key": "AA", "header": {"kid": names.base58(names.verkey(key)), "iv": "AA", "sender": "AA"}}
            for key in keys
        ],
    }
    encoded = base64.urlsafe_b64encode(json.dumps(protected).encode()).decode()
    return json.dumps({"protected": encoded, "iv": "AA", "ciphertext": "AA", "tag": "AA"}).encode()


def v2(*kids: str, **more: Any) -> bytes:
    recipients = [{"encrypted_key": "AA", "header": {"kid": kid}} for kid in kids]
    whole = {"protected": "AA", "recipients": recipients, "iv": "AA", "ciphertext": "AA", "tag": "AA", **more}
    return json.dumps(whole).encode()


DID = "did:example:alice"


@pytest.mark.rule("D3", "D11")
@pytest.mark.parametrize("payload", [v1(key(99), key(10)), v2(f"{DID}#key-1")])
def test_an_envelope_sent_by_nats_is_picked_up_like_any_other(house: Mediation, payload: bytes) -> None:
    holder, other = house.holder(1, key(10), DID), house.holder(2, key(99))
    assert house.post(payload, str(holder.address)) == 0
    (message,) = house.deliver(holder)
    assert message.payload == payload
    assert house.status(holder, message.recipient).count == 1
    assert message.recipient == (key(10) if payload == v1(key(99), key(10)) else DID)
    assert house.shown(str(holder.address)) == [0]
    assert house.status(other).count == 0


@pytest.mark.rule("D11")
def test_an_envelope_for_no_key_of_the_holder_is_kept(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.post(v1(key(99)), str(holder.address))
    (message,) = house.deliver(holder)
    assert message.recipient is None


@pytest.mark.rule("D11")
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"hello",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[" * 900,
        b'{"a":' * 900,
        v1(),
        v2(),
        v2(*["did:example:x#1"] * 51),
        v2("did:example:x#1", tag=1),
        v2("did:example:x#1", unprotected=[0] * 2000),
        v2("did:example:x#1", recipients=[{"header": {}}]),
        v2("did:example:x#1", recipients=[{"header": "x"}]),
        v2("did:example:x#1", recipients=["x"]),
        v2("did:example:x#1", recipients=None, protected="!"),
        v2("did:example:x#1", recipients=None, protected="AA"),
        v2("did:example:x#1").decode().encode("utf-16"),
        json.dumps({"type": "https://didcomm.org/basicmessage/2.0/message", "id": "1", "body": {}}).encode(),
    ],
)
def test_anything_else_is_refused(house: Mediation, payload: bytes) -> None:
    holder = house.holder(1, key(10))
    with pytest.raises(BadRequestError) as raised:
        house.post(payload, str(holder.address))
    assert str(raised.value) == "payload: expected a DIDComm envelope"
    assert house.status(holder).count == 0
    house.create()
    assert house.post(payload, "task") == 0


WORDS = ("protected", "recipients", "header", "kid", "iv", "ciphertext", "tag")
JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(WORDS), inner),
)


@pytest.mark.rule("D12")
@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_payload_does_harm(payload: bytes) -> None:
    named = envelope.recipients(payload)
    assert named is None or all(isinstance(kid, str) for kid in named)


@pytest.mark.rule("D11")
def test_a_large_envelope_for_many_is_one() -> None:
    assert len(envelope.recipients(v1(*(key(number) for number in range(1, 51)))) or ()) == 50
    payload = v2(*(f"did:example:{x}#k" for x in range(50)), ciphertext="A" * 1_000_000)
    assert len(envelope.recipients(payload) or ()) == 50


@pytest.mark.rule("D1")
def test_the_group_of_the_holder_is_reserved(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10))
    with pytest.raises(BadRequestError) as raised:
        house.fetch("didcomm", str(holder.address), deliver=Deliver.EARLIEST)
    assert raised.value.field == "group_name"
    assert house.take("workers", str(holder.address)) == [0]
    house.create()
    house.send()
    assert house.take("didcomm") == [0]


@pytest.mark.rule("D1", "A5")
def test_what_a_group_acknowledges_the_holder_gets_no_more(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.forward(key(10), b"a", b"b")
    house.take("workers", str(holder.address))
    house.ack(0, group="workers", box=str(holder.address))
    assert payloads(house.deliver(holder)) == [b"b"]
    assert house.acknowledge(holder, 0, 1) == 1


@pytest.mark.rule("D1", "M1")
def test_create_makes_no_mediation_mailbox() -> None:
    with pytest.raises(BadRequestError) as raised:
        read_create(TENANT, Fields({"type": "mediation"}))
    assert raised.value.field == "type"
    assert "mediation" not in str(raised.value).removesuffix('got "mediation"')


@pytest.mark.rule("A2", "D1")
def test_a_lane_given_by_nats_is_kept_to(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    for lane in (Lane.LOW, Lane.NORMAL, Lane.CRITICAL, Lane.URGENT):
        house.post(v1(key(10)), str(holder.address), lane=lane)
    house.forward(key(10))
    assert ids(house.deliver(holder)) == [2, 3, 1, 4, 0]
    assert ids(house.deliver(holder, limit=2)) == [2, 3]
    assert ids(house.deliver(holder, limit=3, recipient=key(10))) == [0, 1, 2]
