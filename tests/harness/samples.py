"""Mailboxes and messages for the conformance tests, and a picture of all that a store holds."""

from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

from mediator.mailboxes.group import NO_LEASE, Group, Lease
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Mailbox, NewMailbox
from mediator.mailboxes.message import HIDDEN_ID, Delayed, Filter, Message, MessageRef
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.transaction import Transaction

T0 = 1_767_225_600_000
"""The time at which the tests begin, in milliseconds since the epoch."""
TENANT = "default"
ALL = 2**40
"""A limit, or a budget in bytes, that no test reaches."""


def add(tx: Transaction, address: str = "a", **given: Any) -> Mailbox:
    """Make a mailbox that was not there."""
    mailbox = tx.mailboxes.add(NewMailbox(**{"tenant": TENANT, "address": address, "created_at": T0} | given))
    assert mailbox is not None
    return mailbox


def get(tx: Transaction, address: str = "a", tenant: str = TENANT) -> Mailbox:
    """Return a mailbox that is there."""
    mailbox = tx.mailboxes.find(tenant, address)
    assert mailbox is not None
    return mailbox


def put(tx: Transaction, mailbox: Mailbox, payload: bytes = b"x", **more: Any) -> Message:
    """Append a message that has the mailbox's next id, and return a copy of it."""
    given = {"msg_id": mailbox.next_id, "lane": Lane.NORMAL, "size": len(payload), "created_at": T0, "sent_at": T0}
    message = Message(payload=payload, **given | more)
    kept = replace(message, headers=dict(message.headers))
    tx.messages.append(mailbox, message)
    return kept


def waiting(mailbox: Mailbox, due_at: int, payload: bytes = b"x", *, archive: bool = False, **more: Any) -> Delayed:
    """Make a delayed message that is not kept yet."""
    given = {"lane": Lane.NORMAL, "size": len(payload), "created_at": T0, "sent_at": T0}
    return Delayed(0, mailbox.id, due_at, archive, Message(msg_id=HIDDEN_ID, payload=payload, **given | more))


def cut(tx: Transaction, mailbox: Mailbox, *ids: int) -> None:
    """Remove messages that are there, expired ones too."""
    refs = [ref for ref in tx.messages.first(mailbox, ALL) if ref.msg_id in ids]
    assert len(refs) == len(ids)
    tx.messages.remove(mailbox, refs)


def everything(tx: Transaction, mailbox: Mailbox, now: int = T0) -> list[StoredMessage]:
    """Return all living messages of a mailbox in ascending msg_id."""
    return tx.messages.newest(mailbox, Filter(), ALL, ALL, now)


def decoded(message: StoredMessage) -> Message:
    """Return a message that was read as it was when it was appended, all of it decoded."""
    return Message(
        **{
            name: getattr(message, name)
            for name in (x.name for x in fields(Message))
            if name not in ("kept_until_start_of", "copy_rules", "copied_from")
        }
    )


def ref(message: Message) -> MessageRef:
    """Return the reference to a message."""
    return MessageRef(**{field.name: getattr(message, field.name) for field in fields(MessageRef)})


def ids(messages: Any) -> list[int]:
    """Return the ids of messages, refs or leases in their order."""
    return [message.msg_id for message in messages]


def held(mailbox: Mailbox) -> tuple[int, int, int]:
    """Return the counters of a mailbox: next id, messages, bytes."""
    return mailbox.next_id, mailbox.messages, mailbox.bytes


def plain(mailbox: Mailbox) -> Mailbox:
    """Copy what the domain knows of a mailbox; a store may note more in its own."""
    return Mailbox(**{field.name: deepcopy(getattr(mailbox, field.name)) for field in fields(Mailbox)})


def leases(tx: Transaction, group: Group, *wanted: int) -> dict[int, Lease]:
    """Return these leases by msg_id."""
    return {lease.msg_id: lease for lease in tx.leases.get(group, wanted)}


def furnish(tx: Transaction) -> None:
    """Put something into every table: one mailbox ``a`` that uses all of it, ``b`` retired, ``c`` empty."""
    mailbox = add(tx, "a", expire_at=T0 + 900_000, desc="d", tags=("t",), token_hash=b"h", ack_wait=1000)
    for number in range(6):
        put(
            tx,
            mailbox,
            bytes([number]) * number,
            lane=LANES[number % 4],
            created_at=T0 + number,
            key=f"k{number}",
            tags=("even",) if number % 2 == 0 else (),
            recipient="r" if number < 3 else None,
            expire_at=T0 + 10_000 if number == 5 else None,
            headers={"n": str(number)},
        )
    cut(tx, mailbox, 4)
    tx.delays.add(waiting(mailbox, T0 + 5000, b"later", archive=True))
    tx.delays.add(waiting(mailbox, T0 + 4000, b"sooner"))
    tx.dedup_ids.add(mailbox, "d0", 0, T0 + 10_000)
    tx.dedup_ids.add(mailbox, "d1", HIDDEN_ID, T0 + 10_000)
    tx.dedup_ids.settle(mailbox, "d1", 3)
    group = tx.groups.add(mailbox, "g")
    group.start_at(0)
    group.hand_out([(Lane.CRITICAL, 0), (Lane.URGENT, 1)])
    group.settle([0, -1, -1, -1])
    group.max_deliver = 3
    tx.groups.save(group)
    tx.leases.put(group, [Lease(1, Lane.URGENT, T0 + 3000, 1), Lease(2, Lane.NORMAL, NO_LEASE, 2)])
    tx.leases.put(group, [Lease(3, Lane.LOW, T0 + 1000, 3, dead=True)])
    tx.outbox.add(mailbox, decoded(everything(tx, mailbox)[0]))
    tx.mailboxes.retire(add(tx, "b"))
    add(tx, "c", tenant="other")


def picture(tx: Transaction) -> dict[str, Any]:
    """Return all that the tables tell; replies of groups are left out, since a restart may forget them (K2)."""
    seen: dict[str, Any] = {"backlog": tx.outbox.backlog(), "next_due": tx.delays.next_due()}
    seen["due"] = deepcopy(tx.delays.due(T0 + 10**9, ALL, ALL))
    for tenant in (TENANT, "other"):
        seen[tenant] = tx.mailboxes.list(tenant, "", ALL, T0)
    seen["retired"] = tx.mailboxes.retired(ALL)
    boxes = [*seen[TENANT], *seen["other"], *seen["retired"]]
    seen |= {name: [plain(box) for box in seen[name]] for name in (TENANT, "other", "retired")}
    for box in boxes:
        groups = tx.groups.of(box, ALL)
        seen[f"mailbox {box.id}"] = [
            everything(tx, box),
            tx.messages.first(box, ALL),
            tx.messages.first_since(box, T0 + 4),
            tx.messages.recipient_usage(box, "r"),
            deepcopy(tx.delays.of(box, ALL)),
            tx.delays.usage(box),
            [tx.dedup_ids.find(box, f"d{number}", T0) for number in range(4)],
            [replace(group, replies=[]) for group in groups],
            [leases(tx, group, *range(10)) for group in groups],
        ]
    seen["expired"] = tx.messages.expired(T0 + 10**9, ALL)
    return seen
