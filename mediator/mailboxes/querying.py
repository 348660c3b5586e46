"""MSG.QUERY and MSG.DELETE: looking at a mailbox without moving any group, and removing one message (Q1, Q2)."""

from dataclasses import dataclass

from mediator.errors import NoSuchMessageError
from mediator.mailboxes.creating import living
from mediator.mailboxes.events import Event, What
from mediator.mailboxes.fetching import spent
from mediator.mailboxes.message import Message
from mediator.mailboxes.ports import Filter, Transaction

MAX_DEAD_LOOKED_AT = 100_000


@dataclass(frozen=True, slots=True)
class Query:
    """A question about a mailbox."""

    tenant: str
    address: str
    wanted: Filter = Filter()
    limit: int = 100
    budget: int = 1 << 20
    """Bytes a reply may hold; one message is given whatever its size (N7)."""
    dead_for: str | None = None
    """A group: only messages that are dead for it (F7)."""


def query(tx: Transaction, request: Query, now: int) -> list[Message]:
    """Return the newest messages that fit, in ascending msg_id (Q1)."""
    mailbox = living(tx, request.tenant, request.address, now)
    if request.dead_for is None:
        return tx.messages.newest(mailbox, request.wanted, request.limit, request.budget, now)
    group = tx.groups.find(mailbox, request.dead_for)
    if group is None:
        return []
    after = -1
    leases = {x.msg_id: x for x in tx.leases.due(group, now, 10_000) if spent(group, x)}
    while len(leases) < MAX_DEAD_LOOKED_AT and (more := tx.leases.dead(group, after, 1000)):
        leases |= {lease.msg_id: lease for lease in more}
        after = more[-1].msg_id
    before = request.wanted.before_id
    ids = [i for i in sorted(leases) if before is None or i < before][-request.limit :]
    found = tx.messages.pick(mailbox, ids, request.budget, now)
    for message in found:
        message.deliveries = leases[message.msg_id].deliveries
    return found


def delete(tx: Transaction, tenant: str, address: str, msg_id: int, now: int) -> None:
    """Remove one message, and with it its dedup id; :class:`NoSuchMessageError` when it is not there (Q2, S3)."""
    mailbox = living(tx, tenant, address, now)
    handle = tx.messages.handles(mailbox, [msg_id], now).get(msg_id)
    if handle is None:
        raise NoSuchMessageError
    tx.messages.remove(mailbox, [handle])
    # An id that had its time before may name a newer message by now.
    if handle.dedup_id is not None and tx.dedup_ids.find(mailbox, handle.dedup_id, now) == msg_id:
        tx.dedup_ids.forget(mailbox, handle.dedup_id)
    tx.events.append(
        Event(What.DELETED, now, mailbox.tenant, mailbox.no, handle.lane, msg_id, handle.size, handle.created_at)
    )
