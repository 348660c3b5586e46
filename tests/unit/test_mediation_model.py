"""Mediation against a model: random verbs in random order, for several holders in two tenants (D1–D4, D6–D9).

The model is lists and dictionaries. It knows exactly what each verb answers, so whatever was forwarded to a held key
and neither acknowledged nor expired must be there, and nobody else's copy may be touched.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mediator.errors import NotEnrolledError
from mediator.store.base import Store
from pickup.rules.forwarding import ForwardOutcome
from pickup.rules.granting import KeylistResult
from pickup.rules.message_queue import QueueStatus
from pickup.rules.records import Connection, MediationRules
from tests.harness.broker import DAY, SECOND, TENANT
from tests.harness.mediation import Mediation, ids, key, payloads
from tests.harness.stores import ram_store
from tests.harness.verified import assert_intact

OTHER = "other"
HOLDERS = ((TENANT, 1), (TENANT, 2), (TENANT, 3), (OTHER, 1))
KEYS = tuple(key(number) for number in range(10, 14))
RULES = MediationRules(max_keys=2, max_messages=8, max_bytes=60, keep=30 * SECOND)

holders = st.integers(0, len(HOLDERS) - 1)
keys = st.sampled_from(KEYS)
filters = st.none() | keys
tenants = st.sampled_from([TENANT, TENANT, OTHER])
moments = st.sampled_from([None, None, SECOND, 5 * SECOND])


@dataclass
class Mail:
    """One copy; ``id`` is -1 until it is visible."""

    payload: bytes
    recipient: str
    expire_at: int
    id: int = -1
    created_at: int = 0


@dataclass
class Queue:
    """One generation of a holder's mailbox."""

    no: int
    mail: dict[int, Mail] = field(default_factory=dict)
    """What is stored, expired or not."""
    next_id: int = 0
    handed: list[int] = field(default_factory=list)
    cursor: int | None = None

    def living(self, now: int, recipient: str | None = None) -> list[Mail]:
        return [mail for mail in self.stored(recipient) if mail.expire_at > now]

    def stored(self, recipient: str | None = None) -> list[Mail]:
        return [mail for mail in self.mail.values() if recipient in (None, mail.recipient)]

    def show(self, mail: Mail, now: int) -> None:
        mail.id, mail.created_at = self.next_id, now
        self.next_id += 1
        self.mail[mail.id] = mail


@dataclass
class Held:
    """A key in a keylist."""

    holder: int
    at: int
    """When it was added or used last, to the day."""


@dataclass
class Waiting:
    """Delayed mail."""

    due_at: int
    seq: int
    queue: Queue
    mail: Mail


def machine(store_factory: Callable[[], Store]) -> type[RuleBasedStateMachine]:
    """Return the machine over a store."""

    class Holders(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.store = store_factory()
            self.house = Mediation(self.store, RULES)
            self.connections: dict[int, Connection] = {}
            self.seen: dict[int, int] = {}
            self.queues: dict[int, Queue] = {}
            self.held: dict[tuple[str, str], Held] = {}
            self.waiting: list[Waiting] = []
            self.sent = 0

        @property
        def now(self) -> int:
            return self.house.now

        @initialize()
        def begin(self) -> None:
            for holder in range(len(HOLDERS)):
                self.enrol(holder)
                self.add(holder, KEYS[holder], False)

        # Connections and grants.

        @rule(holder=holders)
        def enrol(self, holder: int) -> None:
            tenant, number = HOLDERS[holder]
            connection = self.house.grant(self.house.connect(key(number), tenant=tenant))
            assert connection.mailbox_id is not None
            before = self.connections.get(holder)
            assert before is None or before.id == connection.id
            self.connections[holder], self.seen[holder] = connection, self.now
            queue = self.queues.get(holder)
            if queue is None:
                self.queues[holder] = Queue(connection.mailbox_id)
            else:
                assert queue.no == connection.mailbox_id

        @rule(holder=holders)
        def disconnect(self, holder: int) -> None:
            connection = self.connections.pop(holder, None)
            if connection is not None:
                self.house.disconnect(connection)
                self.queues.pop(holder, None)
                self.held = {name: held for name, held in self.held.items() if held.holder != holder}

        @rule(holder=holders)
        def lose_mailbox(self, holder: int) -> None:
            if self.queues.pop(holder, None) is not None:
                connection = self.connections[holder]
                self.house.delete_mailbox(str(connection.address), tenant=connection.tenant)

        # Keys.

        @rule(holder=holders, name=keys, proven=st.booleans())
        def add(self, holder: int, name: str, proven: bool) -> None:
            if holder not in self.queues:
                return
            tenant, _ = HOLDERS[holder]
            held = self.held.get((tenant, name))
            full = sum(1 for one in self.held.values() if one.holder == holder) >= RULES.max_keys
            if held is not None and held.holder == holder:
                expected = KeylistResult.NO_CHANGE
            elif full or (held is not None and not proven and not self.idle(held)):
                expected = KeylistResult.CLIENT_ERROR
            else:
                expected = KeylistResult.SUCCESS
                self.held[tenant, name] = Held(holder, self.now)
            assert self.house.add(self.connections[holder], name, proven=[name] if proven else []) == [expected]

        def idle(self, held: Held) -> bool:
            return max(held.at, self.seen[held.holder]) + RULES.idle <= self.now

        @rule(holder=holders, name=keys)
        def remove(self, holder: int, name: str) -> None:
            if holder not in self.queues:
                return
            place = (HOLDERS[holder][0], name)
            mine = place in self.held and self.held[place].holder == holder
            if mine:
                del self.held[place]
            expected = KeylistResult.SUCCESS if mine else KeylistResult.NO_CHANGE
            assert self.house.remove(self.connections[holder], name) == [expected]

        # Mail.

        @rule(
            tenant=tenants,
            names=st.lists(keys, min_size=1, max_size=3),
            sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
            expires=moments,
            delay=moments,
        )
        def forward(
            self, tenant: str, names: list[str], sizes: list[int], expires: int | None, delay: int | None
        ) -> None:
            bodies = []
            for size in sizes:
                self.sent += 1
                bodies.append(b"%d." % self.sent + b"x" * size)
            expire_at = self.now + (RULES.keep if expires is None else expires)
            expected = ForwardOutcome()
            for name in dict.fromkeys(names):
                held = self.held.get((tenant, name))
                queue = None if held is None else self.queues.get(held.holder)
                if held is None or queue is None:
                    expected = replace(expected, unroutable=expected.unroutable + len(bodies))
                    continue
                if self.now - held.at >= DAY:
                    held.at = self.now
                for body in bodies:
                    if self.room(queue, len(body), delay):
                        expected = replace(expected, queued=expected.queued + 1)
                        mail = Mail(body, name, expire_at)
                        if delay is None:
                            queue.show(mail, self.now)
                        else:
                            self.waiting.append(Waiting(self.now + delay, self.sent, queue, mail))
                    else:
                        expected = replace(expected, full=expected.full + 1)
            given = None if expires is None else expire_at
            outcome = self.house.forward(names, *bodies, tenant=tenant, expire_at=given, delay=delay)
            assert replace(outcome, mailbox_keys=()) == expected
            assert bool(outcome.mailbox_keys) == (expected.queued > 0)

        def room(self, queue: Queue, size: int, delay: int | None) -> bool:
            waiting = [waiting.mail for waiting in self.waiting if waiting.queue is queue] if delay is not None else []
            late = [mail for mail in waiting if mail.expire_at > self.now]
            if self.fits([*queue.stored(), *late], size):
                return True
            # What has expired makes room.
            queue.mail = {mail.id: mail for mail in queue.living(self.now)}
            return self.fits([*queue.stored(), *late], size)

        def fits(self, there: list[Mail], size: int) -> bool:
            total = sum(len(mail.payload) for mail in there)
            return len(there) < RULES.max_messages and total + size <= RULES.max_bytes

        @rule()
        def release(self) -> None:
            self.house.release()
            due = [waiting for waiting in self.waiting if waiting.due_at <= self.now]
            self.waiting = [waiting for waiting in self.waiting if waiting.due_at > self.now]
            # The sort is stable: what falls due together comes as it was sent.
            for waiting in sorted(due, key=lambda waiting: waiting.due_at):
                if waiting.mail.expire_at > self.now:
                    waiting.queue.show(waiting.mail, self.now)

        @rule(span=st.sampled_from([1, 500, SECOND, 5 * SECOND, 40 * SECOND]))
        def tick(self, span: int) -> None:
            self.house.advance(span)

        @rule(days=st.sampled_from([1, 90, 180]))
        def sleep(self, days: int) -> None:
            self.house.advance(days * DAY)

        @rule()
        def clean_up(self) -> None:
            self.house.clean_up(limit=3)
            for queue in self.queues.values():
                queue.mail = {mail.id: mail for mail in queue.living(self.now)}

        # Pickup.

        @rule(holder=holders, recipient=filters)
        def status(self, holder: int, recipient: str | None) -> None:
            if holder in self.queues:
                found = self.house.status(self.connections[holder], recipient)
                assert found == self.expected(self.queues[holder], recipient)

        def expected(self, queue: Queue, recipient: str | None) -> QueueStatus:
            living, stored = queue.living(self.now, recipient), queue.stored(recipient)
            if not living:
                return QueueStatus()
            size = sum(len(mail.payload) for mail in stored)
            return QueueStatus(len(stored), size, living[0].created_at, living[-1].created_at)

        @rule(holder=holders, limit=st.integers(1, 4), recipient=filters)
        def deliver(self, holder: int, limit: int, recipient: str | None) -> None:
            if holder in self.queues:
                found = self.house.deliver(self.connections[holder], limit, recipient)
                living = self.queues[holder].living(self.now, recipient)
                assert payloads(found) == [mail.payload for mail in living[:limit]]
                assert ids(found) == [mail.id for mail in living[:limit]]

        @rule(holder=holders, named=st.lists(st.integers(0, 30), max_size=4))
        def acknowledge(self, holder: int, named: list[int]) -> None:
            if holder in self.queues:
                queue = self.queues[holder]
                there = {number for number in named if queue.mail.pop(number, None) is not None}
                assert self.house.acknowledge(self.connections[holder], *named) == len(there)

        @rule(holder=holders, size=st.integers(1, 3))
        def take_batch(self, holder: int, size: int) -> None:
            if holder in self.queues:
                queue = self.queues[holder]
                self.drop_handed(queue)
                found = self.house.take_batch(self.current(holder), size)
                assert ids(found) == [mail.id for mail in queue.living(self.now)[:size]]
                queue.handed = ids(found)

        @rule(holder=holders)
        def ask_again(self, holder: int) -> None:
            if holder in self.queues:
                self.drop_handed(self.queues[holder])
                assert self.house.settle_handed(self.current(holder)).handed == ()

        def drop_handed(self, queue: Queue) -> None:
            for number in queue.handed:
                queue.mail.pop(number, None)
            queue.handed = []

        def current(self, holder: int) -> Connection:
            """Return the connection as a request finds it."""
            tenant, number = HOLDERS[holder]
            connection = self.house.called(key(number), tenant)
            assert connection is not None
            return connection

        @rule(holder=holders)
        def go_live(self, holder: int) -> None:
            if holder in self.queues:
                queue = self.queues[holder]
                status, queue.cursor = self.house.open_live(self.connections[holder])
                assert status == self.expected(queue, None)
                assert self.house.arrived(self.connections[holder], queue.cursor) == []

        @precondition(lambda self: any(queue.cursor is not None for queue in self.queues.values()))
        @rule(holder=holders, limit=st.integers(1, 3))
        def push(self, holder: int, limit: int) -> None:
            queue = self.queues.get(holder)
            if queue is not None and queue.cursor is not None:
                found = self.house.arrived(self.connections[holder], queue.cursor, limit)
                new = [mail.id for mail in queue.living(self.now) if mail.id >= queue.cursor]
                assert ids(found) == new[:limit]
                if found:
                    queue.cursor = found[-1].msg_id + 1

        # What must hold always.

        @invariant()
        def every_key_leads_to_its_holder_alone(self) -> None:
            for tenant in (TENANT, OTHER):
                for name in KEYS:
                    route = self.house.route(name, tenant)
                    held = self.held.get((tenant, name))
                    no = None if held is None else self.connections[held.holder].id
                    assert (None if route is None else route.connection_id) == no

        @invariant()
        def counters_are_true(self) -> None:
            with self.store.reading() as tx:
                for holder, queue in self.queues.items():
                    connection = self.connections[holder]
                    mailbox = tx.mailboxes.find(connection.tenant, str(connection.address))
                    assert mailbox is not None
                    stored = queue.stored()
                    assert (mailbox.id, mailbox.next_id, mailbox.messages) == (queue.no, queue.next_id, len(stored))
                    assert mailbox.bytes == sum(len(mail.payload) for mail in stored)
                    for name in KEYS:
                        assert tx.messages.recipient_usage(mailbox, name).messages == len(queue.stored(name))

        @invariant()
        def who_has_no_mailbox_gets_nothing(self) -> None:
            for holder, connection in self.connections.items():
                if holder not in self.queues:
                    with pytest.raises(NotEnrolledError):
                        self.house.deliver(connection)

        def teardown(self) -> None:
            assert_intact(self.store)
            # What is owed comes in the end, to those it was for.
            self.release()
            for holder, queue in self.queues.items():
                connection, owed = self.connections[holder], queue.living(self.now)
                assert payloads(self.house.deliver(connection)) == [mail.payload for mail in owed]
                assert self.house.acknowledge(connection, *(mail.id for mail in owed)) == len(owed)
                assert self.house.status(connection) == QueueStatus()
            self.store.close()

    Holders.TestCase.settings = settings(
        max_examples=40,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return Holders


@pytest.mark.rule("D1", "D2", "D3", "D4", "D6", "D7", "D8", "D9")
class TestSqlite(machine(ram_store).TestCase):
    """The machine over a store on a RAM disk."""
