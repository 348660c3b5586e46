"""The journal's tail in SQL."""

from collections.abc import Sequence

from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.ports import TailRow
from mediator.store.session import Session, Table


class Tail(Table):
    """See :class:`mediator.mailboxes.ports.Tail`."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.ordered = session.dialect.ordered
        self._waiting: list[tuple[str, int, bytes]] = []

    @property
    def removed(self) -> bool:
        return self._session.removed

    def add(self, instance: str, lines: bytes, now: int) -> None:
        if not self._waiting:
            self._session.before_commit.append(self._insert)
        self._waiting.append((instance, now, lines))

    def _insert(self) -> None:
        self._dialect.many("INSERT INTO journal_tail (instance, written_at, lines) VALUES (?, ?, ?)", self._waiting)

    def numbers(self, instance: str) -> list[int]:
        return [row[0] for row in self._execute("SELECT seq FROM journal_tail WHERE instance = ?", (instance,))]

    def read(self, after: int, limit: int) -> list[TailRow]:
        sql = "SELECT seq, instance, written_at, lines FROM journal_tail WHERE seq > ? ORDER BY seq LIMIT ?"
        return [TailRow(*row) for row in self._execute(sql, (after, limit))]

    def remove(self, numbers: Sequence[int]) -> None:
        self._for_each("DELETE FROM journal_tail WHERE {among}", "seq", numbers)

    def mark(self) -> int:
        self._session.flush()
        return int(self._session.one("SELECT coalesce(max(id), 0) FROM message")[0])

    def behind(self, mark: int, limit: int) -> list[tuple[int, Event]]:
        self._session.flush()
        found = self._execute(
            "SELECT id, tenant, mailbox_no, lane, msg_id, size, message.created_at FROM message"
            " JOIN mailbox ON mailbox_no = no WHERE id > ? ORDER BY id LIMIT ?",
            (mark, limit),
        )
        return [
            (row[0], Event(EventType.STORED, row[6], row[1], row[2], LANES[row[3]], row[4], row[5], row[6]))
            for row in found
        ]
