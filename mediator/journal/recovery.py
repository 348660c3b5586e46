"""Recovers the journal at a start: what former runs wrote, what is missing, and events that only messages prove."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import orjson
import structlog

from mediator.broker import Broker
from mediator.journal.segments import Line, Segments, closed_segments, encode, read_segment
from mediator.mailboxes.events import EventType
from mediator.mailboxes.transaction import Transaction

MARK_EVENTS = 5000
"""Events after which a line carries a mark: the key of the message up to which the journal is complete."""
COMPARED_MAILBOXES = 10_000
"""Mailboxes whose database and journal a start compares: those that got mail last."""
BATCH = 1000
"""Rows, messages or mailboxes that one statement reads."""
_ADDING = frozenset({EventType.STORED, EventType.RELEASED})
_ENDING = frozenset({EventType.MAILBOX_EXPIRED, EventType.MAILBOX_DELETED})

log = structlog.get_logger("journal")


@dataclass(slots=True)
class FormerRuns:
    """What the journal's newest lines of this instance say."""

    stopped_normally: bool
    """Whether the last run closed its file; then no event is missing."""
    last_seq: int | None = None
    mark: int | None = None
    mark_seq: int = 0
    """The seq of the line with the mark."""
    events: int = 0
    stored: dict[tuple[int, int], int] = field(default_factory=dict)
    """Mailbox and msg_id of messages stored after the mark, with the seq of their line."""
    highest: dict[int, int] = field(default_factory=dict)
    """The highest msg_id of each mailbox; the mailbox that got mail last comes last."""
    ended: set[int] = field(default_factory=set)
    """Mailboxes that expired or were deleted."""

    def add(self, line: Line) -> None:
        """Take in a line."""
        seq = line["seq"]
        self.last_seq = max(seq, self.last_seq or 0)
        for what, mailbox, msg_id in zip(line["what"], line["mailbox"], line["msg_id"], strict=True):
            if what in _ADDING:
                self.highest[mailbox] = max(msg_id, self.highest.pop(mailbox, -1))
                if not self.stopped_normally and seq > self.mark_seq:
                    self.stored[mailbox, msg_id] = seq
            elif what in _ENDING:
                self.ended.add(mailbox)
        self.events += len(line["what"])
        if not self.stopped_normally and "mark" in line and seq > self.mark_seq:
            self.mark, self.mark_seq = line["mark"], seq
            self.stored = {message: stored_seq for message, stored_seq in self.stored.items() if stored_seq > seq}

    @property
    def marks_expected(self) -> bool:
        """Whether older files may still have a mark; a store with marks would have had one in so many events."""
        return not self.stopped_normally and self.mark is None and self.events <= 2 * MARK_EVENTS


class Recovery:
    """One start's recovery: call :meth:`read_files`, :meth:`read_tail`, :meth:`find_missing`, :meth:`rebuild`."""

    def __init__(self, folder: Path, instance: str, broker: Broker) -> None:
        self._folder = folder
        self._instance = instance
        self._broker = broker
        self._former = FormerRuns(stopped_normally=True)
        self.first_seq = 0
        """The first seq of this run."""
        self.seqs: Iterator[int] = count(1)
        """The seqs that are not used yet."""
        self.last_seq: int | None = None
        """The last seq used, by former runs or by :meth:`rebuild`."""

    def read_files(self, segments: Segments) -> None:
        """Close what the last run left open, and read as many of the newest files as needed; blocks on the disk."""
        stopped_normally = segments.close_former()
        closed = closed_segments(self._folder)
        depth = 1 if stopped_normally else 2
        while True:
            former = FormerRuns(stopped_normally)
            for path in closed[-depth:]:
                self._read_file(former, path)
            if depth >= len(closed) or (former.last_seq is not None and not former.marks_expected):
                break
            depth *= 2
        if closed:
            former.last_seq = max(former.last_seq or 0, int(closed[-1].name.split("-", 1)[0]))
        self._former = former

    def _read_file(self, former: FormerRuns, path: Path) -> None:
        try:
            for line in read_segment(path):
                if line["instance"] == self._instance:
                    former.add(line)
        except (ValueError, KeyError, TypeError) as error:
            log.error("a journal file is damaged", segment=path.name, reason=str(error))

    async def read_tail(self) -> None:
        """Read the lines that this instance left in the tail, and find its first seq."""

        def read(tx: Transaction, now: int) -> int:
            after = 0
            while rows := tx.tail.read(after, BATCH):
                after = rows[-1].id
                for row in rows:
                    if row.instance == self._instance:
                        for line in row.lines.splitlines():
                            self._former.add(orjson.loads(line))
            # No former run can have reached this number, not even one after the backup that was restored.
            return max(now * 1000, (self._former.last_seq or 0) + 1)

        self.first_seq = await self._broker.write(read, even_when_full=True)
        self.seqs, self.last_seq = count(self.first_seq), self._former.last_seq

    async def find_missing(self) -> int:
        """Count the messages that the journal's newest files have and the database lacks.

        SQLite silently treats a damaged write-ahead log as one that ends earlier.
        """
        highest = dict(list(self._former.highest.items())[-COMPARED_MAILBOXES:])
        mailbox_ids = [mailbox_id for mailbox_id in highest if mailbox_id not in self._former.ended]
        missing = 0
        for start in range(0, len(mailbox_ids), BATCH):
            next_ids = await self._broker.read(partial(_read_next_ids, mailbox_ids[start : start + BATCH]))
            missing += sum(max(0, highest[mailbox_id] + 1 - next_id) for mailbox_id, next_id in next_ids.items())
        if missing:
            log.error(
                "the database lacks messages that the journal has: its log was damaged, or a backup was restored",
                messages=missing,
            )
        return missing

    async def rebuild(self) -> None:
        """Write the events to the tail that only messages prove, and a mark."""
        mark = None if self._former.stopped_normally else self._former.mark
        more = True
        while more:
            rebuild_some = partial(self._rebuild_some, mark)
            more, mark, self.last_seq = await self._broker.write(rebuild_some, even_when_full=True)

    def _rebuild_some(self, mark: int | None, tx: Transaction, now: int) -> tuple[bool, int | None, int | None]:
        """Rebuild the events of some messages behind the mark.

        Returns whether there may be more, the new mark, and the last seq used.
        """
        tail = tx.tail
        if not tail.ordered:
            return False, None, self.last_seq
        behind = [] if mark is None else tail.behind(mark, BATCH)
        lost = [event for _, event in behind if (event.mailbox_id, event.msg_id) not in self._former.stored]
        new_mark = behind[-1][0] if behind else tail.mark()
        lines, last_seq = encode(lost, instance=self._instance, seqs=self.seqs, after=self.last_seq, mark=new_mark)
        tail.add(self._instance, lines, now)
        return bool(behind), new_mark, last_seq


def _read_next_ids(mailbox_ids: Sequence[int], tx: Transaction, _now: int) -> dict[int, int]:
    """Return the next msg_id of each mailbox; 0 for one that is gone without an event."""
    found = tx.mailboxes.by_id(mailbox_ids)
    # On a shared database another instance may have ended a mailbox, in its own journal.
    return {
        mailbox_id: found[mailbox_id].next_id if mailbox_id in found else 0
        for mailbox_id in mailbox_ids
        if mailbox_id in found or tx.tail.ordered
    }
