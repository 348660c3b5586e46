"""Several instances on one PostgreSQL: what they do at the same time is as if one after the other had done it."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest

from mediator.broker import Broker
from mediator.errors import MailboxExistsError
from mediator.mailboxes import (
    broadcasting,
    collecting,
    copying,
    creating,
    fetching,
    moving,
    querying,
    sending,
    settling,
)
from mediator.mailboxes.address import PUBLIC
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.mailboxes.copy_rule import CopyRule
from mediator.mailboxes.creating import Create
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.group import NO_LEASES
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Draft, Filter, Message
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.sending import Send
from mediator.mailboxes.settling import Ack
from mediator.mailboxes.transaction import Transaction
from mediator.operate.message_operations import MessageOperations
from mediator.operate.operations import Actor, Operations, Right
from mediator.store.base import Store
from tests.harness.postgres import Server

pytestmark = pytest.mark.postgres

NOW = 1_767_225_600_000
TENANT = "default"
INSTANCES = 4
DEADLINE = 60
ALL = 2**40
BOUNDS = Bounds()
QUOTAS = Quotas(Quota(), Quota())


@pytest.fixture
def url(postgres: Server) -> Iterator[str]:
    with postgres.database() as url:
        yield url


@pytest.fixture
def open_store(url: str) -> Iterator[Callable[[], Store]]:
    from mediator.store.postgres import PostgresStore

    opened: list[Store] = []

    def make() -> Store:
        store = PostgresStore(url)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[[], Store]) -> Store:
    """A store of the main thread."""
    return open_store()


@pytest.fixture
def instances(open_store: Callable[[], Store]) -> list[Store]:
    """Stores as several processes would have them, one for each thread."""
    return [open_store() for _ in range(INSTANCES)]


def together(*works: Callable[[], object]) -> None:
    """Run all at once, each in a thread of its own; raise what any of them raised."""
    start = threading.Barrier(len(works))
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            start.wait(DEADLINE)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def create(store: Store, *addresses: str, **options: object) -> None:
    with store.transaction() as tx:
        for address in addresses:
            creating.create(tx, BOUNDS, random.randbytes, Create(TENANT, address, **options), NOW)


def send(tx: Transaction, address: str, payload: bytes = b"x", now: int = NOW, **draft: object) -> int:
    return sending.send(tx, BOUNDS, QUOTAS, Send(TENANT, address, Draft(payload, **draft)), now)


def messages(store: Store, address: str) -> list[Message]:
    """Return all messages of a mailbox after holding its counters to them."""
    with store.reading() as tx:
        mailbox = creating.get_live_mailbox(tx, TENANT, address, NOW)
        found = tx.messages.first(mailbox, ALL)
        assert mailbox.messages == len(found)
        assert mailbox.bytes == sum(ref.size for ref in found)
        return tx.messages.newest(mailbox, Filter(), ALL, ALL, 0)


@pytest.mark.rule("A3", "A10")
def test_both_addresses_of_a_mailbox_lock_it_in_one_order(store, instances):
    names = [f"box{number}" for number in range(6)]
    create(store, *names)
    with store.transaction() as tx:
        to = {name: tx.mailboxes.send_only(tx.mailboxes.find(TENANT, name)) for name in names}

    def sender(number: int) -> None:
        chance = random.Random(number)
        for _ in range(30):
            chosen = [chance.choice((name, to[name])) for name in chance.sample(names, 3)]
            with instances[number].transaction([(TENANT, address) for address in chosen]) as tx:
                for address in chosen:
                    send(tx, address)

    together(*(lambda number=number: sender(number) for number in range(INSTANCES)))
    stored = [messages(store, name) for name in names]
    assert sum(map(len, stored)) == INSTANCES * 30 * 3
    assert all([m.msg_id for m in found] == list(range(len(found))) for found in stored)


@pytest.mark.rule("A3", "A8")
def test_senders_on_several_instances_get_ids_without_gaps(store, instances, open_store):
    addresses = ["a", "b", "c"]
    create(store, *addresses)
    sent: dict[tuple[str, int], bytes] = {}
    busy = threading.Semaphore(0)

    def sender(number: int) -> None:
        chance = random.Random(number)
        for turn in range(40):
            chosen = [chance.choice(addresses) for _ in range(chance.randint(1, 4))]
            # Who writes to one mailbox only needs to name no place.
            places = [] if len(set(chosen)) == 1 else [(TENANT, address) for address in chosen]
            with instances[number].transaction(places) as tx:
                given = [
                    (address, send(tx, address, f"{number}.{turn}.{i}".encode())) for i, address in enumerate(chosen)
                ]
            for i, place in enumerate(given):
                assert place not in sent
                sent[place] = f"{number}.{turn}.{i}".encode()
        busy.release()

    def reader() -> None:
        reading = open_store()
        seen = dict.fromkeys(addresses, 0)
        while True:
            ended = busy.acquire(timeout=0.001)
            if ended:
                busy.release()
            with reading.reading() as tx:
                for address in addresses:
                    mailbox = creating.get_live_mailbox(tx, TENANT, address, NOW)
                    ids = [message.msg_id for message in tx.messages.newest(mailbox, Filter(), ALL, ALL, NOW)]
                    # An id that becomes visible before a smaller one would be passed over by a group.
                    assert ids == list(range(len(ids)))
                    assert len(ids) == mailbox.next_id == mailbox.messages
                    assert len(ids) >= seen[address]
                    seen[address] = len(ids)
            if ended:
                return

    together(*(lambda number=number: sender(number) for number in range(INSTANCES)), reader)
    for address in addresses:
        kept = messages(store, address)
        assert [message.msg_id for message in kept] == list(range(len(kept)))
        assert {(address, message.msg_id): message.payload for message in kept} == {
            place: payload for place, payload in sent.items() if place[0] == address
        }
        for number in range(INSTANCES):
            theirs = [tuple(map(int, m.payload.split(b"."))) for m in kept if m.payload.startswith(b"%d." % number)]
            assert theirs == sorted(theirs)


@pytest.mark.rule("A8")
def test_the_server_plans_no_statement_of_a_small_batch_anew(store):
    create(store, "a", "b")
    for _ in range(10):
        with store.transaction([(TENANT, "a"), (TENANT, "b")]) as tx:
            send(tx, "a")
            send(tx, "b")
    with store.transaction() as tx:
        plans = "SELECT sum(generic_plans)::bigint, sum(custom_plans)::bigint FROM pg_prepared_statements"
        generic, custom = tx.session.one(plans)
    assert generic >= 10 * len(("prefetch", "insert", "update"))
    assert custom == 0


@pytest.mark.rule("A3")
def test_one_mailbox_shared_by_all_instances(store, instances):
    create(store, "a")

    def sender(number: int) -> None:
        for _ in range(60):
            with instances[number].transaction([(TENANT, "a")]) as tx:
                send(tx, "a", b"%d" % number)

    together(*(lambda number=number: sender(number) for number in range(INSTANCES)))
    kept = messages(store, "a")
    assert [message.msg_id for message in kept] == list(range(60 * INSTANCES))
    assert Counter(message.payload for message in kept) == {b"%d" % number: 60 for number in range(INSTANCES)}


def test_instances_that_start_at_once_migrate_once(url, open_store):
    opened = []
    together(*[lambda: opened.append(open_store())] * INSTANCES)
    create(opened[0], "a")
    for store in opened:
        with store.transaction() as tx:
            send(tx, "a")
    assert len(messages(opened[0], "a")) == INSTANCES


@pytest.mark.rule("M2")
def test_one_of_several_creates_of_an_address_wins(store, instances):
    won: list[tuple[str, int]] = []

    def creator(number: int) -> None:
        for turn in range(25):
            with instances[number].transaction([(TENANT, f"m{turn}")]) as tx:
                try:
                    creating.create(tx, BOUNDS, random.randbytes, Create(TENANT, f"m{turn}"), NOW)
                except MailboxExistsError:
                    continue
                finally:
                    send(tx, f"m{turn}", b"%d" % number)
            won.append((f"m{turn}", number))

    together(*(lambda number=number: creator(number) for number in range(INSTANCES)))
    assert sorted(address for address, _ in won) == sorted(f"m{turn}" for turn in range(25))
    for turn in range(25):
        kept = messages(store, f"m{turn}")
        assert [message.msg_id for message in kept] == list(range(INSTANCES))
        assert (f"m{turn}", int(kept[0].payload)) in won


@pytest.mark.rule("M2")
def test_a_public_create_succeeds_behind_another_instance(store, instances):
    created: list[tuple[int, bool]] = []

    def creator(number: int) -> None:
        for turn in range(25):
            with instances[number].transaction([(TENANT, f"m{turn}")]) as tx:
                made = creating.create(tx, BOUNDS, random.randbytes, Create(TENANT, f"m{turn}", public=True), NOW)
            created.append((turn, made.token is not None))

    together(*(lambda number=number: creator(number) for number in range(INSTANCES)))
    assert Counter(created) == {(turn, first): 1 if first else INSTANCES - 1 for turn in range(25) for first in (0, 1)}
    assert sorted(message.key for message in messages(store, PUBLIC)) == sorted(f"m{turn}" for turn in range(25))


@pytest.mark.rule("E9", "A8")
def test_stored_broadcasts_of_several_instances_are_bounded(store, instances, monkeypatch):
    monkeypatch.setattr(broadcasting, "MAX_KEPT", 50)

    def sender(number: int) -> None:
        for turn in range(40):
            with instances[number].transaction([(TENANT, broadcasting.HIDDEN)]) as tx:
                draft = Draft(b"%d %d" % (number, turn))
                broadcasting.keep(tx, BOUNDS, QUOTAS, TENANT, "a.b", draft, NOW)

    together(*(lambda number=number: sender(number) for number in range(INSTANCES)))
    kept = messages(store, broadcasting.HIDDEN)
    assert [message.msg_id for message in kept] == list(range(40 * INSTANCES - 50, 40 * INSTANCES))


@pytest.mark.rule("S3")
def test_a_dedup_id_sent_to_several_instances_is_stored_once(store, instances):
    create(store, "a")
    answers: list[tuple[int, int]] = []

    def sender(number: int) -> None:
        for turn in range(40):
            with instances[number].transaction([(TENANT, "a")]) as tx:
                answers.append((turn, send(tx, "a", b"%d" % turn, dedup_id=f"d{turn}")))

    together(*(lambda number=number: sender(number) for number in range(INSTANCES)))
    kept = messages(store, "a")
    assert sorted(int(message.payload) for message in kept) == list(range(40))
    by_turn = {int(message.payload): message.msg_id for message in kept}
    assert Counter(answers) == {(turn, by_turn[turn]): INSTANCES for turn in range(40)}


@pytest.mark.rule("S2")
def test_keys_sent_to_several_instances_leave_one_message_each(store, instances):
    create(store, "a", "b")

    def sender(number: int) -> None:
        chance = random.Random(number)
        for _ in range(40):
            addresses = chance.sample(["a", "b"], 2)
            with instances[number].transaction([(TENANT, address) for address in addresses]) as tx:
                for address in addresses:
                    send(tx, address, key=f"k{chance.randrange(4)}")

    together(*(lambda number=number: sender(number) for number in range(INSTANCES)))
    for address in ("a", "b"):
        kept = messages(store, address)
        assert sorted(message.key for message in kept) == ["k0", "k1", "k2", "k3"]
        assert max(message.msg_id for message in kept) == 40 * INSTANCES - 1


@pytest.mark.rule("S4", "A8")
def test_what_is_due_is_released_once_by_whichever_instance(store, instances):
    create(store, "a", "b")
    with store.transaction() as tx:
        for number in range(400):
            send(tx, "ab"[number % 2], b"%d" % number, delay=1)
    done = threading.Event()

    def releaser(number: int) -> None:
        while True:
            with instances[number].transaction() as tx:
                sending.release(tx, NOW + 1, 7)
            with instances[number].reading() as tx:
                if tx.delays.next_due() is None:
                    return

    def sender() -> None:
        turn = 0
        while not done.is_set() and turn < 100:
            with instances[0].transaction([(TENANT, "b"), (TENANT, "a")]) as tx:
                send(tx, "a", b"s")
                send(tx, "b", b"s")
            turn += 1

    def releasers() -> None:
        together(*(lambda number=number: releaser(number) for number in range(1, INSTANCES)))
        done.set()

    together(releasers, sender)
    for index, address in enumerate("ab"):
        kept = messages(store, address)
        assert [message.msg_id for message in kept] == list(range(len(kept)))
        released = [int(message.payload) for message in kept if message.payload != b"s"]
        assert sorted(released) == list(range(index, 400, 2))


@pytest.mark.rule("S5", "S2")
def test_collectors_and_senders_do_not_lock_each_other_out(store, instances):
    create(store, "a", "b")
    with store.transaction() as tx:
        for number in range(300):
            send(
                tx,
                "ab"[number % 2],
                key=f"k{number % 30}.{number}",
                ttl=1 + number % 3,
                tags=("t",),
                dedup_id=f"d{number}",
            )
    later = NOW + 10

    def collector(number: int) -> None:
        while True:
            with instances[number].transaction() as tx:
                gone = collecting.expired_messages(tx, later, 5).total
            with instances[number].transaction() as tx:
                gone += collecting.dedup_ids(tx, later, 5).total
            if not gone:
                return

    def sender(number: int) -> None:
        chance = random.Random(number)
        for turn in range(60):
            places = chance.sample([(TENANT, "a"), (TENANT, "b")], 2)
            with instances[number].transaction(places) as tx:
                for _, address in places:
                    # A key of a message that is about to be collected: both want to remove it.
                    old = (turn * 5 + chance.randrange(5)) // 2 * 2 + (address == "b")
                    send(tx, address, b"new", later, key=f"k{old % 30}.{old}", dedup_id=f"d{old}")

    together(
        *(lambda number=number: collector(number) for number in (0, 1)),
        *(lambda number=number: sender(number) for number in (2, 3)),
    )
    for address in "ab":
        kept = messages(store, address)
        assert all(message.payload == b"new" for message in kept)
        assert len({message.key for message in kept}) == len(kept)


@pytest.mark.rule("M1")
def test_several_collectors_take_mailboxes_away(store, instances):
    create(store, *[f"m{number}" for number in range(20)], ttl=1)
    create(store, "kept")
    with store.transaction() as tx:
        for number in range(20):
            for turn in range(10):
                send(tx, f"m{number}", dedup_id=f"d{turn}", recipient="r", delay=None if turn % 2 else 1000)
            fetching.fetch(tx, BOUNDS, Fetch(TENANT, f"m{number}", "g", Deliver.EARLIEST, ack_wait=5000), NOW)
        send(tx, "kept")

    def collector(number: int) -> None:
        for _ in range(2000):
            gone = 0
            for collect in (collecting.expired_mailboxes, collecting.retired_mailboxes):
                with instances[number].transaction() as tx:
                    gone += collect(tx, NOW + 1, 4).total
            if not gone:
                with instances[number].reading() as tx:
                    if not tx.mailboxes.retired(1) and not tx.mailboxes.expired(NOW + 1, 1):
                        return
        raise AssertionError("the clean-up does not end")

    together(*(lambda number=number: collector(number) for number in range(INSTANCES)))
    assert len(messages(store, "kept")) == 1
    with store.reading() as tx:
        assert [mailbox.address for mailbox in tx.mailboxes.list(TENANT, "", ALL, 0)] == ["kept"]
        assert tx.mailboxes.usage(TENANT).messages == 1
        assert tx.delays.next_due() is None


@pytest.mark.rule("F6", "K3", "A5")
def test_workers_on_several_instances_share_a_group(store, instances):
    create(store, "a")
    with store.transaction() as tx:
        for number in range(200):
            send(tx, "a", lane=Lane(number % 4))
    taken: list[int] = []

    def worker(number: int) -> None:
        request = Fetch(TENANT, "a", "g", Deliver.EARLIEST, num_msgs=7, ack_wait=60_000)
        while True:
            with instances[number].transaction([(TENANT, "a")]) as tx:
                found = [message.msg_id for message in fetching.fetch(tx, BOUNDS, request, NOW).messages]
            if not found:
                return
            taken.extend(found)
            with instances[number].transaction([(TENANT, "a")]) as tx:
                settling.ack(tx, Ack(TENANT, "a", "g", found), NOW)

    together(*(lambda number=number: worker(number) for number in range(INSTANCES)))
    assert sorted(taken) == list(range(200))
    with store.transaction() as tx:
        mailbox = creating.get_live_mailbox(tx, TENANT, "a", NOW)
        group = tx.groups.find(mailbox, "g")
        assert group is not None
        assert tx.leases.count(group, 0) == NO_LEASES


@pytest.mark.rule("A8", "Q2")
def test_an_instance_sees_at_once_what_another_committed(instances):
    one, two = instances[:2]
    create(one, "a")
    with one.transaction() as tx:
        assert send(tx, "a", b"0") == 0
    with two.transaction() as tx:
        assert send(tx, "a", b"1") == 1
    with one.transaction() as tx:
        querying.delete(tx, TENANT, "a", 1, NOW)
        assert send(tx, "a", b"2") == 2
    assert [message.payload for message in messages(two, "a")] == [b"0", b"2"]
    with two.transaction() as tx:
        creating.delete(tx, TENANT, "a", NOW)
    with one.transaction() as tx:
        assert tx.mailboxes.find(TENANT, "a") is None
    create(one, "a")
    with two.transaction() as tx:
        assert send(tx, "a") == 0


async def test_opposite_moves_do_not_deadlock(store, instances, monkeypatch):
    """Each has the mailbox that the other one wants next, unless both are locked in one order."""
    for address in ("a", "b"):
        create(store, address)
        with store.transaction() as tx:
            send(tx, address, address.encode())
    meeting = threading.Barrier(2)
    attempts: list[str] = []
    find = moving.get_sendable_mailbox

    def find_when_both_have_one(tx: Transaction, tenant: str, address: str, now: int) -> Mailbox:
        attempts.append(address)
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)
        return find(tx, tenant, address, now)

    monkeypatch.setattr(moving, "get_sendable_mailbox", find_when_both_have_one)
    owner = Actor("ada", frozenset(Right), "socket")
    brokers = [Broker(own, BOUNDS, clock=lambda: NOW) for own in instances[:2]]
    moves = []
    for broker, address, to in zip(brokers, "ab", "ba", strict=True):
        operations = Operations()
        operations.add_methods(MessageOperations(broker))
        request = {"mail_address": address, "to_address": to, "msg_ids": [0]}
        moves.append(operations.run(owner, "message-move", request))
    assert await asyncio.gather(*moves) == [{"moved": 1, "stopped": ""}] * 2
    assert sorted(attempts) == ["a", "b"], "one was rolled back and done again"
    for broker in brokers:
        await broker.close()
    assert [[each.payload for each in messages(store, address)] for address in "ab"] == [[b"b"], [b"a"]]


@pytest.mark.rule("C1")
@pytest.mark.parametrize("named", [True, False])
def test_a_rule_holds_at_all_instances_at_once(instances: list[Store], named: bool) -> None:
    here, there, *_ = instances
    keys = [(TENANT, "box")] if named else []

    def send(store: Store) -> None:
        with store.transaction(keys) as tx:
            sending.send(tx, BOUNDS, QUOTAS, Send(TENANT, "box", Draft(b"x")), NOW)

    with here.transaction() as tx:
        for name in ("box", "copies"):
            creating.create(tx, BOUNDS, random.randbytes, Create(TENANT, name), NOW)
    send(there)
    for _ in range(2):
        with here.transaction() as tx:
            copying.add_rule(tx, CopyRule(TENANT, "all", "copies"), NOW)
        send(there)
        with there.transaction() as tx:
            copying.remove_rule(tx, TENANT, "all")
        send(here)
    with here.reading() as tx:
        mailbox = tx.mailboxes.find(TENANT, "copies")
        assert mailbox is not None
        found = tx.messages.newest(mailbox, Filter(), 10, ALL, NOW)
    assert [message.headers["mq9-copy-of"] for message in found] == ["box/1", "box/3"]


@pytest.mark.rule("C2")
def test_copies_lock_mailboxes_in_one_order(instances: list[Store]) -> None:
    with instances[0].transaction() as tx:
        # The mailbox of copies is the first in that order: nobody may wait for it last.
        for name in ("copies", "a", "b"):
            creating.create(tx, BOUNDS, random.randbytes, Create(TENANT, name), NOW)
        copying.add_rule(tx, CopyRule(TENANT, "all", "copies"), NOW)

    def send(store: Store, *names: str) -> None:
        with store.transaction([(TENANT, name) for name in names]) as tx:
            for name in names:
                sending.send(tx, BOUNDS, QUOTAS, Send(TENANT, name, Draft(b"x")), NOW)

    def work(store: Store, *names: str) -> None:
        for _ in range(count):
            send(store, *names)

    count, ways = 40, (("a",), ("copies", "a"), ("b",), ("copies", "b"))
    for store in instances:
        send(store, "a")
    together(*[partial(work, store, *names) for store, names in zip(instances, ways, strict=True)])
    with instances[0].reading() as tx:
        mailbox = tx.mailboxes.find(TENANT, "copies")
        assert mailbox is not None
        found = tx.messages.newest(mailbox, Filter(), 1000, ALL, NOW)
    copied = sorted(message.headers["mq9-copy-of"] for message in found if message.headers)
    sent = [f"a/{number}" for number in range(2 * count + INSTANCES)] + [f"b/{number}" for number in range(2 * count)]
    assert copied == sorted(sent)
