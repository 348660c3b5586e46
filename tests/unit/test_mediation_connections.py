"""Connections and grants: who is recognised, who is given mediation, and the end of both (D1, D8)."""

from dataclasses import replace

import pytest

from mediator.errors import (
    BadRequestError,
    DeniedError,
    MediationDeniedError,
    NoSuchConnectionError,
    NoSuchInvitationError,
    NoSuchMailboxError,
    NotEnrolledError,
    QuotaExceededError,
    RateLimitedError,
)
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.store.base import Store
from pickup.rules.connecting import ROTATION_PAUSE
from pickup.rules.granting import KeylistResult
from pickup.rules.records import Connection, MediationRules, Policy, PushDevice
from pickup.rules.replays import CLOCK_SKEW
from tests.harness.broker import DAY, HOUR, START, TENANT
from tests.harness.mediation import Mediation, ids, key, payloads

ALICE, ALICE_2, BOB = "did:example:alice", "did:example:alice-2", "did:example:bob"
LONG, SHORT = "did:peer:4zQmAbc:zDoc", "did:peer:4zQmAbc"


@pytest.mark.rule("D8")
def test_a_peer_that_connects_again_is_the_same_and_is_updated(house: Mediation) -> None:
    first = house.connect(ALICE, ALICE_2, endpoint="http://a", label="phone")
    house.advance(HOUR)
    again = house.connect(ALICE, endpoint="http://b", label="new phone", their_did="did:sov:new", my_did="did:x:new")
    assert again.id == first.id
    assert (again.endpoint, again.label, again.their_did, again.my_did) == (
        "http://b",
        "new phone",
        "did:sov:new",
        "did:x:new",
    )
    assert (again.created_at, again.seen_at) == (START, START + HOUR)
    assert house.called(ALICE) == again
    assert house.called(ALICE_2) is None


@pytest.mark.rule("D8")
def test_a_proven_caller_moves_from_another_connection(house: Mediation) -> None:
    old = house.grant(house.connect(ALICE, ALICE_2))
    bob = house.connect(BOB)
    moved = house.connect(BOB, ALICE_2)
    assert moved.id == bob.id
    assert house.called(ALICE_2) == moved
    kept = house.called(ALICE)
    assert (kept.id, kept.callers, kept.mailbox_id) == (old.id, (ALICE,), old.mailbox_id)


@pytest.mark.rule("A6", "D8")
def test_the_same_caller_in_two_tenants_is_two_connections(house: Mediation) -> None:
    here, there = house.connect(ALICE), house.connect(ALICE, tenant="other")
    assert here.id != there.id
    assert house.called(ALICE) == here
    assert house.called(ALICE, "other") == there


@pytest.mark.rule("D8")
def test_an_updated_connection_keeps_its_mailbox_and_keys(house: Mediation) -> None:
    before = house.holder(1, key(10))
    after = house.connect(key(1), label="again")
    assert after.mailbox_id == before.mailbox_id
    assert house.keys(after) == ([key(10)], 1)
    house.forward(key(10))
    assert payloads(house.deliver(after)) == [b"mail"]


def test_uses_of_an_invitation_are_counted_once_a_connection(house: Mediation) -> None:
    house.invite(max_uses=2)
    house.connect(ALICE, invitation="invitation")
    house.connect(ALICE, invitation="invitation")
    assert house.uses() == 1
    house.connect(BOB, invitation="invitation")
    assert house.uses() == 2
    assert house.connect(ALICE, invitation="invitation").invitation == "invitation"
    with pytest.raises(NoSuchInvitationError):
        house.connect("did:example:late", invitation="invitation")
    assert house.uses() == 2
    assert house.called("did:example:late") is None


@pytest.mark.rule("A6")
@pytest.mark.parametrize("id", ["unknown", "expired", "elsewhere"])
def test_an_invitation_that_is_not_open_here_lets_nobody_in(house: Mediation, id: str) -> None:
    house.invite("expired", expire_at=START + HOUR)
    house.invite("elsewhere", tenant="other")
    house.advance(HOUR)
    with pytest.raises(NoSuchInvitationError):
        house.connect(ALICE, invitation=id)
    assert house.called(ALICE) is None
    # In v2 it is only the parent thread, which may be anything.
    assert house.meet(ALICE, invitation=id).invitation is None


def test_a_repeat_without_invitation_keeps_it(house: Mediation) -> None:
    house.invite()
    house.connect(ALICE, invitation="invitation")
    assert house.connect(ALICE).invitation == "invitation"


@pytest.mark.rule("D8")
def test_a_v2_peer_is_met_once(house: Mediation) -> None:
    first = house.meet(SHORT, LONG)
    assert (first.their_did, first.callers) == (LONG, (SHORT,))
    # The short form holds no document, so it must not take the place of the long one.
    again = house.meet(SHORT, SHORT, my_did="did:peer:2.rotated")
    assert (again.id, again.their_did, again.my_did) == (first.id, LONG, "did:peer:2.rotated")


def test_a_v2_peer_gets_its_long_form_later(house: Mediation) -> None:
    house.meet(SHORT, SHORT)
    assert house.meet(SHORT, LONG).their_did == LONG


def test_a_v2_peer_uses_an_invitation_once(house: Mediation) -> None:
    house.invite(max_uses=1)
    house.meet(ALICE)
    assert house.meet(ALICE, invitation="invitation").invitation == "invitation"
    house.meet(ALICE, invitation="invitation")
    assert house.uses() == 1
    assert house.meet(BOB, invitation="invitation").invitation is None


def test_when_it_was_last_seen_is_kept_to_the_hour(house: Mediation) -> None:
    connection = house.connect(ALICE)
    assert connection.seen_at == START
    house.advance(HOUR - 1)
    assert house.seen(connection).seen_at == START
    house.advance(1)
    assert house.seen(connection).seen_at == START + HOUR
    assert house.called(ALICE).seen_at == START + HOUR


def test_being_seen_takes_back_nothing_that_changed_meanwhile(house: Mediation) -> None:
    stale = house.connect(ALICE)
    device = PushDevice("token", "android")
    house.run(lambda tx: tx.connections.save(replace(stale, device=device)))
    house.advance(HOUR)
    assert house.seen(stale).device == device
    house.disconnect(stale)
    house.advance(HOUR)
    house.seen(stale)
    assert house.called(ALICE) is None


@pytest.mark.rule("A5", "D1")
def test_a_grant_makes_a_work_queue_that_never_expires(house: Mediation) -> None:
    house.bounds = Bounds(default_ttl=HOUR)
    granted = house.grant(house.connect(ALICE))
    mailbox = house.mailbox_of(granted)
    assert (mailbox.kind, mailbox.retention, mailbox.expire_at) == (Kind.MEDIATION, Retention.UNTIL_ACK, None)
    assert (mailbox.id, mailbox.address) == (granted.mailbox_id, granted.address)
    house.advance(1000 * DAY)
    house.clean_up()
    assert house.grant(granted) == granted


@pytest.mark.rule("D1")
def test_a_grant_given_again_is_the_same(house: Mediation) -> None:
    connection = house.connect(ALICE)
    granted = house.grant(connection)
    # The stale record has no mailbox; there must not be a second one all the same.
    assert house.grant(connection) == granted


@pytest.mark.rule("D1")
def test_a_grant_replaces_a_mailbox_an_operator_deleted(house: Mediation) -> None:
    holder = house.holder(1, key(10), key(11))
    assert holder.address is not None
    house.delete_mailbox(holder.address)
    assert house.forward(key(10)).unroutable == 1
    with pytest.raises(NotEnrolledError):
        house.status(holder)
    again = house.grant(holder)
    assert again.mailbox_id != holder.mailbox_id
    assert house.forward([key(10), key(11)]).queued == 2
    assert house.status(again).count == 2


@pytest.mark.rule("A3", "D1")
def test_a_new_mailbox_at_the_old_address_gets_nothing(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    assert holder.address is not None
    house.delete_mailbox(holder.address)
    house.create(holder.address)
    assert house.forward(key(10)).unroutable == 1
    with pytest.raises(NotEnrolledError):
        house.deliver(holder)
    house.disconnect(holder)
    assert house.mailbox(holder.address) is not None


def test_only_who_came_by_an_invitation_is_let_in(store: Store) -> None:
    house = Mediation(store, MediationRules(policy=Policy.INVITATION))
    house.invite()
    with pytest.raises(MediationDeniedError):
        house.grant(house.connect(ALICE))
    assert house.grant(house.connect(BOB, invitation="invitation")).address is not None


def test_only_who_is_listed_is_let_in(store: Store) -> None:
    house = Mediation(store, MediationRules(policy=Policy.ALLOW, allowed=frozenset({ALICE, SHORT})))
    assert house.grant(house.connect(ALICE)).address is not None
    assert house.grant(house.connect(key(1), their_did=LONG)).address is not None
    with pytest.raises(MediationDeniedError):
        house.grant(house.connect(BOB))


@pytest.mark.rule("D8", "M4")
def test_a_connection_that_ends_frees_its_keys_and_its_mailbox(house: Mediation) -> None:
    holder, other = house.holder(1, key(10)), house.holder(2)
    house.forward(key(10), b"old")
    house.disconnect(holder)
    assert house.called(key(1)) is None
    assert house.forward(key(10)).unroutable == 1
    assert holder.address is not None
    with pytest.raises(NoSuchMailboxError):
        house.query(holder.address)
    assert house.add(other, key(10)) == [KeylistResult.SUCCESS]
    house.forward(key(10), b"new")
    assert payloads(house.deliver(other)) == [b"new"]
    with pytest.raises(NotEnrolledError):
        house.deliver(holder)
    with pytest.raises(NotEnrolledError):
        house.grant(holder)
    assert house.clean_up().messages == 1


@pytest.mark.rule("D8")
def test_a_connection_without_mediation_can_be_ended(house: Mediation) -> None:
    connection = house.connect(ALICE)
    house.disconnect(connection)
    assert house.called(ALICE) is None
    with pytest.raises(NoSuchConnectionError):
        house.disconnect(connection)
    assert ids(house.deliver(house.grant(house.connect(ALICE)))) == []
    assert house.mailbox_of(house.connect(ALICE)).tenant == TENANT


@pytest.mark.rule("D12")
def test_a_tenant_has_so_many_connections_and_those_go_on(store: Store) -> None:
    house = Mediation(store, MediationRules(max_connections=2))
    house.connect(ALICE)
    house.meet("did:x:2")
    house.invite(max_uses=1)
    house.connect(ALICE, tenant="other")
    for stranger in (lambda: house.connect(BOB, invitation="invitation"), lambda: house.meet(BOB, None, "invitation")):
        with pytest.raises(QuotaExceededError, match="connections in the tenant, limit 2, in use 2"):
            stranger()
    assert house.called(BOB) is None
    assert house.uses() == 0
    assert house.connect(ALICE) is not None
    assert house.meet("did:x:2") is not None
    house.disconnect(house.connect(ALICE))
    assert house.connect(BOB, invitation="invitation").invitation == "invitation"


# Rotations of DIDs.


def rotating(house: Mediation) -> Connection:
    """Return the connection of Alice, who has mediation and a key."""
    connection = house.grant(house.meet(ALICE))
    assert house.add(connection, key(10)) == [KeylistResult.SUCCESS]
    return connection


@pytest.mark.rule("D14")
def test_a_rotated_did_has_all_that_the_old_one_had(house: Mediation) -> None:
    before = rotating(house)
    house.forward(key(10), b"before")
    after = house.rotate(ALICE, ALICE_2, endpoint="http://new")
    assert after == house.called(ALICE_2)
    assert (after.id, after.mailbox_id, after.callers) == (before.id, before.mailbox_id, (ALICE_2,))
    assert (after.their_did, after.endpoint) == (ALICE_2, "http://new")
    assert house.called(ALICE) is None
    house.forward(key(10), b"after")
    assert payloads(house.deliver(after)) == [b"before", b"after"]
    assert house.keys(after) == ([key(10)], 1)


@pytest.mark.rule("D14")
def test_the_same_rotation_again_changes_nothing(house: Mediation) -> None:
    rotating(house)
    after = house.rotate(ALICE, ALICE_2, START)
    house.advance(DAY)
    assert house.rotate(ALICE, ALICE_2, START) == after == house.called(ALICE_2)


@pytest.mark.rule("D14")
def test_an_old_rotation_never_brings_an_old_did_back(house: Mediation) -> None:
    first = rotating(house)
    house.rotate(ALICE, ALICE_2, START)
    # There and back, and on, all signed within one second.
    house.advance(ROTATION_PAUSE)
    assert house.rotate(ALICE_2, ALICE, START).callers == (ALICE,)
    house.advance(ROTATION_PAUSE)
    with pytest.raises(BadRequestError, match="from_prior: was used before"):
        house.rotate(ALICE, ALICE_2, START)
    house.advance(HOUR)
    assert house.rotate(ALICE, BOB).id == first.id
    house.advance(ROTATION_PAUSE)
    house.rotate(BOB, ALICE)
    with pytest.raises(BadRequestError, match="from_prior: older"):
        house.rotate(ALICE, ALICE_2, house.now - 1000, b"another")
    assert house.called(ALICE).id == first.id


@pytest.mark.rule("D14", "D13")
def test_a_connection_is_rotated_once_a_minute(house: Mediation) -> None:
    """Each DID begins records of its own, so a loop of rotations would fill the database."""
    first = rotating(house)
    house.rotate(ALICE, ALICE_2)
    house.advance(ROTATION_PAUSE - 1)
    with pytest.raises(RateLimitedError, match="retry after 1 s"):
        house.rotate(ALICE_2, BOB)
    assert house.called(ALICE_2).id == first.id
    assert house.called(BOB) is None
    house.advance(1)
    assert house.rotate(ALICE_2, BOB).id == first.id
    # It may end at any time.
    assert house.rotate(BOB, None) is None


@pytest.mark.rule("D14")
def test_a_rotation_before_the_connection_was_made_is_refused(house: Mediation) -> None:
    house.advance(DAY)
    rotating(house)
    with pytest.raises(BadRequestError, match="from_prior: older"):
        house.rotate(ALICE, ALICE_2, house.now - CLOCK_SKEW - 1)
    assert house.called(ALICE_2) is None
    # Clocks may differ by some minutes.
    assert house.rotate(ALICE, ALICE_2, house.now - CLOCK_SKEW).callers == (ALICE_2,)


@pytest.mark.rule("D14")
def test_mail_of_two_connections_is_never_put_together(house: Mediation) -> None:
    alice, bob = rotating(house), house.grant(house.meet(BOB))
    with pytest.raises(BadRequestError, match="has a connection of its own"):
        house.rotate(ALICE, BOB)
    assert (house.called(ALICE), house.called(BOB)) == (alice, bob)


@pytest.mark.rule("D14")
def test_an_unknown_did_cannot_be_rotated_but_has_ended(house: Mediation) -> None:
    with pytest.raises(BadRequestError, match="has no connection here"):
        house.rotate(ALICE, ALICE_2)
    assert house.rotate(ALICE, None) is None
    assert house.called(ALICE_2) is None


@pytest.mark.rule("D14")
@pytest.mark.parametrize("caller", [ALICE_2, None])
def test_a_connection_of_v1_is_not_rotated(house: Mediation, caller: str | None) -> None:
    """Its key is a did:key, which may sign a JWT as well."""
    before = house.holder(1)
    with pytest.raises(BadRequestError, match="peer of DIDComm v1"):
        house.rotate(key(1), caller)
    assert house.called(key(1)) == before


@pytest.mark.rule("D14")
def test_an_ending_frees_the_keys_and_removes_the_mail(house: Mediation) -> None:
    before = rotating(house)
    house.forward(key(10))
    assert house.rotate(ALICE, None) is None
    assert house.called(ALICE) is None
    assert house.route(key(10)) is None
    with pytest.raises(NotEnrolledError):
        house.deliver(before)


@pytest.mark.rule("D14")
def test_a_used_ending_does_not_end_a_later_connection(house: Mediation) -> None:
    rotating(house)
    house.rotate(ALICE, None, START)
    again = rotating(house)
    with pytest.raises(BadRequestError, match="was used before"):
        house.rotate(ALICE, None, START)
    assert house.called(ALICE) == again


@pytest.mark.rule("D14")
@pytest.mark.parametrize("denied", [ALICE, ALICE_2])
def test_a_rotation_does_not_evade_the_deny_list(house: Mediation, denied: str) -> None:
    before = rotating(house)
    house.rules = replace(house.rules, denied=frozenset({denied}))
    with pytest.raises(DeniedError):
        house.rotate(ALICE, ALICE_2)
    assert house.called(ALICE) == before
