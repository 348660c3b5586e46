"""What mediation keeps is the same in every store: connections and their callers, routes, invitations, identities."""

import sqlite3
from dataclasses import replace

import pytest

from mediator.errors import UnavailableError
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.mailboxes.message import Filter, Usage
from mediator.store.sqlite import SqliteStore
from pickup.rules.names import MAX_CANONICAL
from pickup.rules.records import (
    AccessRule,
    Connection,
    ConnectionUse,
    Generation,
    Invitation,
    NewConnection,
    PushDevice,
    Route,
    StoredIdentity,
    Traffic,
    Verdict,
)
from pickup.rules.tables import ConnectionCursor, ConnectionRow, MediationTransaction
from tests.harness.mediation import Mediation, key
from tests.harness.samples import ALL, T0, TENANT, add, cut, get, ids, put, waiting
from tests.harness.stores import undone, within

ALICE = "did:key:z6MkAlice"
BOB = "did:peer:4zQmBob"
ODD = "Zoë's 📱 \0 \" ' % ? \\ \n \u2028 end"
"""What a peer may send as a label: also what PostgreSQL takes in no text."""
LONGEST = "did:web:" + "".join(f"{number:x}." for number in range(1000))[: MAX_CANONICAL - 8]


def introduce(caller=ALICE, tenant=TENANT, **more):
    given = {"generation": Generation.V1, "their_did": "did:sov:x", "my_did": "did:peer:4me", "created_at": T0}
    return NewConnection(tenant=tenant, callers=(caller,) if isinstance(caller, str) else caller, **given | more)


def connect(tx, caller=ALICE, tenant=TENANT, **more) -> Connection:
    connection = tx.connections.add(introduce(caller, tenant, **more))
    assert connection is not None
    return connection


def lead(tx, key, connection=None, *, tenant=TENANT, mailbox_id=7, address="box", created_at=T0) -> Route:
    no = None if connection is None else connection.id
    route = Route(tenant, key, address, mailbox_id, no, created_at, created_at)
    tx.routes.put(route)
    return route


def invite(id="i", tenant=TENANT, **more) -> Invitation:
    return Invitation(**{"id": id, "tenant": tenant, "key": f"key of {id}", "sealed": b"s", "label": ""} | TIMES | more)


TIMES = {"created_at": T0}


# Connections.


@pytest.mark.rule("D8")
def test_a_connection_comes_back_as_it_was_kept(store, reopen):
    with within(store.transaction(), MediationTransaction) as tx:
        connection = connect(
            tx,
            (ALICE, LONGEST),
            generation=Generation.V2,
            their_did="did:peer:4zQm:z" + "x" * 8000,
            keys=("k1", "k2"),
            endpoint="https://example.com/ü?a=1&b=%20",
            routing_keys=("r1", "r2"),
            label=ODD,
            invitation="i",
        )
        assert connection == Connection(
            id=connection.id,
            tenant=TENANT,
            generation=Generation.V2,
            their_did="did:peer:4zQm:z" + "x" * 8000,
            my_did="did:peer:4me",
            callers=(ALICE, LONGEST),
            created_at=T0,
            keys=("k1", "k2"),
            endpoint="https://example.com/ü?a=1&b=%20",
            routing_keys=("r1", "r2"),
            label=ODD,
            invitation="i",
        )
        changed = replace(
            connection,
            generation=Generation.V1,
            their_did="did:sov:y",
            my_did="did:web:me",
            callers=(LONGEST, BOB),
            keys=(),
            endpoint=None,
            routing_keys=(),
            label=ODD[::-1],
            invitation=None,
            seen_at=T0 + 1,
            mailbox_id=2**40,
            address="box",
            handed=(0, 5, 2**40),
            handed_in=(ODD, "batch"),
            device=PushDevice(ODD, "ios"),
        )
        tx.connections.save(changed)
    for transaction in (store.transaction, store.reading):
        with within(transaction(), MediationTransaction) as tx:
            assert tx.connections.get(connection.id) == changed
            assert tx.connections.called(TENANT, BOB) == changed
            assert tx.connections.called(TENANT, LONGEST) == changed
            assert tx.connections.called(TENANT, ALICE) is None
            assert tx.connections.of_mailbox(2**40) == changed
            assert tx.connections.list(TENANT, 0, ALL) == [changed]
    with within(reopen().reading(), MediationTransaction) as tx:
        assert tx.connections.called(TENANT, BOB) == changed


@pytest.mark.rule("D8")
def test_who_is_not_connected_is_not_found(store):
    with within(store.transaction(), MediationTransaction) as tx:
        connect(tx)
        assert tx.connections.get(99) is None
        for tenant, caller in ((TENANT, BOB), ("other", ALICE), (TENANT, ALICE.lower()), (TENANT, ""), ("", ALICE)):
            assert tx.connections.called(tenant, caller) is None
        assert tx.connections.of_mailbox(1) is None
        assert tx.connections.list("other", 0, ALL) == []
        assert tx.connections.count("other") == 0


@pytest.mark.rule("D8")
def test_connections_are_found_by_the_keys_of_their_mailboxes(store):
    with within(store.transaction(), MediationTransaction) as tx:
        granted = []
        for tenant, caller in ((TENANT, ALICE), (TENANT, BOB), ("other", ALICE)):
            mailbox = add(tx, f"box of {caller}", tenant=tenant, kind=Kind.MEDIATION)
            connection = replace(connect(tx, caller, tenant), mailbox_id=mailbox.id, address=mailbox.address)
            tx.connections.save(connection)
            granted.append((mailbox.key, connection))
        plain = add(tx, "plain")
        tx.connections.save(replace(connect(tx, "c"), mailbox_id=plain.id, address=plain.address))
        nobodys = add(tx, "nobody's", kind=Kind.MEDIATION)
    keys = [plain.key, nobodys.key, (TENANT, "missing"), ("other", f"box of {BOB}"), *(key for key, _ in granted)]
    with within(store.reading(), MediationTransaction) as tx:
        assert tx.connections.of_mailboxes(keys) == dict(granted)
        assert tx.connections.of_mailboxes(keys[:4]) == {}
        assert tx.connections.of_mailboxes([]) == {}


@pytest.mark.rule("D8")
def test_a_caller_is_of_one_connection_only(store):
    with within(store.transaction(), MediationTransaction) as tx:
        first = connect(tx, (ALICE, "a2"))
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.connections.add(introduce((BOB, "a2"))) is None
        assert tx.connections.add(introduce(("a0", ALICE, BOB))) is None
        assert tx.connections.called(TENANT, BOB) is None
        assert tx.connections.called(TENANT, "a0") is None
        assert tx.connections.list(TENANT, 0, ALL) == [first]
        assert tx.connections.count(TENANT) == 1
    with within(store.transaction(), MediationTransaction) as tx:
        second = connect(tx, BOB)
        assert second.id > first.id
    with pytest.raises(UnavailableError), within(store.transaction(), MediationTransaction) as tx:
        tx.connections.save(replace(second, callers=(BOB, ALICE)))
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.connections.called(TENANT, ALICE) == first
        assert tx.connections.get(second.id) == second


@pytest.mark.rule("D8")
def test_a_caller_moves_when_its_connection_gives_it_up_first(store):
    with within(store.transaction(), MediationTransaction) as tx:
        first, second = connect(tx, (ALICE, "a2")), connect(tx, BOB)
    with within(store.transaction(), MediationTransaction) as tx:
        tx.connections.save(replace(first, callers=("a2",)))
        tx.connections.save(replace(second, callers=(BOB, ALICE)))
    with within(store.transaction(), MediationTransaction) as tx:
        found = tx.connections.called(TENANT, ALICE)
        assert (found.id, found.callers) == (second.id, (BOB, ALICE))
        assert tx.connections.called(TENANT, "a2").id == first.id


@pytest.mark.rule("D8")
def test_each_tenant_has_connections_of_its_own(store):
    with within(store.transaction(), MediationTransaction) as tx:
        here, there = connect(tx), connect(tx, tenant="other")
        assert here.id != there.id
        assert tx.connections.called(TENANT, ALICE) == here
        assert tx.connections.called("other", ALICE) == there
        tx.connections.remove(here)
        assert tx.connections.called("other", ALICE) == there
        assert (tx.connections.count(TENANT), tx.connections.count("other")) == (0, 1)


@pytest.mark.rule("D8")
def test_the_approximate_count_follows_local_changes(store):
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.connections.about(TENANT) == 0
        first = connect(tx)
        connect(tx, tenant="other")
        assert tx.connections.add(introduce((BOB, ALICE))) is None
        assert tx.connections.about(TENANT) == 1
    with undone(store, MediationTransaction) as tx:
        connect(tx, BOB)
        assert tx.connections.about(TENANT) == 2
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.connections.about(TENANT) == 1
        connect(tx, BOB)
    with undone(store, MediationTransaction) as tx:
        tx.connections.remove(first)
        assert tx.connections.about(TENANT) == 1
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.connections.about(TENANT) == 2
        tx.connections.remove(first)
        tx.connections.remove(first)
        assert tx.connections.about(TENANT) == 1
    with within(store.reading(), MediationTransaction) as tx:
        assert (tx.connections.about(TENANT), tx.connections.about("other")) == (1, 1)


def test_connections_are_listed_in_pages(store):
    with within(store.transaction(), MediationTransaction) as tx:
        made = [connect(tx, f"c{number}") for number in range(5)]
        other = connect(tx, tenant="other")
        assert tx.connections.list(TENANT, 0, 2) == made[:2]
        assert tx.connections.list(TENANT, made[1].id, 2) == made[2:4]
        assert tx.connections.list(TENANT, made[4].id, 2) == []
        assert tx.connections.list("other", 0, ALL) == [other]
        assert tx.connections.count(TENANT) == 5


def test_connections_are_compared_and_found_by_names(store):
    with within(store.transaction(), MediationTransaction) as tx:
        mailbox = add(tx, kind=Kind.MEDIATION)
        alice, bob = connect(tx, ALICE, label=ODD), connect(tx, BOB)
        connect(tx, "did:key:z6MkAlina", "other")
        tx.connections.save(replace(alice, mailbox_id=mailbox.id, address=mailbox.address, seen_at=T0 + 5))
        for number in range(3):
            put(tx, mailbox, b"four", created_at=T0 + number)
        lead(tx, "did:key:z6MkAlso", bob)
        lead(tx, "did:key:z6MkAll", None)
        tx.uses.add([ConnectionUse(bob.id, seen_at=T0 + 7)])
    with within(store.reading(), MediationTransaction) as tx:
        assert tx.connections.newest(TENANT, 1) == [bob.id]
        for prefix, found in {"did:key:z6MkAl": [alice, bob], ALICE: [alice], "did:peer": [bob], "did:x": []}.items():
            assert tx.connections.named(TENANT, prefix, 9) == [one.id for one in found], prefix
        assert sorted(tx.connections.rows([bob.id, alice.id, 999])) == [
            ConnectionRow(alice.id, ODD, T0 + 5, mailbox.address, 3, 12, T0),
            ConnectionRow(bob.id, "", T0 + 7, "", 0, 0, 0),
        ]


@pytest.mark.rule("D8")
def test_connections_are_found_by_when_they_were_last_seen(store):
    with within(store.transaction(), MediationTransaction) as tx:
        late, early, twin = (connect(tx, f"did:x:{number}", tenant) for number, tenant in enumerate((TENANT, "b", "b")))
        for connection, at in ((late, T0 + 9), (early, T0), (twin, T0)):
            tx.connections.save(replace(connection, seen_at=at))
    with within(store.reading(), MediationTransaction) as tx:
        first = ConnectionCursor(-1, 0)
        assert [one.id for one in tx.connections.unseen(T0 + 9, first, 9)] == [early.id, twin.id, late.id]
        assert [one.id for one in tx.connections.unseen(T0 + 8, first, 9)] == [early.id, twin.id]
        assert [one.id for one in tx.connections.unseen(T0 + 9, ConnectionCursor(T0, early.id), 1)] == [twin.id]
        assert tx.connections.unseen(T0 + 9, ConnectionCursor(T0 + 9, late.id), 9) == []
        assert tx.connections.unseen(T0 - 1, first, 9) == []


def test_the_last_use_of_any_key_of_a_connection(store):
    with within(store.transaction(), MediationTransaction) as tx:
        holder, other = connect(tx), connect(tx, BOB)
        assert tx.routes.last_used(holder) == 0
        used = lead(tx, "a", holder)
        lead(tx, "b", holder)
        tx.routes.used(used, T0 + 5)
        tx.routes.used(lead(tx, "c", other), T0 + 9)
        assert tx.routes.last_used(holder) == T0 + 5


def test_the_end_of_a_connection_frees_its_callers_and_its_keys(store):
    with within(store.transaction(), MediationTransaction) as tx:
        gone, stays = connect(tx, (ALICE, "a2")), connect(tx, BOB)
        lead(tx, "k1", gone)
        lead(tx, "k2", gone)
        kept, attached = lead(tx, "k3", stays), lead(tx, "k4")
    with within(store.transaction(), MediationTransaction) as tx:
        tx.connections.remove(gone)
        assert tx.connections.get(gone.id) is None
        assert tx.connections.called(TENANT, ALICE) is tx.connections.called(TENANT, "a2") is None
        assert [tx.routes.find(TENANT, f"k{number}") for number in range(1, 5)] == [None, None, kept, attached]
        assert tx.routes.of(gone, 0, ALL) == []
        assert (tx.routes.count(gone), tx.routes.count(stays)) == (0, 1)
        tx.connections.remove(gone)
    with within(store.transaction(), MediationTransaction) as tx:
        again = connect(tx, (ALICE, "a2"))
        assert again.id not in (gone.id, stays.id)
        assert tx.routes.count(again) == 0
        lead(tx, "k1", again)


@pytest.mark.rule("D8")
def test_what_was_removed_is_not_kept_again(store):
    with within(store.transaction(), MediationTransaction) as tx:
        gone = connect(tx)
        tx.connections.remove(gone)
        tx.connections.save(replace(gone, callers=(BOB,)))
        assert tx.connections.list(TENANT, 0, ALL) == []
        assert tx.connections.called(TENANT, BOB) is None
        assert tx.connections.add(introduce(BOB)) is not None


# Routes.


@pytest.mark.rule("D3", "D8")
def test_a_route_is_found_by_keys_inside_its_did(store, reopen):
    with within(store.transaction(), MediationTransaction) as tx:
        alice, bob = connect(tx), connect(tx, BOB)
        first, second = lead(tx, "did:a", alice), lead(tx, LONGEST, bob, created_at=T0 + 1)
        attached = lead(tx, "did:b")
        for route, keys in ((second, ["k1", "k2"]), (first, ["k1"]), (first, ["k1"]), (attached, ["k3"])):
            tx.routes.add_keys(route, keys)
    store = reopen()
    with within(store.transaction(), MediationTransaction) as tx:
        assert [tx.routes.resolve(TENANT, key) for key in ("k1", "k2", "k3")] == [first, second, attached]
        assert tx.routes.find(TENANT, "k1") is tx.routes.resolve(TENANT, "k4") is tx.routes.resolve("x", "k1") is None
        own = lead(tx, "k1", bob)
        assert tx.routes.resolve(TENANT, "k1") == own
        tx.routes.remove(own)
        tx.routes.remove(first)
        assert tx.routes.resolve(TENANT, "k1") == second
        tx.connections.remove(bob)
        assert tx.routes.resolve(TENANT, "k1") is tx.routes.resolve(TENANT, "k2") is None
        tx.routes.remove_attached(attached.mailbox_id)
        assert tx.routes.resolve(TENANT, "k3") is None


@pytest.mark.rule("D8")
def test_a_route_is_found_by_its_key_alone(store, reopen):
    with within(store.transaction(), MediationTransaction) as tx:
        connection = connect(tx)
        made = [lead(tx, key, connection, mailbox_id=2**40) for key in ("k", "K", LONGEST, "did:web:a%20b")]
        elsewhere = lead(tx, "k", connect(tx, tenant="other"), tenant="other")
    store = reopen()
    with within(store.reading(), MediationTransaction) as tx:
        assert [tx.routes.find(TENANT, route.key) for route in made] == made
        assert tx.routes.find("other", "k") == elsewhere
        for tenant, key in ((TENANT, "k "), (TENANT, ""), ("other", "K"), ("", "k")):
            assert tx.routes.find(tenant, key) is None


@pytest.mark.rule("D8")
def test_a_keylist_comes_in_pages_oldest_first(store):
    with within(store.transaction(), MediationTransaction) as tx:
        connection, other = connect(tx), connect(tx, BOB)
        for key, created_at in (("b", T0), ("c", T0 - 1), ("a", T0), ("Z", T0), ("d", T0 + 1)):
            lead(tx, key, connection, created_at=created_at)
        lead(tx, "e", other)
        lead(tx, "f")

        def keys(offset, limit):
            return [route.key for route in tx.routes.of(connection, offset, limit)]

        assert keys(0, ALL) == ["c", "Z", "a", "b", "d"]
        assert (keys(0, 2), keys(2, 2), keys(4, 2), keys(5, 2)) == (["c", "Z"], ["a", "b"], ["d"], [])
        assert tx.routes.count(connection) == 5


@pytest.mark.rule("D8")
def test_routes_are_counted_as_they_come_change_and_go(store, reopen):
    with within(store.transaction(), MediationTransaction) as tx:
        connection = connect(tx)
        routes = [lead(tx, f"k{number}", connection) for number in range(4)]
        tx.routes.put(replace(routes[0], used_at=T0 + 1))
        tx.routes.remove(routes[1])
        tx.routes.remove(routes[1])
        assert tx.routes.count(connection) == 3
    with undone(store, MediationTransaction) as tx:
        lead(tx, "k9", connection)
        tx.routes.remove(routes[2])
        tx.routes.remove(routes[3])
        assert tx.routes.count(connection) == 2
    with within(store.transaction(), MediationTransaction) as tx:
        # What the connection is otherwise does not change how many it has.
        tx.connections.save(replace(connection, seen_at=T0 + 1))
    store = reopen()
    with within(store.reading(), MediationTransaction) as tx:
        assert tx.routes.count(connection) == len(tx.routes.of(connection, 0, ALL)) == 3


@pytest.mark.rule("D1", "D8")
def test_a_route_changes_its_mailbox(store):
    with within(store.transaction(), MediationTransaction) as tx:
        connection = connect(tx)
        route = lead(tx, "k", connection, mailbox_id=7)
        moved = replace(route, mailbox_id=8, address="new", used_at=T0 + 5)
        tx.routes.put(moved)
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.routes.find(TENANT, "k") == moved
        assert tx.routes.of(connection, 0, ALL) == [moved]


@pytest.mark.rule("D8")
def test_a_route_is_not_taken_from_who_has_it_by_now(store):
    with within(store.transaction(), MediationTransaction) as tx:
        first, second = connect(tx), connect(tx, BOB)
        route = lead(tx, "k", first)
    for holder in (second, None):
        with pytest.raises(UnavailableError), within(store.transaction(), MediationTransaction) as tx:
            lead(tx, "k", holder)
    with within(store.transaction(), MediationTransaction) as tx:
        tx.routes.remove(replace(route, connection_id=second.id))
        tx.routes.remove(replace(route, connection_id=None))
        assert tx.routes.find(TENANT, "k") == route
        assert (tx.routes.count(first), tx.routes.count(second)) == (1, 0)
        tx.routes.remove(route)
        taken = lead(tx, "k", second)
        assert tx.routes.find(TENANT, "k") == taken
        assert (tx.routes.count(first), tx.routes.count(second)) == (0, 1)


@pytest.mark.rule("D8")
def test_the_use_of_a_route_is_noted_only_while_it_is_there(store):
    with within(store.transaction(), MediationTransaction) as tx:
        connection = connect(tx)
        route = lead(tx, "k", connection)
        tx.routes.used(route, T0 + 9)
        assert tx.routes.find(TENANT, "k") == replace(route, used_at=T0 + 9)
        moved = replace(route, mailbox_id=8)
        tx.routes.put(moved)
        tx.routes.used(route, T0 + 10)
        assert tx.routes.find(TENANT, "k") == moved
        tx.routes.remove(moved)
        tx.routes.used(moved, T0 + 11)
        assert tx.routes.find(TENANT, "k") is None


@pytest.mark.rule("D11")
def test_keys_attached_to_a_mailbox_are_listed_and_removed(store):
    with within(store.transaction(), MediationTransaction) as tx:
        connection = connect(tx)
        mailbox, other = add(tx, retention=Retention.UNTIL_ACK), add(tx, "other")
        late = lead(tx, "k1", mailbox_id=mailbox.id, created_at=T0 + 1)
        early = lead(tx, "k2", mailbox_id=mailbox.id)
        stays = lead(tx, "k3", mailbox_id=other.id, created_at=T0 + 2)
        theirs = lead(tx, "k4", connection, mailbox_id=mailbox.id)
        elsewhere = lead(tx, "k1", tenant="other", mailbox_id=99)
        assert tx.routes.attached(TENANT, ALL) == [early, late, stays]
        assert tx.routes.attached(TENANT, 1) == [early]
        assert tx.routes.attached("other", ALL) == [elsewhere]
    with undone(store, MediationTransaction) as tx:
        tx.routes.remove_attached(mailbox.id)
        assert tx.routes.attached(TENANT, ALL) == [stays]
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.routes.attached(TENANT, ALL) == [early, late, stays]
        tx.routes.remove_attached(mailbox.id)
        assert tx.routes.attached(TENANT, ALL) == [stays]
        assert tx.routes.find(TENANT, "k1") is tx.routes.find(TENANT, "k2") is None
        # A keylist is its holder's: the next grant leads its keys to a new mailbox (D1).
        assert tx.routes.find(TENANT, "k4") == theirs
        assert tx.routes.attached("other", ALL) == [elsewhere]


# Invitations.


def test_an_invitation_comes_back_as_it_was_kept(store, reopen):
    bare = invite("bare")
    full = invite(
        "full",
        key=LONGEST,
        sealed=bytes(range(256)),
        label=ODD,
        expire_at=2**50,
        max_uses=3,
        uses=2,
    )
    with within(store.transaction(), MediationTransaction) as tx:
        tx.invitations.put(bare)
        tx.invitations.put(full)
        used = replace(bare, uses=1, label="ü", sealed=b"", max_uses=1)
        tx.invitations.put(used)
    store = reopen()
    for transaction in (store.transaction, store.reading):
        with within(transaction(), MediationTransaction) as tx:
            assert tx.invitations.get("bare") == used
            assert tx.invitations.get("full") == full
            assert tx.invitations.keyed(LONGEST) == full
            for id in ("", "FULL", "full\0", "\0", "%", "x" * 10_000):
                assert tx.invitations.get(id) is tx.invitations.keyed(f"k{id.replace(chr(0), '')}") is None
    with within(store.transaction(), MediationTransaction) as tx:
        tx.invitations.remove(full)
        tx.invitations.remove(full)
        assert tx.invitations.get("full") is tx.invitations.keyed(LONGEST) is None
        assert tx.invitations.list(TENANT, ALL) == [used]


def test_invitations_are_listed_the_newest_first(store):
    with within(store.transaction(), MediationTransaction) as tx:
        for id, created_at in (("b", T0), ("c", T0 - 1), ("a", T0), ("d", T0 + 1)):
            tx.invitations.put(invite(id, created_at=created_at))
        tx.invitations.put(invite("e", tenant="other"))
        assert [kept.id for kept in tx.invitations.list(TENANT, ALL)] == ["d", "a", "b", "c"]
        assert [kept.id for kept in tx.invitations.list(TENANT, 2)] == ["d", "a"]
        assert [kept.id for kept in tx.invitations.list("other", ALL)] == ["e"]
        assert tx.invitations.list("none", ALL) == []


# Identities.


def test_a_new_identity_retires_the_others_of_its_tenant(store, reopen):
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.identities.all() == []
        first = tx.identities.add(TENANT, bytes(range(256)), ("did:web:a", "did:peer:2." + "x" * 4000), T0)
        other = tx.identities.add("other", b"o", [], T0)
        assert first == StoredIdentity(
            first.id, TENANT, bytes(range(256)), ("did:web:a", "did:peer:2." + "x" * 4000), T0
        )
    with within(store.transaction(), MediationTransaction) as tx:
        second = tx.identities.add(TENANT, b"2", ("did:web:a",), T0 + 1)
    with within(store.transaction(), MediationTransaction) as tx:
        third = tx.identities.add(TENANT, b"3", (), T0 + 2)
        known = replace(third, dids=("did:key:ü",), sealed=b"again")
        tx.identities.save(known)
        tx.identities.save(replace(second, sealed=b"22"))
    store = reopen()
    with within(store.reading(), MediationTransaction) as tx:
        assert tx.identities.all() == [
            replace(first, retired_at=T0 + 1),
            other,
            replace(second, retired_at=T0 + 2, sealed=b"22"),
            known,
        ]
        assert [kept.id for kept in tx.identities.all()] == sorted(kept.id for kept in tx.identities.all())


# Transactions.


@pytest.mark.rule("A8", "D8")
def test_a_rollback_takes_all_of_mediation_back(store, reopen):
    def picture(tx):
        first = tx.connections.get(connection.id)
        return [
            *(tx.connections.called(TENANT, caller) for caller in (ALICE, BOB, "a2")),
            tx.connections.list(TENANT, 0, ALL),
            tx.connections.count(TENANT),
            tx.connections.of_mailbox(7),
            first and (tx.routes.of(first, 0, ALL), tx.routes.count(first)),
            *(tx.routes.find(TENANT, key) for key in ("k1", "k2", "k3", "k4", "k5")),
            tx.routes.attached(TENANT, ALL),
            tx.invitations.list(TENANT, ALL),
            tx.invitations.keyed("key of i"),
            tx.identities.all(),
        ]

    with within(store.transaction(), MediationTransaction) as tx:
        connection = connect(tx, (ALICE, "a2"))
        gone = connect(tx, BOB)
        routes = [lead(tx, "k1", connection), lead(tx, "k2", connection), lead(tx, "k3", gone)]
        attached = lead(tx, "k4")
        tx.invitations.put(invite("i"))
        tx.invitations.put(invite("j"))
        identity = tx.identities.add(TENANT, b"1", ("did:web:a",), T0)
    with within(store.transaction(), MediationTransaction) as tx:
        before = picture(tx)
    with undone(store, MediationTransaction) as tx:
        tx.connections.save(replace(connection, callers=(ALICE, "a3"), mailbox_id=7, handed=(1,)))
        tx.connections.remove(gone)
        connect(tx, (BOB, "a2"))
        connect(tx, "c")
        tx.routes.remove(routes[0])
        tx.routes.put(replace(routes[1], mailbox_id=8))
        tx.routes.used(attached, T0 + 9)
        lead(tx, "k5", connection)
        tx.routes.remove(attached)
        tx.invitations.put(replace(invite("i"), uses=1, key="changed"))
        tx.invitations.remove(invite("j"))
        tx.identities.add(TENANT, b"2", (), T0 + 1)
        tx.identities.save(replace(identity, dids=()))
        assert all(one != other for one, other in zip(before, picture(tx), strict=True))
    with within(store.reading(), MediationTransaction) as tx:
        assert picture(tx) == before
    store = reopen()
    with within(store.transaction(), MediationTransaction) as tx:
        assert picture(tx) == before


# Mail of one recipient.


@pytest.mark.rule("D3", "D4")
def test_mail_for_one_recipient_comes_alone_and_in_order(store):
    with within(store.transaction(), MediationTransaction) as tx:
        mailbox, other = add(tx, kind=Kind.MEDIATION), add(tx, "other")
        for number in range(6):
            put(tx, mailbox, bytes([number]), recipient="ab"[number % 2], lane=Lane(number % 4))
        put(tx, mailbox, b"none")
        put(tx, mailbox, b"late", recipient="a", expire_at=T0 + 10)
        put(tx, mailbox, b"long", recipient=LONGEST)
        put(tx, other, b"other", recipient="a")

        def got(recipient, after=-1, limit=ALL, budget=ALL, now=T0, without=()):
            return ids(tx.messages.addressed(mailbox, recipient, after, limit, budget, now, without))

        assert got("a") == [0, 2, 4, 7]
        assert got("b") == [1, 3, 5]
        assert got("a", after=0) == got("a", after=1) == [2, 4, 7]
        assert got("a", limit=2) == [0, 2]
        assert got("a", limit=2, without=[0, 1, 4]) == [2, 7]
        assert got("a", without={0, 2, 4, 7}) == []
        assert got("a", now=T0 + 10) == [0, 2, 4]
        assert got("A") == got("") == []
        [message] = tx.messages.addressed(mailbox, LONGEST, -1, ALL, ALL, T0)
        assert (message.payload, message.recipient) == (b"long", LONGEST)
        assert ids(tx.messages.newest(mailbox, Filter(recipient="a"), 2, ALL, T0 + 10)) == [2, 4]
        assert ids(tx.messages.newest(mailbox, Filter(recipient="a", before_id=4), 2, ALL, T0)) == [0, 2]
        assert ids(tx.messages.newest(mailbox, Filter(recipient="c"), 2, ALL, T0)) == []
    with within(store.reading(), MediationTransaction) as tx:
        assert ids(tx.messages.addressed(get(tx), "a", -1, ALL, ALL, T0)) == [0, 2, 4, 7]


@pytest.mark.rule("D3")
@pytest.mark.parametrize(("budget", "count"), [(0, 1), (1, 1), (10, 1), (11, 2), (20, 2), (21, 3), (2**20, 4)])
def test_mail_for_one_recipient_stops_behind_its_budget(store, budget, count):
    with within(store.transaction(), MediationTransaction) as tx:
        mailbox = add(tx)
        for number in range(8):
            put(tx, mailbox, b"x" * 10, recipient="ab"[number % 2])
    with within(store.transaction(), MediationTransaction) as tx:
        assert len(tx.messages.addressed(get(tx), "a", -1, ALL, budget, T0)) == count


@pytest.mark.rule("D1", "D3", "S5")
def test_the_count_of_a_recipient_stays_right(store, reopen):
    with within(store.transaction(), MediationTransaction) as tx:
        mailbox = add(tx, retention=Retention.UNTIL_ACK)
        tx.delays.add(waiting(mailbox, T0 + 5, b"delayed", recipient="a"))
        put(tx, mailbox, b"short", recipient="a", expire_at=T0 + 1)
        put(tx, mailbox, b"kept", recipient="a")
        put(tx, mailbox, b"b", recipient="b")
        assert tx.messages.recipient_usage(mailbox, "a") == Usage(2, 9)
    with within(store.transaction(), MediationTransaction) as tx:
        mailbox = get(tx)
        tx.messages.remove(mailbox, [item.ref for item in tx.messages.expired(T0 + 1, ALL)])
        [delayed] = tx.delays.due(T0 + 5, ALL, ALL)
        assert tx.messages.recipient_usage(mailbox, "a") == Usage(1, 4)
        tx.delays.remove([delayed])
        tx.messages.append(mailbox, replace(delayed.message, msg_id=mailbox.next_id))
        assert tx.messages.recipient_usage(mailbox, "a") == Usage(2, 11)
        assert tx.messages.recipient_usage(mailbox, "b") == Usage(1, 1)
    with undone(store, MediationTransaction) as tx:
        put(tx, get(tx), b"undone", recipient="a")
        cut(tx, get(tx), 2)
    store = reopen()
    with within(store.transaction(), MediationTransaction) as tx:
        mailbox = get(tx)
        assert tx.messages.recipient_usage(mailbox, "a") == Usage(2, 11)
        cut(tx, mailbox, 1, 3)
        put(tx, mailbox, b"again", recipient="b")
        assert tx.messages.recipient_usage(mailbox, "a") == Usage(0, 0)
        assert tx.messages.recipient_usage(mailbox, "b") == Usage(2, 6)
        cut(tx, mailbox, 2, 4)
        tx.mailboxes.retire(mailbox)
        tx.mailboxes.drop(mailbox)
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.messages.recipient_usage(add(tx), "b") == Usage(0, 0)


# Envelopes that were taken.


@pytest.mark.rule("D13")
def test_an_envelope_is_new_again_after_a_rollback(store, reopen):
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.replays.add(b"alice", b"1", T0 + 1, 10)
        assert not tx.replays.add(b"alice", b"1", T0 + 1, 10)
        assert tx.replays.add(b"bob", b"1", T0 + 1, 10)
    with undone(store, MediationTransaction) as tx:
        assert tx.replays.add(b"alice", b"2", T0 + 1, 10)
        tx.replays.remove(b"alice", b"1")
    with within(reopen().transaction(), MediationTransaction) as tx:
        assert not tx.replays.add(b"alice", b"1", T0 + 1, 10)
        assert tx.replays.add(b"alice", b"2", T0 + 1, 10)
        tx.replays.remove(b"alice", b"1")
        assert tx.replays.add(b"alice", b"1", T0 + 1, 10)


@pytest.mark.rule("D13")
def test_the_newest_envelopes_of_a_sender_are_kept(store):
    with within(store.transaction(), MediationTransaction) as tx:
        for number in range(5):
            assert tx.replays.add(b"alice", bytes([number]), T0 + number, 3)
            assert tx.replays.add(b"bob", bytes([number]), T0 + 100, 10)
    with within(store.transaction(), MediationTransaction) as tx:
        assert [tx.replays.add(b"alice", bytes([number]), T0, 10) for number in range(5)] == [True, True] + [False] * 3
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.replays.collect(T0 + 3, 3) == 3
        assert tx.replays.collect(T0 + 3, 3) == 1
        assert tx.replays.collect(T0 + 3, 3) == 0
        assert not tx.replays.add(b"alice", bytes([4]), T0, 10)
        assert not tx.replays.add(b"bob", bytes([0]), T0, 10)


@pytest.mark.rule("D9")
def test_a_forward_that_reaches_nobody_goes_to_disk_each_time(tmp_path):
    path = tmp_path / "m.db"
    house = Mediation(SqliteStore(path))
    house.holder(1, key(10))
    # Another connection's view of how often the file was written.
    other = sqlite3.connect(path, isolation_level=None)
    seen = [other.execute("PRAGMA data_version").fetchone()]
    # All in the same millisecond.
    for number in (99, 99, 10, 99):
        house.forward(key(number))
        seen.append(other.execute("PRAGMA data_version").fetchone())
    other.close()
    house.store.close()
    assert len(set(seen)) == len(seen)


# Allow and deny lists, and what is counted.


def test_a_name_is_on_one_list_with_its_note(store):
    with within(store.transaction(), MediationTransaction) as tx:
        tx.access_rules.put(AccessRule(ALICE, Verdict.DENY, ODD, T0))
        tx.access_rules.put(AccessRule(LONGEST, Verdict.ALLOW, "", T0 + 1))
        tx.access_rules.put(AccessRule(ALICE, Verdict.ALLOW, "again", T0 + 2))
    with within(store.transaction(), MediationTransaction) as tx:
        assert [(rule.name, rule.verdict, rule.note) for rule in tx.access_rules.all()] == [
            (LONGEST, Verdict.ALLOW, ""),
            (ALICE, Verdict.ALLOW, "again"),
        ]
        assert tx.access_rules.count() == 2
        assert not tx.access_rules.remove(ALICE, Verdict.DENY)
        assert tx.access_rules.remove(ALICE, Verdict.ALLOW)
        assert tx.access_rules.count() == 1


def test_counts_of_connections_add_up_and_go_with_them(store):
    with within(store.transaction(), MediationTransaction) as tx:
        alice, bob = connect(tx, ALICE), connect(tx, BOB)
        tx.connections.save(replace(bob, mailbox_id=7, address="box"))
        assert tx.uses.holders([7, 8]) == {7: bob.id}
        first = ConnectionUse(alice.id, T0, "http", "2.0", "okhttp/4", Traffic(1, 10))
        gone = ConnectionUse(10_000, T0, "http")
        tx.uses.add([first, ConnectionUse(bob.id, traffic=Traffic(delivered=1)), gone])
    with within(store.transaction(), MediationTransaction) as tx:
        tx.uses.add([ConnectionUse(alice.id, traffic=Traffic(2, 20, 3, 30, 4, 40))])
        tx.uses.add([ConnectionUse(alice.id, T0 + 5, "ws")])
        tx.uses.add([ConnectionUse(alice.id, T0 + 1)])
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.uses.of([alice.id, bob.id, gone.connection_id]) == {
            alice.id: ConnectionUse(alice.id, T0 + 5, "ws", "2.0", "okhttp/4", Traffic(3, 30, 3, 30, 4, 40)),
            bob.id: ConnectionUse(bob.id, traffic=Traffic(delivered=1)),
        }
        tx.connections.remove(alice)
        assert list(tx.uses.of([alice.id, bob.id])) == [bob.id]


def test_counts_of_hours_add_up_and_old_ones_are_forgotten(store):
    with within(store.transaction(), MediationTransaction) as tx:
        tx.uses.add_hours({1000: Traffic(queued=1), 2000: Traffic(queued=2)}, 0)
        tx.uses.add_hours({2000: Traffic(queued=3, acknowledged_bytes=4), 3000: Traffic(1)}, 2000)
    with within(store.transaction(), MediationTransaction) as tx:
        assert tx.uses.hours(0) == [(2000, Traffic(queued=5, acknowledged_bytes=4)), (3000, Traffic(1))]
        assert tx.uses.hours(2001) == [(3000, Traffic(1))]
