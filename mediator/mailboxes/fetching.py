"""MSG.FETCH: where a group starts, which messages it gets, and which of these are leased (F1–F10)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mediator.errors import BadRequestError, TooManyGroupsError
from mediator.mailboxes.bounds import DEFAULT_FETCH, DEFAULT_WAIT, MAX_FETCH, Bounds
from mediator.mailboxes.copy_rule import FORWARDER
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.events import Event, EventType, delivery_events
from mediator.mailboxes.group import MAX_GROUPS, MAX_LEASED, NO_LEASE, Checked, Group, Lease
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import Filter
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.transaction import Transaction

RESERVED_GROUP = "didcomm"
"""Groups of this name belong to the holder of a mediation mailbox, who picks up by DIDComm (D1)."""
SKIP_FROM = 1000
"""How many ids a group must be behind before a lane that is empty for it is skipped."""
FULL = (
    f"more messages wait, but {MAX_LEASED} messages of the group are leased, as many as may be: "
    "acknowledge them, give them back (NACK), or wait until leases end"
)
"""What a FETCH notes that the bound on leases keeps empty or short (F6)."""


class Deliver(StrEnum):
    """Where a FETCH starts that has no position yet (F1)."""

    LATEST = "latest"
    EARLIEST = "earliest"
    FROM_TIME = "from_time"
    FROM_ID = "from_id"


@dataclass(frozen=True, slots=True)
class Fetch:
    """A request for messages. Spans and times are milliseconds."""

    tenant: str
    address: str
    group: str | None = None
    """None: stateless, nothing is remembered."""
    deliver: Deliver = Deliver.LATEST
    from_time: int = 0
    from_id: int = 0
    force_deliver: bool = False
    num_msgs: int = DEFAULT_FETCH
    max_wait: int = DEFAULT_WAIT
    ack_wait: int | None = None
    """Lease; None: as the mailbox says, 0: none (F6, F8)."""
    max_deliver: int | None = None
    budget: int = 1 << 20
    """Bytes that the messages of a reply may take when shown; one is given whatever its size (N7)."""
    connection: str = ""
    """The client's connection; those that are not known are one (F9)."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a FETCH found. Without messages the caller waits and calls :func:`fetch_again`."""

    mailbox_id: int
    messages: list[StoredMessage]
    start: int = 0
    """Where a stateless FETCH stands, fixed by its first read (F1)."""
    retry_at: int | None = None
    """When to read again though no message came: a lease, a claim, the backoff or the mailbox ends; milliseconds."""
    backoff_until: int | None = None
    """Until when the connection is not handed again what it was handed last (F10)."""
    note: str = ""
    """Why messages that wait were not returned though more were wanted (F6)."""


def fetch(tx: Transaction, bounds: Bounds, request: Fetch, now: int) -> Fetched:
    """Return messages for a request; the group's position is stored from its first FETCH on (F1, F4)."""
    mailbox = get_live_mailbox(tx, request.tenant, request.address, now)
    if request.group is None:
        return _read_without_group(tx, mailbox, request, _start(tx, bounds, mailbox, request, now), now)
    if request.group == RESERVED_GROUP and mailbox.kind is Kind.MEDIATION:
        raise BadRequestError("group_name", f"{RESERVED_GROUP} is reserved for pickup by DIDComm")
    refuse_forwarder(tx, mailbox, request.group)
    group = tx.groups.find(mailbox, request.group)
    if group is None:
        if request.group.startswith(FORWARDER):
            # A rule that comes with the settings takes the group that is there for its own.
            raise BadRequestError("group_name", f"expected a name that does not begin with {FORWARDER}")
        if tx.groups.count(mailbox) >= MAX_GROUPS:
            raise TooManyGroupsError(MAX_GROUPS)
        group = tx.groups.add(mailbox, request.group)
        group.start_at(_start(tx, bounds, mailbox, request, now))
        tx.groups.save(group)
    elif request.force_deliver:
        tx.leases.clear(group)
        tx.claims.forget(group.id)
        group.start_at(_start(tx, bounds, mailbox, request, now))
        tx.groups.save(group)
        # Other members that wait find what is before the new position.
        tx.woken.add(mailbox.key)
    return serve(tx, bounds, mailbox, group, request, now)


def refuse_forwarder(tx: Transaction, mailbox: Mailbox, name: str) -> None:
    """Refuse clients the group by which a rule forwards: what they took there would be missing behind it (C7)."""
    if name.startswith(FORWARDER):
        for rule in tx.copy_rules.of(mailbox.tenant):
            if rule.forwards and rule.group == name and rule.to_address == mailbox.address:
                raise BadRequestError("group_name", f"{name} is reserved for what forwards the copies of a rule")


def fetch_again(tx: Transaction, bounds: Bounds, request: Fetch, before: Fetched, now: int) -> Fetched:
    """Read again for a FETCH that found nothing; the same mailbox must still exist (F2, F5)."""
    mailbox = get_live_mailbox(tx, request.tenant, request.address, now, before.mailbox_id)
    if request.group is None:
        return _read_without_group(tx, mailbox, request, before.start, now)
    refuse_forwarder(tx, mailbox, request.group)
    group = tx.groups.find(mailbox, request.group)
    if group is None:
        return Fetched(mailbox.id, [])
    return serve(tx, bounds, mailbox, group, request, now, backoff_until=before.backoff_until)


def _start(tx: Transaction, bounds: Bounds, mailbox: Mailbox, request: Fetch, now: int) -> int:
    match request.deliver:
        case Deliver.LATEST:
            newest = tx.messages.heads(mailbox, Filter(), 1, now) if bounds.latest_is_last else []
            return newest[0].msg_id if newest else mailbox.next_id
        case Deliver.EARLIEST:
            return 0
        case Deliver.FROM_TIME:
            return tx.messages.first_since(mailbox, request.from_time)
        case Deliver.FROM_ID:
            return request.from_id


def _read_without_group(tx: Transaction, mailbox: Mailbox, request: Fetch, start: int, now: int) -> Fetched:
    taken = _Basket(request.num_msgs, request.budget)
    for lane in LANES:
        if taken.full:
            break
        taken.add(tx.messages.lane(mailbox, lane, start - 1, taken.room, taken.budget, now))
    return Fetched(mailbox.id, taken.messages, start, mailbox.expire_at)


def serve(
    tx: Transaction,
    bounds: Bounds,
    mailbox: Mailbox,
    group: Group,
    request: Fetch,
    now: int,
    lanes: Sequence[Lane] = LANES,
    backoff_until: int | None = None,
) -> Fetched:
    """Return the next messages of these lanes for a group, and note that they were delivered (F3, F6, F7, F9, F10).

    ``backoff_until``: as it was returned when this request last read.
    """
    ack_wait = _ack_wait(bounds, mailbox, request)
    # The first FETCH that names a bound fixes it (F7).
    must_keep = group.max_deliver is None and request.max_deliver is not None
    if must_keep:
        group.max_deliver = request.max_deliver
    claimed = tx.claims.of_others(group.id, request.connection, now)
    leases = tx.leases.count(group, now)
    due: list[Lease] = []
    if leases.due:
        # What others claim must not fill the limit.
        limit = MAX_FETCH + (0 if claimed is None else sum(map(len, claimed)))
        due = _due(tx, mailbox, group, lanes, limit, now)
        due = due if claimed is None else [lease for lease in due if lease.msg_id not in claimed[lease.lane]]
    room = request.num_msgs
    if ack_wait:
        room = min(room, room_for_leases(tx, mailbox, group, leases.running, room, now))
    selection = _Selection(tx, mailbox, group, lanes, due, claimed, now, _Basket(room, request.budget))
    selection.collect()
    messages, fresh, moved = selection.taken.messages, selection.fresh, selection.moved
    note = FULL if room < request.num_msgs and not selection.taken.room and selection.has_more() else ""
    items = [(LANES[message.lane_number], message.msg_id) for message in messages]
    if items and not ack_wait and request.connection and request.max_wait and backoff_until is None:
        backoff_until = _find_backoff_end(tx, group, request, items, now)
    if not items or (backoff_until is not None and backoff_until > now and _count_repeats(tx, group, request, items)):
        _save_group(tx, group, must_keep, moved)
        ends = [
            tx.leases.next_end(group, now),
            tx.claims.next_end(group.id, request.connection, now) if claimed is not None else None,
            mailbox.expire_at,
            backoff_until,
        ]
        retry_at = min((end for end in ends if end is not None), default=None)
        return Fetched(mailbox.id, [], retry_at=retry_at, backoff_until=backoff_until, note=note)
    if claimed is not None and not group.shared:
        group.shared = must_keep = True
        group.replies = []
    counts = {lease.msg_id: lease.deliveries for lease in due}
    if ack_wait:
        if claimed is not None:
            _keep_claimed(tx, group, claimed, fresh)
        messages = [message.with_deliveries(counts.get(message.msg_id, 0) + 1) for message in messages]
        _lease(tx, group, messages, fresh, now + ack_wait)
        # What ends the lease is not the end of a claim.
        tx.claims.forget(group.id, request.connection)
        must_keep = True
    else:
        if due:
            _give_without_lease(tx, group, due, items)
        moved |= group.hand_out(items)
        tx.claims.hand_out(group.id, mailbox.key, request.connection, items, now + bounds.claim)
    _save_group(tx, group, must_keep, moved)
    kind = EventType.LEASED if ack_wait else EventType.DELIVERED
    tx.events += delivery_events(kind, now, mailbox, messages, group.id)
    return Fetched(mailbox.id, messages, note=note)


@dataclass(slots=True)
class _Selection:
    """Chooses what a group is given of some lanes: messages that are due again, then new ones (F3, F6, F9)."""

    tx: Transaction
    mailbox: Mailbox
    group: Group
    lanes: Sequence[Lane]
    due: Sequence[Lease]
    claimed: Sequence[Collection[int]] | None
    """By lane, what other connections claim."""
    now: int
    taken: "_Basket"
    fresh: list[StoredMessage] = field(default_factory=list)
    """What of it is new to the group."""
    moved: bool = False
    """Whether the group's position moved over empty lanes."""

    def collect(self) -> None:
        """Fill the basket."""
        taken, group, mailbox = self.taken, self.group, self.mailbox
        for lane in self.lanes:
            repeated = [lease.msg_id for lease in self.due if lease.lane is lane][: taken.room]
            if repeated:
                taken.add(self.tx.messages.pick(mailbox, repeated, taken.budget, self.now))
            if taken.full:
                break
            settled = group.settled[lane]
            without = self._claimed_behind(lane, settled) if self.claimed else ()
            new = self.tx.messages.lane(mailbox, lane, settled, taken.room, taken.budget, self.now, without)
            if new:
                self.fresh += taken.add(new)
            elif mailbox.next_id - 1 - settled > SKIP_FROM and _empty(self.tx, mailbox, group, lane):
                # Stores may have to walk over other lanes' messages to see that there is none of this one.
                group.skip_to(lane, mailbox.next_id - 1)
                self.moved = True

    def has_more(self) -> bool:
        """Whether the lanes hold more for the group than was taken."""
        given = {message.msg_id for message in self.taken.messages}
        if any(lease.msg_id not in given for lease in self.due):
            return True
        last = list(self.group.settled)
        for message in self.taken.messages:
            last[message.lane] = max(last[message.lane], message.msg_id)
        return any(
            self.tx.messages.lane(
                self.mailbox, lane, last[lane], 1, 1, self.now, self._claimed_behind(lane, last[lane])
            )
            for lane in self.lanes
        )

    def _claimed_behind(self, lane: Lane, after: int) -> list[int]:
        """Return what others claim in a lane behind a msg_id."""
        return [msg_id for msg_id in self.claimed[lane] if msg_id > after] if self.claimed else []


def _give_without_lease(tx: Transaction, group: Group, due: Sequence[Lease], items: Sequence[tuple[Lane, int]]) -> None:
    """Note which of the leases that ended are of messages that are now given without one."""
    given = {msg_id for _, msg_id in items}
    unleased = [
        Lease(lease.msg_id, lease.lane, NO_LEASE, lease.deliveries)
        for lease in due
        if lease.until != NO_LEASE and lease.msg_id in given
    ]
    if unleased:
        tx.leases.put(group, unleased)


def _count_repeats(tx: Transaction, group: Group, request: Fetch, items: Sequence[tuple[Lane, int]]) -> int:
    """Return how often in a row the connection was handed just these, with no ACK of the group since."""
    return tx.claims.count_repeats(group.id, request.connection, tuple([msg_id for _, msg_id in items]))


def _find_backoff_end(
    tx: Transaction, group: Group, request: Fetch, items: Sequence[tuple[Lane, int]], now: int
) -> int | None:
    """Return until when to hold back messages that come again and again: 1, 2, 4 ... ms (F10)."""
    repeats = _count_repeats(tx, group, request, items)
    return now + min(1 << min(repeats - 2, 20), request.max_wait) if repeats >= 2 else None


def _keep_claimed(
    tx: Transaction, group: Group, claimed: Sequence[Collection[int]], fresh: Sequence[StoredMessage]
) -> None:
    """Keep what others claim as due again, where leases behind it move the group's position past it."""
    last = [max((message.msg_id for message in fresh if message.lane is lane), default=-1) for lane in LANES]
    passed = [
        Lease(msg_id, lane, NO_LEASE, 0)
        for lane in LANES
        for msg_id in claimed[lane]
        if group.settled[lane] < msg_id < last[lane]
    ]
    tx.leases.put(group, passed)


def _empty(tx: Transaction, mailbox: Mailbox, group: Group, lane: Lane) -> bool:
    """Whether a lane holds nothing behind the group's mark; ignores expiry, which reverts if the clock is set back."""
    # At time 0 nothing has expired.
    return not tx.messages.lane(mailbox, lane, group.settled[lane], 1, 1, 0)


def _save_group(tx: Transaction, group: Group, must_keep: bool, moved: bool) -> None:
    """Save the group; mere deliveries are kept in memory only, and losing them costs duplicates (K2)."""
    if must_keep:
        tx.groups.save(group)
    elif moved:
        tx.groups.remember(group)


def _ack_wait(bounds: Bounds, mailbox: Mailbox, request: Fetch) -> int:
    for ack_wait in (request.ack_wait, mailbox.ack_wait):
        if ack_wait is not None:
            return ack_wait
    return bounds.default_ack_wait


def _due(tx: Transaction, mailbox: Mailbox, group: Group, lanes: Sequence[Lane], limit: int, now: int) -> list[Lease]:
    """Return what may be given again; what is gone, or was delivered too often, is given no more (F7)."""
    while due := tx.leases.due(group, now, limit, lanes):
        there = tx.messages.refs(mailbox, [lease.msg_id for lease in due], now)
        gone = [lease.msg_id for lease in due if lease.msg_id not in there]
        dead = [lease for lease in due if lease.msg_id in there and is_exhausted(group, lease)]
        if not gone and not dead:
            break
        if gone:
            tx.leases.remove(group, gone)
        if dead:
            dead_letter(tx, mailbox, group, dead, now)
    return due


def may_be_at_lease_limit(tx: Transaction, group: Group, now: int) -> bool:
    """Whether as many leases of the group run as may, including those whose messages are gone."""
    return tx.leases.count(group, now).running >= MAX_LEASED


def room_for_leases(tx: Transaction, mailbox: Mailbox, group: Group, held: int, wanted: int, now: int) -> int:
    """Return how many more messages the group may lease, ``held`` of whose leases run; exact if ``wanted`` do not fit.

    Leases that ended take no room, nor does what waits for its delay: nobody works on it.

    A message that goes leaves its leases behind, or each DELETE would have to ask thousands of groups. They are ended
    here, when they are in the way, and looked for only after something went or expired since the last time.
    """
    if held + wanted > MAX_LEASED and not _all_live(mailbox, group, now):
        living = tx.leases.living(mailbox, group, now)
        if living.number < held:
            tx.leases.end_gone(mailbox, group, now)
            held = living.number
        group.checked = Checked(mailbox.removed, living.first_expiry)
        tx.groups.remember(group)
    return max(0, MAX_LEASED - held)


def _all_live(mailbox: Mailbox, group: Group, now: int) -> bool:
    checked = group.checked
    if checked is None or checked.removed != mailbox.removed:
        return False
    return checked.first_expiry is None or checked.first_expiry > now


def is_exhausted(group: Group, lease: Lease) -> bool:
    """Whether an ended lease was the last one its message gets (F7)."""
    return group.max_deliver is not None and lease.deliveries >= group.max_deliver and lease.until != NO_LEASE


def dead_letter(tx: Transaction, mailbox: Mailbox, group: Group, leases: Sequence[Lease], now: int) -> None:
    """Make messages dead for a group (F7)."""
    for lease in leases:
        lease.dead, lease.delayed = True, False
        tx.events.append(
            Event(EventType.DEAD, now, mailbox.tenant, mailbox.id, lease.lane, lease.msg_id, group_id=group.id)
        )
    tx.leases.put(group, leases)


def _lease(
    tx: Transaction,
    group: Group,
    messages: Sequence[StoredMessage],
    fresh: Sequence[StoredMessage],
    until: int,
) -> None:
    for message in messages:
        if message.expire_at is not None:
            group.record_expiry(message.expire_at)
    tx.leases.put(group, [Lease(m.msg_id, m.lane, until, m.deliveries) for m in messages])
    for message in fresh:
        group.lease_out(message.lane, message.msg_id)


class _Basket:
    """Collects messages until the number or the byte budget of one reply is reached (F2, N7)."""

    def __init__(self, room: int, budget: int) -> None:
        self.messages: list[StoredMessage] = []
        self.room = room
        self.budget = budget
        self.full = room <= 0

    def add(self, messages: Sequence[StoredMessage]) -> Sequence[StoredMessage]:
        """Take and return what fits; one message is taken whatever its size."""
        for number, message in enumerate(messages):
            cost = message.max_encoded_size
            if self.room <= 0 or (self.messages and cost > self.budget):
                self.budget = 0
                self.full = True
                return messages[:number]
            self.messages.append(message)
            self.room -= 1
            self.budget -= cost
            self.full = self.room <= 0 or self.budget <= 0
        return messages
