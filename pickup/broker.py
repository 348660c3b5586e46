"""The use cases of mediation, awaited: what protocol handlers, sessions, the relay and commands call.

Each runs one rule of :mod:`pickup.rules` in one transaction of the broker of mailboxes. Where nothing is added to a
rule, callers run it by :meth:`MediationBroker.read` or :meth:`MediationBroker.write`. Changes return after the commit.
Times are milliseconds since the epoch.
"""

import asyncio
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from mediator.broker import Broker
from mediator.mailboxes.events import Event
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.sending import KindHooks
from mediator.store.base import Transaction
from mediator.store.writer import Committed
from pickup.connection_use import ConnectionUses
from pickup.rules import connecting, forwarding, granting, listing, message_queue, replays
from pickup.rules.forwarding import Forward, ForwardOutcome
from pickup.rules.granting import KeylistResult, KeylistUpdate
from pickup.rules.listing import ConnectionPage, ConnectionView, DeviceQueue
from pickup.rules.message_queue import QueueStatus
from pickup.rules.records import (
    Connection,
    ConnectionUse,
    DidRotation,
    Invitation,
    MediationRules,
    NewConnection,
    PushDevice,
)
from pickup.rules.replays import ReplayedError, SeenEnvelope
from pickup.rules.tables import CONNECTIONS, MediationTransaction

MAX_CALLERS = 4096


class CallerCache:
    """Connections by tenant and caller, as of the last commit; the oldest are dropped.

    Only for a database that no other process changes. Used on the event loop, where a commit is announced before its
    requests are answered.
    """

    def __init__(self) -> None:
        self._connections: OrderedDict[tuple[str, str], Connection] = OrderedDict()
        self._callers: defaultdict[int, set[tuple[str, str]]] = defaultdict(set)

    def get(self, tenant: str, caller: str) -> Connection | None:
        """Return the connection of a caller, if it is remembered."""
        return self._connections.get((tenant, caller))

    def add(self, tenant: str, caller: str, connection: Connection) -> None:
        """Remember what was just read; nothing may be awaited in between."""
        self._connections[tenant, caller] = connection
        self._callers[connection.id].add((tenant, caller))
        if len(self._connections) > MAX_CALLERS:
            key, oldest = self._connections.popitem(last=False)
            self._callers[oldest.id].discard(key)
            if not self._callers[oldest.id]:
                del self._callers[oldest.id]

    def forget(self, committed: Committed) -> None:
        """Forget the connections that a commit changed."""
        for what in committed.changed:
            if isinstance(what, tuple) and what[0] == CONNECTIONS:
                for key in self._callers.pop(what[1], ()):
                    del self._connections[key]


T = TypeVar("T")
Work = Callable[[MediationTransaction, int], T]
"""A function of a transaction and the time in milliseconds."""

MAX_MAILBOX_KEYS = 100_000


class NewMail(NamedTuple):
    """Messages that arrived, and the cursor to continue with."""

    messages: list[StoredMessage]
    cursor: int


MEDIATION_HOOKS = KindHooks(
    check_send=lambda tx, mailbox, draft: forwarding.check_send(tx.table(MediationTransaction), mailbox, draft),
    find_holder=lambda tx, mailbox: forwarding.find_holder(tx.table(MediationTransaction), mailbox),
)
"""What mediation adds to the rules for the mailboxes that it grants, whether the door is open or not."""


class MediationBroker:
    """Every use case of mediation, for one service.

    Where a caller's connection is given, its mailbox is locked before the connection. :class:`NotEnrolledError` is
    raised by all that need a mailbox when the connection has none.
    """

    def __init__(
        self,
        broker: Broker,
        rules: MediationRules,
        *,
        envelope: SeenEnvelope | None = None,
        shared: "MediationBroker | None" = None,
    ) -> None:
        """``envelope`` is stored with the first change, which raises :class:`ReplayedError` when it is stored already
        (D13); ``shared`` has the counts and caches of the service.
        """
        self.broker = broker
        """The mailboxes: for what mediation does not change."""
        self.rules = rules
        self.clock = broker.clock
        self._envelope = envelope
        self.uses: ConnectionUses = ConnectionUses(broker) if shared is None else shared.uses
        """What is counted of each connection."""
        self._callers: CallerCache = CallerCache() if shared is None else shared._callers
        self._mailbox_keys: dict[tuple[str, str], MailboxKey] = {} if shared is None else shared._mailbox_keys
        """The mailbox that each key led to last. It may be wrong: it only orders the locks of mailboxes."""
        if shared is None:
            broker.listen(self._callers.forget, "changed")

    async def read(self, work: Work[T]) -> T:
        """Run a read of committed data, on a reader thread."""
        return await self.broker.read(lambda tx, now: work(tx.table(MediationTransaction), now))

    async def write(self, work: Work[T], mailbox_key: MailboxKey | None = None, *, even_when_full: bool = False) -> T:
        """Run a change with the next commit.

        ``mailbox_key`` is the mailbox it concerns, whose lock comes first; ``even_when_full`` is as for
        :meth:`mediator.broker.Broker.write`.
        """
        envelope = self._envelope

        def change(tx: Transaction, now: int) -> tuple[tuple[T] | None, list[Event]]:
            tables = tx.table(MediationTransaction)
            before = len(tables.events)
            if envelope is None:
                done: tuple[T] | None = (work(tables, now),)
            else:
                done = replays.once(tables, envelope, partial(work, tables, now), now)
            return done, tables.events[before:]

        done, events = await self.broker.write(change, mailbox_key, even_when_full=even_when_full)
        if done is None:
            raise ReplayedError
        self._envelope = None
        if events:
            self.uses.count(events)
        return done[0]

    async def remember_envelope(self) -> None:
        """Store the envelope where nothing else is changed (D13)."""
        await self.write(lambda _tx, _now: None, even_when_full=True)

    # Connections and invitations.

    async def find_connection(self, tenant: str, caller: str) -> Connection | None:
        """Return the connection whose envelopes this canonical key or DID seals (D8)."""
        known = self._callers.get(tenant, caller)
        if known is not None:
            return known
        connection = await self.broker.read_inline(
            lambda tx, _now: tx.table(MediationTransaction).connections.called(tenant, caller)
        )
        if connection is not None and self.broker.alone:
            self._callers.add(tenant, caller, connection)
        return connection

    async def record_use(self, connection: Connection, *, transport: str, client: str, pickup: str) -> None:
        """Note that a connection made a request, in the database once an hour; unused ones are forgotten (D8).

        ``pickup`` is the version of message pickup, empty for other protocols.
        """
        now = self.clock()
        self.uses.record(ConnectionUse(connection.id, now, transport, pickup, client))
        if now - connection.seen_at >= connecting.SEEN_EVERY:
            await self.write(lambda tx, now: connecting.record_use(tx, connection, now), even_when_full=True)

    async def get_connection(self, connection_id: int) -> Connection | None:
        """Return a connection by its number."""
        return await self.read(lambda tx, _now: tx.connections.get(connection_id))

    async def connect(self, new: NewConnection) -> Connection:
        """Connect a v1 peer after its handshake; see :func:`pickup.rules.connecting.connect` (D8)."""
        return await self.write(lambda tx, now: connecting.connect(tx, self.rules, new, now))

    async def rotate_did(self, connection: Connection | None, rotation: DidRotation) -> Connection | None:
        """Give a connection to its peer's new DID, or end it (D14); see :func:`pickup.rules.connecting.rotate`.

        On a full disk only an ending is taken: each new DID begins replay records of its own, without end (D13).
        """
        mailbox_key, ends = None if connection is None else connection.mailbox_key, rotation.caller is None
        return await self.write(
            lambda tx, now: connecting.rotate(tx, self.rules, rotation, now), mailbox_key, even_when_full=ends
        )

    async def request_mediation(self, connection: Connection | None, new: NewConnection | None) -> Connection:
        """Grant a mailbox (RFC 0211 §mediation-request); ``new`` is a v2 peer, connected by this very request (D1).

        Raises :class:`MediationDeniedError` by the policy, :class:`NotEnrolledError` for a stranger of v1.
        """
        bounds = self.broker.bounds
        return await self.write(
            lambda tx, now: connecting.request_mediation(tx, bounds, os.urandom, self.rules, connection, new, now),
            None if connection is None else connection.mailbox_key,
        )

    async def set_push_device(self, connection: Connection, device: PushDevice | None) -> Connection:
        """Keep the phone to notify for a connection, None: no more (RFC 0734, RFC 0699)."""
        return await self.write(
            lambda tx, _now: connecting.set_push_device(tx, connection, device), connection.mailbox_key
        )

    async def forget_push_device(self, connection_id: int, device: PushDevice) -> None:
        """Notify a phone no more, unless its connection has registered another one meanwhile."""
        await self.write(lambda tx, _now: connecting.forget_push_device(tx, connection_id, device), even_when_full=True)

    async def disconnect(self, tenant: str, connection_id: int) -> None:
        """End a connection; :class:`NoSuchConnectionError` when the tenant has none of this number (D8)."""
        connection = await self.read(lambda tx, _now: listing.get_connection(tx, tenant, connection_id))
        await self.write(
            lambda tx, now: connecting.disconnect(tx, connection, now), connection.mailbox_key, even_when_full=True
        )

    async def list_connections(self, tenant: str, after: int, limit: int) -> ConnectionPage:
        """Return connections of a tenant behind a number, in order, with what waits for each."""
        page = await self.read(lambda tx, now: listing.connections(tx, tenant, after, limit, now))
        return page._replace(views=[self._with_latest(view) for view in page.views])

    async def view_connections(self, tenant: str, numbers: Sequence[int]) -> list[ConnectionView]:
        """Return these connections of a tenant, in the same order, those that are there."""
        views = await self.read(lambda tx, now: listing.views(tx, tenant, numbers, now))
        return [self._with_latest(view) for view in views]

    async def show_connection(self, tenant: str, connection_id: int, max_routes: int) -> ConnectionView:
        """Return one connection with at most so many keys; :class:`NoSuchConnectionError` when there is none."""
        return self._with_latest(
            await self.read(lambda tx, now: listing.connection(tx, tenant, connection_id, max_routes, now))
        )

    def _with_latest(self, view: ConnectionView) -> ConnectionView:
        """Add what this instance has counted and not written yet."""
        connection = view.connection
        return view._replace(use=view.use.plus(self.uses.unwritten(connection.id, connection.mailbox_id)))

    async def list_invitations(self, tenant: str, limit: int) -> list[Invitation]:
        """Return invitations of a tenant, the newest first."""
        return await self.read(lambda tx, _now: tx.invitations.list(tenant, limit))

    async def open_invitation(self, id: str) -> Invitation:
        """Return an invitation that may still be used; :class:`NoSuchInvitationError` when there is none."""
        return await self.read(lambda tx, now: connecting.find_open_invitation(tx, id, now))

    async def remove_invitation(self, tenant: str, id: str) -> None:
        """Forget an invitation; :class:`NoSuchInvitationError` when the tenant has none of this id."""
        await self.write(lambda tx, _now: connecting.remove_invitation(tx, tenant, id), even_when_full=True)

    async def find_invitation(self, key: str, id: str | None = None) -> Invitation | None:
        """Return the invitation that has a canonical key, else the one with an id."""
        return await self.read(lambda tx, _now: connecting.find_invitation(tx, key, id))

    # Keylists.

    async def update_keylist(
        self,
        connection: Connection,
        updates: Sequence[KeylistUpdate],
        proven: frozenset[str],
        own: Collection[str],
    ) -> list[KeylistResult]:
        """Change a keylist, each update on its own (RFC 0211 §keylist-update, D8)."""
        return await self.write(
            lambda tx, now: granting.update_keylist(tx, self.rules, connection, updates, proven, now, own),
            connection.mailbox_key,
        )

    # Forwards.

    async def forward(self, request: Forward) -> ForwardOutcome:
        """Queue a forward for each of its recipients (RFC 0094, D4); its sender learns nothing of them (D9)."""
        if len(request.keys) > 1:
            # Each on its own, so that each batch of the writer knows all its mailboxes and locks them in order.
            single = [replace(request, keys=(key,), inside=()) for key in dict.fromkeys(request.keys)]
            return sum(await asyncio.gather(*map(self.forward, single)), ForwardOutcome())
        first = (request.tenant, request.keys[0]) if request.keys else ("", "")
        bounds, quotas = self.broker.bounds, self.broker.quotas

        def change(tx: Transaction, now: int) -> tuple[ForwardOutcome, list[Event]]:
            tables = tx.table(MediationTransaction)
            before = len(tables.events)
            outcome = forwarding.forward(tables, bounds, quotas, self.rules, request, now)
            return outcome, tables.events[before:]

        # On an idle machine, what is kept takes a tenth of a millisecond longer than what leads nowhere (D9).
        outcome, events = await self.broker.write_padded(change, self._mailbox_keys.get(first))
        self.uses.count(events)
        if outcome.mailbox_keys and self._mailbox_keys.get(first) != outcome.mailbox_keys[0]:
            if len(self._mailbox_keys) >= MAX_MAILBOX_KEYS:
                self._mailbox_keys.clear()
            self._mailbox_keys[first] = outcome.mailbox_keys[0]
        return outcome

    # The queue of a connection.

    async def get_status(
        self, connection: Connection, recipient: str | None = None, leased: Collection[int] = ()
    ) -> QueueStatus:
        """Return the status (RFC 0685 §status), for all keys or for one; see :func:`message_queue.status` (D1, D6)."""
        return await self.read(lambda tx, now: message_queue.status(tx, connection, recipient, now, leased))

    async def deliver(
        self,
        connection: Connection,
        limit: int,
        budget: int,
        recipient: str | None = None,
        leased: Collection[int] = (),
        *,
        confirm_batch: bool = True,
    ) -> list[StoredMessage]:
        """Hand out the oldest messages (RFC 0685 §delivery-request); they stay queued (D1, D2).

        ``budget`` is in bytes. ``confirm_batch``: the last batch without acknowledgement came, and is removed (D7).
        """

        def work(tx: MediationTransaction, now: int) -> list[StoredMessage]:
            confirms = confirm_batch and connection.handed
            settled = message_queue.confirm_batch(tx, connection, now) if confirms else connection
            return message_queue.deliver(tx, settled, limit, recipient, budget, now, leased)

        return self._observed(connection, await self.write(work, connection.mailbox_key, even_when_full=True))

    async def pick(
        self, connection: Connection, ids: Sequence[int], budget: int, *, confirm_batch: bool = True
    ) -> list[StoredMessage]:
        """Hand out exactly these messages (RFC 0212 §list-pickup), those that are there; see :meth:`deliver`."""

        def work(tx: MediationTransaction, now: int) -> list[StoredMessage]:
            settled = message_queue.confirm_batch(tx, connection, now) if confirm_batch else connection
            return message_queue.pick(tx, settled, ids, budget, now)

        return self._observed(connection, await self.write(work, connection.mailbox_key, even_when_full=True))

    async def acknowledge(
        self, connection: Connection, ids: Sequence[int], leased: Collection[int] = ()
    ) -> QueueStatus:
        """Remove exactly these messages (RFC 0685 §messages-received), and return the status (D2)."""

        def work(tx: MediationTransaction, now: int) -> QueueStatus:
            settled = message_queue.confirm_batch(tx, connection, now)
            message_queue.acknowledge(tx, settled, ids, now)
            return message_queue.status(tx, settled, None, now, leased)

        return await self.write(work, connection.mailbox_key, even_when_full=True)

    async def confirm(self, connection: Connection, ids: Sequence[int], *, in_use: bool = False) -> None:
        """Remove messages that the transport says have come (D7); ``in_use``: that shows its holder is there."""

        def work(tx: MediationTransaction, now: int) -> None:
            message_queue.acknowledge(tx, connection, ids, now)
            if in_use:
                connecting.record_use(tx, connection, now)

        await self.write(work, connection.mailbox_key, even_when_full=True)

    async def confirm_batch(self, connection: Connection) -> None:
        """Remove what the last batch carried: its holder asks again (D7)."""
        await self.write(
            lambda tx, now: message_queue.confirm_batch(tx, connection, now),
            connection.mailbox_key,
            even_when_full=True,
        )

    # Live mode, relay and push notifications.

    async def open_live(self, connection: Connection) -> tuple[QueueStatus, int]:
        """Return the status, and the cursor from which a live session pushes (RFC 0685 §live mode, D6)."""
        return await self.read(lambda tx, now: message_queue.open_live(tx, connection, now))

    async def next_arrived(
        self, connection: Connection, cursor: int, limit: int, budget: int, leased: Collection[int] = ()
    ) -> NewMail:
        """Hand out messages from ``cursor`` on in order of msg_id; they stay queued (D6, D10)."""
        messages, behind = await self.write(
            lambda tx, now: message_queue.next_arrived(tx, connection, cursor, limit, budget, now, leased),
            connection.mailbox_key,
            even_when_full=True,
        )
        return NewMail(self._observed(connection, messages), behind)

    def _observed(self, connection: Connection, messages: list[StoredMessage]) -> list[StoredMessage]:
        """Return messages that are handed out, after tracing has seen them."""
        if messages and connection.address is not None:
            self.broker.trace.delivered(messages, connection.address, "didcomm")
        return messages

    async def find_relayed(self, mailbox_keys: Sequence[MailboxKey]) -> dict[MailboxKey, Connection]:
        """Return the connections that these mailboxes were granted to; mailboxes of others are not in it."""
        return await self.read(lambda tx, _now: tx.connections.of_mailboxes(mailbox_keys))

    async def list_waiting(self, tenant: str, after: int, limit: int) -> tuple[list[Connection], int | None]:
        """Return those of the next ``limit`` connections with mail and an endpoint, and where the next page begins."""
        return await self.read(lambda tx, now: listing.waiting(tx, tenant, after, limit, now))

    async def list_devices(self, mailbox_ids: Sequence[int]) -> list[DeviceQueue]:
        """Return the phones to notify for these mailboxes, and how much mail waits for each."""
        return await self.read(lambda tx, now: listing.devices(tx, mailbox_ids, now))
