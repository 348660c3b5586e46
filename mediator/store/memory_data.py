"""What the twin in memory holds, and what its tables share."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from mediator.mailboxes.group import Group, Lease
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Delayed, Message
from mediator.mailboxes.ports import Copy, TailRow, Usage
from mediator.store.base import Place
from mediator.store.memory_agents import Registry
from mediator.store.memory_mediation import Mediation
from mediator.store.memory_runs import History
from mediator.store.memory_table import Undo, Undoable


@dataclass
class Box:
    """Everything one mailbox holds."""

    mailbox: Mailbox
    messages: dict[int, Message] = field(default_factory=dict)
    """In ascending msg_id, since ids only grow."""
    dedup_ids: dict[str, tuple[int, int]] = field(default_factory=dict)
    groups: dict[tuple[str, bool], Group] = field(default_factory=dict)
    """By name and whether mail is pushed to it."""
    pushed: dict[Lane, int] = field(default_factory=dict)
    held: dict[str, Usage] = field(default_factory=dict)


@dataclass
class Data:
    """Everything a store holds."""

    boxes: dict[int, Box] = field(default_factory=dict)
    addresses: dict[Place, int] = field(default_factory=dict)
    delayed: list[tuple[int, int, Delayed]] = field(default_factory=list)
    leases: dict[int, dict[int, Lease]] = field(default_factory=dict)
    outbox: dict[int, tuple[Copy, Message]] = field(default_factory=dict)
    copies: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """The numbers of what goes into the outbox."""
    tail: dict[int, TailRow] = field(default_factory=dict)
    mediation: Mediation = field(default_factory=Mediation)
    registry: Registry = field(default_factory=Registry)
    history: History = field(default_factory=History)
    control_key: bytes = b""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class Table(Undoable):
    """Some of the data, and how to take back what was changed."""

    def __init__(self, data: Data, undo: Undo) -> None:
        super().__init__(undo)
        self._data = data

    def _box(self, mailbox: Mailbox) -> Box:
        return self._data.boxes[mailbox.no]

    def _change(self, mailbox: Mailbox, **fields: object) -> None:
        kept = self._box(mailbox).mailbox
        for name, value in fields.items():
            self._undo.append(partial(setattr, kept, name, getattr(kept, name)))
            setattr(kept, name, value)


def lives(message: Message, now: int) -> bool:
    """Whether a message has not expired."""
    return message.expire_at is None or message.expire_at > now
