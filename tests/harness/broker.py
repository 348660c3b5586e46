"""A broker for tests: the domain over any store, with a clock that moves only when told and seeded randomness.

Every method is one transaction. A verb that raises is committed all the same, as a store does that commits many
verbs together: so each test of a refusal also holds that a refused request changes nothing (N3).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from mediator.errors import MediatorError
from mediator.mailboxes import collecting, creating, fetching, querying, sending, settling
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.claims import Claims
from mediator.mailboxes.collecting import Collected
from mediator.mailboxes.creating import Create, Created, Update
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.fetching import Deliver, Fetch, Fetched
from mediator.mailboxes.mailbox import Mailbox, MailboxKey
from mediator.mailboxes.message import Door, Draft, Filter
from mediator.mailboxes.querying import Query
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.sending import Released, Send
from mediator.mailboxes.settling import Ack, DeadSelection, Extend, Nack
from mediator.store.base import Store
from mediator.store.base import Transaction as StoreTransaction

T = TypeVar("T")

START = 1_767_225_600_000
"""Where the clock of every broker begins, in milliseconds since the epoch."""
SECOND = 1000
HOUR = 3600 * SECOND
DAY = 24 * HOUR

TENANT = "default"
BOX = "task"
GROUP = "workers"


@dataclass(slots=True)
class _Outcome:
    value: Any = None
    error: MediatorError | None = None


class Broker:
    """The verbs of the domain; ``now`` is milliseconds since the epoch and may be set or advanced."""

    tables: type[StoreTransaction] = StoreTransaction
    """What a verb gets: the tables of mailboxes, and those of a part where a derived class says so."""

    def __init__(self, store: Store, bounds: Bounds | None = None, now: int = START, seed: int = 0) -> None:
        self.store = store
        self.bounds = bounds or Bounds()
        self.now = now
        self.quotas = Quotas(self.bounds.mailbox, self.bounds.tenant)
        self.random = random.Random(seed).randbytes
        self.events: list[Event] = []
        self.woken: set[MailboxKey] = set()
        """Mailboxes woken by the last transaction."""
        self.due: int | None = None
        """The earliest due time that the last transaction told."""

    def advance(self, milliseconds: int) -> None:
        self.now += milliseconds

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """Look at what is committed."""
        with self.store.reading() as tx:
            yield tx.table(self.tables)

    def run(self, verb: Callable[[Any], T]) -> T:
        """Run something in a transaction of its own."""
        outcome = _Outcome()
        with self.store.transaction() as tx:
            try:
                outcome.value = verb(tx.table(self.tables))
            except MediatorError as error:
                outcome.error = error
        self.events += tx.events
        self.woken = tx.woken
        self.due = tx.session.due
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def create(self, name: str | None = BOX, *, tenant: str = TENANT, **options: Any) -> Created:
        request = Create(tenant=tenant, name=name, **options)
        return self.run(lambda tx: creating.create(tx, self.bounds, self.random, request, self.now, self.quotas))

    def update(self, token: str, box: str = BOX, *, tenant: str = TENANT, **changes: Any) -> Mailbox:
        return self.run(lambda tx: creating.update(tx, Update(tenant, box, token, **changes), self.now))

    def set_ack_wait(self, ack_wait: int | None, box: str = BOX) -> Mailbox:
        return self.run(lambda tx: creating.set_ack_wait(tx, TENANT, box, ack_wait, self.now))

    def delete_mailbox(self, box: str = BOX, *, tenant: str = TENANT) -> None:
        self.run(lambda tx: creating.delete(tx, tenant, box, self.now))

    def send(
        self,
        payload: bytes = b"",
        *,
        to: str = BOX,
        tenant: str = TENANT,
        door: Door | None = Door.NATS,
        **draft: Any,
    ) -> int:
        request = Send(tenant, to, Draft(payload, **draft), door)
        return self.run(lambda tx: sending.send(tx, self.bounds, self.quotas, request, self.now))

    def release(self, limit: int = 1000, *, trusted: bool = True) -> Released:
        return self.run(lambda tx: sending.release(tx, self.now, limit, trusted=trusted))

    def next_due(self) -> int | None:
        return self.run(lambda tx: tx.delays.next_due())

    def fetch(self, group: str | None = GROUP, box: str = BOX, *, tenant: str = TENANT, **options: Any) -> Fetched:
        return self.fetching(Fetch(tenant, box, group, **options))

    def fetching(self, request: Fetch) -> Fetched:
        return self.run(lambda tx: fetching.fetch(tx, self.bounds, request, self.now))

    def again(self, request: Fetch, before: Fetched) -> Fetched:
        return self.run(lambda tx: fetching.fetch_again(tx, self.bounds, request, before, self.now))

    def take(self, group: str | None = GROUP, box: str = BOX, **options: Any) -> list[int]:
        """FETCH and return the msg_ids; a group that is new starts at the oldest message."""
        options.setdefault("deliver", Deliver.EARLIEST)
        return [message.msg_id for message in self.fetch(group, box, **options).messages]

    def ack(self, *ids: int, group: str = GROUP, box: str = BOX, tenant: str = TENANT, connection: str = "") -> int:
        return self.run(lambda tx: settling.ack(tx, Ack(tenant, box, group, ids, connection), self.now))

    def end(self, connection: str) -> None:
        """Let a connection end."""
        self.run(lambda tx: tx.woken.update(tx.claims.end(connection)))

    def forget_claims(self) -> None:
        """Forget what all connections were handed, as a restart does."""
        self.store.claims = Claims()  # type: ignore[attr-defined]

    def nack(self, *ids: int, group: str = GROUP, box: str = BOX, delay: int = 0) -> int:
        return self.run(lambda tx: settling.nack(tx, Nack(TENANT, box, group, ids, delay), self.now))

    def extend(self, *ids: int, ack_wait: int, group: str = GROUP, box: str = BOX) -> int:
        return self.run(lambda tx: settling.extend(tx, Extend(TENANT, box, group, ids, ack_wait), self.now))

    def redrive(self, ids: Sequence[int] | None = None, group: str = GROUP, box: str = BOX) -> int:
        return self.run(lambda tx: settling.redrive(tx, DeadSelection(TENANT, box, group, ids), self.now))

    def drop(self, ids: Sequence[int] | None = None, group: str = GROUP, box: str = BOX) -> int:
        return self.run(lambda tx: settling.drop(tx, DeadSelection(TENANT, box, group, ids), self.now))

    def query(
        self,
        box: str = BOX,
        *,
        tenant: str = TENANT,
        limit: int = 100,
        budget: int = 1 << 20,
        dead_for: str | None = None,
        headers_only: bool = False,
        **wanted: Any,
    ) -> list[StoredMessage]:
        request = Query(tenant, box, Filter(**wanted), limit, budget, dead_for, headers_only)
        with self.store.reading() as tx:
            return querying.query(tx, request, self.now)

    def shown(self, box: str = BOX, **options: Any) -> list[int]:
        """QUERY and return the msg_ids."""
        return [message.msg_id for message in self.query(box, **options)]

    def delete(self, msg_id: int, box: str = BOX, *, tenant: str = TENANT) -> None:
        self.run(lambda tx: querying.delete(tx, tenant, box, msg_id, self.now))

    def collect(self, limit: int = 1000) -> Collected:
        """Run one slice of each kind of clean-up, each in its own transaction."""
        slices = [
            self.run(lambda tx: collecting.expired_messages(tx, self.now, limit)),
            self.run(lambda tx: collecting.expired_mailboxes(tx, self.now, limit)),
            self.run(lambda tx: collecting.retired_mailboxes(tx, self.now, limit)),
            self.run(lambda tx: collecting.dedup_ids(tx, self.now, limit)),
        ]
        return Collected(*(sum(getattr(one, field.name) for one in slices) for field in fields(Collected)))

    def clean_up(self, limit: int = 1000) -> Collected:
        """Run slices until there is nothing left to collect."""
        done = Collected()
        while (more := self.collect(limit)).total:
            done = Collected(*(getattr(done, x.name) + getattr(more, x.name) for x in fields(Collected)))
        return done

    def mailbox(self, box: str = BOX, *, tenant: str = TENANT) -> Mailbox | None:
        """Return the mailbox that holds the address, expired or not."""
        with self.store.reading() as tx:
            return tx.mailboxes.find(tenant, box)

    def told(self, what: EventType) -> list[int]:
        """Return the msg_ids of the events of one kind so far."""
        return [event.msg_id for event in self.events if event.type is what]
