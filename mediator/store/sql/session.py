"""One transaction's connection, what it changed of the mailboxes, and the messages it has yet to insert."""

from collections.abc import Sequence
from typing import Any

from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Message
from mediator.store import rows
from mediator.store.rows import KeptMailbox, Row
from mediator.store.sql.dialect import Dialect
from mediator.store.sql.known import Known

SHARE_FROM = 4096
"""Bytes from which a payload that one transaction sends to several mailboxes is kept once."""


class Session:
    """What all tables of a transaction share."""

    def __init__(self, dialect: Dialect, known: Known) -> None:
        self.dialect = dialect
        self.known = known
        self.touched: dict[int, KeptMailbox] = {}
        self.removed = False
        """Whether messages were removed."""
        self._unwritten: list[tuple[KeptMailbox, Message]] = []
        self._unwritten_keys: set[tuple[int, str]] = set()
        self._held: dict[tuple[int, str], tuple[int, int]] = {}

    def touch(self, mailbox: Mailbox) -> KeptMailbox:
        """Return the mailbox as this transaction changes it."""
        assert isinstance(mailbox, KeptMailbox)
        self.touched[mailbox.no] = mailbox
        return mailbox

    def write_later(self, mailbox: KeptMailbox, message: Message) -> None:
        """Keep a message for one insert of many."""
        self._unwritten.append((mailbox, message))
        if message.key is not None:
            self._unwritten_keys.add((mailbox.no, message.key))

    def unwritten(self, mailbox: Mailbox, key: str) -> bool:
        """Whether a message with the key waits to be inserted."""
        return (mailbox.no, key) in self._unwritten_keys

    def flush(self) -> None:
        """Insert what waits, so that a SELECT sees it."""
        if not self._unwritten:
            return
        waiting, self._unwritten = self._unwritten, []
        self._unwritten_keys.clear()
        bodies = self._share([message.payload for _, message in waiting])
        self.dialect.insert_messages(
            [
                (
                    mailbox.no,
                    message.msg_id,
                    message.lane.value,
                    message.size,
                    message.created_at,
                    *rows.particulars(message),
                    None if id(message.payload) in bodies else message.payload,
                    bodies.get(id(message.payload)),
                    message.volatile,
                )
                for mailbox, message in waiting
            ]
        )

    def _share(self, payloads: Sequence[bytes]) -> dict[int, int]:
        """Keep large payloads that are sent more than once in a body of their own; return its number by identity."""
        uses: dict[int, tuple[bytes, int]] = {}
        for payload in payloads:
            if len(payload) >= SHARE_FROM:
                uses[id(payload)] = (payload, uses.get(id(payload), (payload, 0))[1] + 1)
        return {
            identity: self.one("INSERT INTO body (refs, payload) VALUES (?, ?) RETURNING no", (refs, payload))[0]
            for identity, (payload, refs) in uses.items()
            if refs > 1
        }

    def hold(self, mailbox: Mailbox, recipient: str, messages: int, size: int) -> None:
        """Count for one recipient, written with the rest: a batch brings many messages for the same few."""
        before = self._held.get((mailbox.no, recipient), (0, 0))
        self._held[mailbox.no, recipient] = before[0] + messages, before[1] + size

    def flush_held(self) -> None:
        """Write the counts of recipients; none is kept of who has nothing, or keys of old would pile up."""
        if self._held:
            changed, self._held = self._held, {}
            self.dialect.save_held([(*place, *counts) for place, counts in sorted(changed.items())])

    def finish(self) -> None:
        """Write what is still held back, right before the commit."""
        self.flush()
        self.flush_held()
        if self.touched:
            self.dialect.save_mailboxes(list(self.touched.values()))

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> Row:
        """Return the only row of a statement that always has one."""
        return self.dialect.execute(sql, parameters)[0]

    def first(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Return the first row of a statement, if it has any."""
        found = self.dialect.execute(sql, parameters)
        return found[0] if found else None


class Table:
    """One table of the domain, over a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
