"""Mediation on several instances that share one PostgreSQL: as if one after the other had done it."""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from mediator.errors import NoSuchInvitationError, UnavailableError
from mediator.mailboxes import collecting, creating
from mediator.mailboxes.mailbox import MailboxKey
from mediator.store.base import Store
from pickup.rules import connecting, forwarding, granting, message_queue, names
from pickup.rules.forwarding import Forward
from pickup.rules.granting import KeylistResult, KeylistUpdate
from pickup.rules.records import Connection, Generation, Invitation, MediationRules, NewConnection
from pickup.rules.tables import MediationTransaction
from tests.harness.stores import within
from tests.integration.test_postgres_store import (
    ALL,
    BOUNDS,
    DEADLINE,
    INSTANCES,
    NOW,
    QUOTAS,
    TENANT,
    instances,
    open_store,
    store,
    together,
    url,
)

__all__ = ["instances", "open_store", "store", "url"]

pytestmark = pytest.mark.postgres

RULES = MediationRules()


def key(number: int) -> str:
    return names.from_verkey(number.to_bytes(32, "big"))


def again(store: Store, work: Callable[[MediationTransaction], object], *places: MailboxKey) -> object:
    """Run a verb as the writer does: once more when it lost a race."""
    try:
        with within(store.transaction(places), MediationTransaction) as tx:
            return work(tx)
    except UnavailableError:
        with within(store.transaction(places), MediationTransaction) as tx:
            return work(tx)


def peer(*callers: str, invitation: str | None = None) -> NewConnection:
    return NewConnection(TENANT, Generation.V1, "did:x:1", "did:x:me", callers, NOW, invitation=invitation)


def enroll(store: Store, caller: str) -> Connection:
    with within(store.transaction(), MediationTransaction) as tx:
        connection = connecting.connect(tx, RULES, peer(caller), NOW)
        return granting.grant(tx, BOUNDS, os.urandom, RULES, connection, NOW)


@pytest.mark.rule("D8")
def test_a_peer_connecting_at_all_instances_is_one(store, instances):
    for turn in range(20):
        new = peer(f"a{turn}", f"b{turn}")
        found: list[Connection] = []
        together(
            *(
                lambda own=own, new=new, found=found: found.append(
                    again(own, lambda tx: connecting.connect(tx, RULES, new, NOW))
                )
                for own in instances
            )
        )
        assert len({connection.id for connection in found}) == 1
        with within(store.reading(), MediationTransaction) as tx:
            assert tx.connections.count(TENANT) == turn + 1
            kept = tx.connections.called(TENANT, f"a{turn}")
            assert kept == tx.connections.called(TENANT, f"b{turn}")
            assert kept.id == found[0].id


@pytest.mark.rule("D7", "D8")
def test_changes_of_several_instances_are_all_kept(store, instances):
    with within(store.transaction(), MediationTransaction) as tx:
        connection = connecting.connect(tx, RULES, peer("c"), NOW)

    def change(number: int) -> None:
        for turn in range(30):
            with within(instances[number].transaction(), MediationTransaction) as tx:
                found = tx.connections.get(connection.id) if turn % 2 else tx.connections.called(TENANT, "c")
                tx.connections.save(replace(found, handed=(*found.handed, 100 * number + turn)))

    together(*(lambda number=number: change(number) for number in range(INSTANCES)))
    with within(store.reading(), MediationTransaction) as tx:
        handed = tx.connections.get(connection.id).handed
    assert sorted(handed) == [100 * number + turn for number in range(INSTANCES) for turn in range(30)]


def wait_for_a_lock(url: str) -> None:
    """Return when somebody in the database waits for somebody else."""
    import psycopg

    sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    end = time.monotonic() + DEADLINE
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(sql).fetchone() == (0,):
            assert time.monotonic() < end, "nobody waits"
            time.sleep(0.01)


@pytest.mark.rule("D8")
def test_a_caller_that_moves_meanwhile_is_found_where_it_is(url, store, instances):
    with within(store.transaction(), MediationTransaction) as tx:
        old, new = (connecting.connect(tx, RULES, peer(*callers), NOW) for callers in (("a", "c"), ("b",)))
    found: list[Connection] = []

    def look() -> None:
        with within(instances[0].transaction(), MediationTransaction) as tx:
            found.append(tx.connections.called(TENANT, "c"))

    looker = threading.Thread(target=look, daemon=True)
    with within(store.transaction(), MediationTransaction) as tx:
        tx.connections.save(replace(old, callers=("a",)))
        tx.connections.save(replace(new, callers=("b", "c")))
        looker.start()
        wait_for_a_lock(url)
    looker.join(DEADLINE)
    assert found == [replace(new, callers=("b", "c"))]


@pytest.mark.rule("D7", "D8")
def test_a_connection_ends_while_its_mailbox_is_locked(url, store, instances):
    holder = enroll(store, "c")
    ended: list[None] = []

    def end() -> None:
        with within(instances[0].transaction(), MediationTransaction) as tx:
            ended.append(connecting.disconnect(tx, holder, NOW))

    ender = threading.Thread(target=end, daemon=True)
    with within(store.transaction([holder.mailbox_key]), MediationTransaction) as tx:
        ender.start()
        wait_for_a_lock(url)
        # Who waits for the mailbox has not locked the connection, or neither would ever go on.
        tx.connections.save(replace(tx.connections.get(holder.id), handed=(1,)))
    ender.join(DEADLINE)
    assert ended == [None]
    with within(store.reading(), MediationTransaction) as tx:
        assert tx.connections.called(TENANT, "c") is None


@pytest.mark.rule("D8")
def test_a_key_that_several_peers_want_at_once_is_given_to_one(store, instances):
    peers = [enroll(store, f"c{number}") for number in range(INSTANCES)]
    wanted = [KeylistUpdate(key(number), "add") for number in range(10)]
    results: dict[int, list[KeylistResult]] = {}

    def want(number: int) -> None:
        for change in wanted:
            work = lambda tx: granting.update_keylist(tx, RULES, peers[number], [change], frozenset(), NOW)  # noqa: B023, E731
            results.setdefault(number, []).extend(again(instances[number], work))

    together(*(lambda number=number: want(number) for number in range(INSTANCES)))
    for outcome in zip(*results.values(), strict=True):
        assert Counter(outcome) == {KeylistResult.SUCCESS: 1, KeylistResult.CLIENT_ERROR: INSTANCES - 1}
    with within(store.reading(), MediationTransaction) as tx:
        for number, connection in enumerate(peers):
            mine = [route.key for route in tx.routes.of(connection, 0, ALL)]
            assert len(mine) == tx.routes.count(connection) == results[number].count(KeylistResult.SUCCESS)


@pytest.mark.rule("D8")
def test_a_pending_forward_does_not_restore_a_removed_key(store, instances):
    holder = enroll(store, "c")
    first, second = instances[:2]
    with within(store.transaction(), MediationTransaction) as tx:
        granting.update_keylist(tx, RULES, holder, [KeylistUpdate(key(1), "add")], frozenset(), NOW)
    with within(first.transaction(), MediationTransaction) as tx:
        route = tx.routes.find(TENANT, key(1))
        with within(second.transaction(), MediationTransaction) as other:
            granting.update_keylist(other, RULES, holder, [KeylistUpdate(key(1), "remove")], frozenset(), NOW)
        tx.routes.used(route, NOW + 1)
    with within(store.reading(), MediationTransaction) as tx:
        assert tx.routes.find(TENANT, key(1)) is None
        assert tx.routes.count(holder) == 0


@pytest.mark.rule("D3", "D4", "D8")
def test_forwards_pickups_and_keylists_do_not_deadlock(store, instances):
    peers = [enroll(store, f"c{number}") for number in range(3)]
    places = [(TENANT, connection.address) for connection in peers]
    with within(store.transaction(), MediationTransaction) as tx:
        for number, connection in enumerate(peers):
            granting.update_keylist(tx, RULES, connection, [KeylistUpdate(key(number), "add")], frozenset(), NOW)

    def sender(number: int) -> None:
        chance = random.Random(number)
        for _ in range(60):
            chosen = chance.sample(range(3), 3)
            # A day later each time, so that the use of the routes is noted as well.
            with within(instances[number].transaction([places[one] for one in chosen]), MediationTransaction) as tx:
                for one in chosen:
                    request = Forward(TENANT, (key(one),), (b"x" * 10,))
                    outcome = forwarding.forward(tx, BOUNDS, QUOTAS, RULES, request, NOW + number)
                    assert outcome.queued == 1

    taken: Counter[int] = Counter()

    def holder(number: int) -> None:
        chance = random.Random(number)
        for turn in range(60):
            chosen = chance.sample(range(3), 3)
            with within(instances[number].transaction([places[one] for one in chosen]), MediationTransaction) as tx:
                for one in chosen:
                    connection = connecting.record_use(tx, peers[one], NOW + turn * 3_600_000)
                    settled = message_queue.confirm_batch(tx, connection, NOW)
                    got = message_queue.deliver(tx, settled, 2, None, ALL, NOW)
                    message_queue.record_batch(tx, settled, got, [f"{number} {turn}"])
                    taken[one] += message_queue.acknowledge(tx, settled, [message.msg_id for message in got], NOW)
                    extra = KeylistUpdate(key(100 + number * 10 + one), "add" if turn % 2 == 0 else "remove")
                    granting.update_keylist(tx, RULES, settled, [extra], frozenset(), NOW)

    # A deadlock would end one of them: nothing is done again here.
    together(
        *(lambda number=number: sender(number) for number in (0, 1)),
        *(lambda number=number: holder(number) for number in (2, 3)),
    )
    with within(store.transaction(), MediationTransaction) as tx:
        for number, connection in enumerate(peers):
            mailbox = tx.mailboxes.find(*places[number])
            left = tx.messages.addressed(mailbox, key(number), -1, ALL, ALL, NOW)
            held = tx.messages.recipient_usage(mailbox, key(number))
            assert (held.messages, held.bytes) == (len(left), 10 * len(left)) == (mailbox.messages, mailbox.bytes)
            assert taken[number] + len(left) == 120
            assert tx.routes.count(connection) == len(tx.routes.of(connection, 0, ALL)) == 1


@pytest.mark.rule("D1", "M4")
def test_a_mailbox_that_is_deleted_meanwhile_takes_no_forward(store, instances):
    for turn in range(20):
        holder = enroll(store, f"c{turn}")
        with within(store.transaction(), MediationTransaction) as tx:
            granting.update_keylist(tx, RULES, holder, [KeylistUpdate(key(turn), "add")], frozenset(), NOW)
        queued: list[int] = []

        def send(number: int, turn: int = turn, queued: list[int] = queued) -> None:
            request = Forward(TENANT, (key(turn),), (b"x",))
            with within(instances[number].transaction(), MediationTransaction) as tx:
                queued.append(forwarding.forward(tx, BOUNDS, QUOTAS, RULES, request, NOW).queued)

        def end(holder: Connection = holder) -> None:
            with within(instances[3].transaction(), MediationTransaction) as tx:
                creating.delete(tx, TENANT, holder.address, NOW)
            with within(instances[3].transaction(), MediationTransaction) as tx:
                while collecting.retired_mailboxes(tx, NOW, 100).total:
                    pass

        together(*(lambda number=number: send(number) for number in range(3)), end)
        with within(store.transaction(), MediationTransaction) as tx:
            granted = granting.grant(tx, BOUNDS, os.urandom, RULES, holder, NOW)
            assert granted.mailbox_id != holder.mailbox_id
            assert tx.routes.find(TENANT, key(turn)).mailbox_id == granted.mailbox_id
        with within(store.transaction(), MediationTransaction) as tx:
            request = Forward(TENANT, (key(turn),), (b"x",))
            assert forwarding.forward(tx, BOUNDS, QUOTAS, RULES, request, NOW).queued == 1
            assert message_queue.status(tx, granted, key(turn), NOW).count == 1


@pytest.mark.rule("D8")
def test_an_invitation_for_one_lets_one_in(store, instances):
    for turn in range(10):
        with within(store.transaction(), MediationTransaction) as tx:
            tx.invitations.put(Invitation(f"i{turn}", TENANT, "k", b"", "", NOW, max_uses=1))
        came: list[int] = []

        def come(number: int, turn: int = turn, came: list[int] = came) -> None:
            try:
                with within(instances[number].transaction(), MediationTransaction) as tx:
                    connecting.connect(tx, RULES, peer(f"c{turn}.{number}", invitation=f"i{turn}"), NOW)
            except NoSuchInvitationError:
                return
            came.append(number)

        together(*(lambda number=number: come(number) for number in range(INSTANCES)))
        assert len(came) == 1
        with within(store.reading(), MediationTransaction) as tx:
            assert tx.invitations.get(f"i{turn}").uses == 1
