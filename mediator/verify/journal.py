"""The check of the journal: its files, its chain of lines, and what it says was stored against the database."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import orjson

from mediator.journal import FOLDER
from mediator.journal.segments import ACTIVE, COLUMNS, FINAL, GAPS, Line, off_since, read_gaps
from mediator.mailboxes.events import EventType
from mediator.store.snapshots import Ask
from mediator.verify.checks import EXAMPLES, RESTORE, Damage, DamageKind, Installation, Progress, VerifyCheck

FILES = DamageKind(
    "journal_files",
    "Lines of the journal are damaged.",
    "Mail is not affected, but reports miss these events. Check the disk; move the file away when the lake has it.",
)
CHAIN = DamageKind(
    "journal_gaps",
    "Lines of the journal are missing, and gaps.jsonl does not say so: a file was removed or changed.",
    "Mail is not affected, but reports miss these events. Put the file back from a backup, or ignore it.",
)
LOST = DamageKind(
    "lost_messages",
    "Messages that the journal has as stored, and not as removed, are not in the database.",
    "After an older backup was restored, these are the messages since. Otherwise the database or its write-ahead log "
    f"was damaged: check the disk. {RESTORE}",
)
LOST_MAILBOXES = DamageKind(
    "lost_mailboxes",
    "Mailboxes that the journal has, and not as ended, are not in the database.",
    LOST.advice,
)

_GIVEN = frozenset({EventType.STORED, EventType.RELEASED})
_GONE = frozenset({EventType.EXPIRED, EventType.COMPACTED, EventType.DELETED})
_ENDED = frozenset({EventType.MAILBOX_EXPIRED, EventType.MAILBOX_DELETED})
_CHAINED = 10_000
"""Lines out of order whose predecessors are searched for."""
_AT_ONCE = 5_000
_TEMPORARY = (
    # In a file of its own that SQLite deletes: a journal may have ten million events.
    "PRAGMA cache_size = -32000",
    "CREATE TABLE event (mailbox INT, msg_id INT, gone INT, PRIMARY KEY (mailbox, msg_id)) WITHOUT ROWID",
    "CREATE TABLE box (mailbox INTEGER PRIMARY KEY, last INT, ended INT)",
    "CREATE TABLE missing (mailbox INT, msg_id INT)",
)
_EVENT = "INSERT INTO event VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET gone = max(gone, excluded.gone)"
_BOX = (
    "INSERT INTO box VALUES (?, ?, ?) ON CONFLICT DO UPDATE"
    " SET last = max(last, excluded.last), ended = max(ended, excluded.ended)"
)
_NEXT = (
    "SELECT no, CASE WHEN highest >= next_id THEN highest + 1 ELSE next_id END FROM (SELECT no, next_id,"
    " coalesce((SELECT max(msg_id) FROM message WHERE mailbox_no = no), -1) AS highest"
    " FROM mailbox WHERE no IN ({places})) AS given"
)

_LIVING_MESSAGES = "SELECT mailbox, msg_id FROM event JOIN box USING (mailbox) WHERE gone = 0 AND ended = 0"
_LIVING_MAILBOXES = "SELECT mailbox, -1 FROM box WHERE ended = 0"

T = TypeVar("T")


class Journal(VerifyCheck):
    """Reads all files once, and what is new since a second time.

    On a shared database other instances have journals of their own, elsewhere: there, only files are checked, and that
    no mailbox gives a msg_id again that this journal has.
    """

    title = "journal"
    kinds = (FILES, CHAIN, LOST, LOST_MAILBOXES)

    def run(self, installation: Installation, progress: Progress) -> Iterator[Damage]:
        """See :class:`VerifyCheck`."""
        folder = installation.data_dir / FOLDER
        if not folder.is_dir():
            return
        with closing(sqlite3.connect("")) as memory:
            for sql in _TEMPORARY:
                memory.execute(sql)
            reader = _Reader(folder, memory, progress)
            reader.read()
            yield from reader.damage(chained=not installation.database.shared)
            if installation.database.shared:
                yield from _find_reused_ids(installation, memory)
            else:
                yield from _find_lost(installation, memory, reader)


class _Reader:
    """Reads the files of a journal; a second reading goes on where the first ended."""

    def __init__(self, folder: Path, memory: sqlite3.Connection, progress: Progress) -> None:
        self._folder = folder
        self._memory = memory
        self._progress = progress
        self._read: dict[str, int] = {}
        """Bytes that were read of each file, by what its name begins with."""
        self._off_since = off_since(folder)
        gaps = read_gaps(folder)
        self.trusted = not any(gap.get("why") == "waiting" for gap in gaps)
        """Whether each removal of a message that the journal has as stored should be there as well."""
        self._gaps = [(name, *span) for gap in gaps for name, span in gap.get("seqs", {}).items()]
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._unseen: dict[tuple[str, int], str] = {}
        """Lines that another names as the one before it, and that were not seen; with the file that names them."""
        self._damaged = Damage(FILES)

    def damage(self, *, chained: bool) -> Iterator[Damage]:
        """Yield what was found in the files."""
        if self._damaged.count:
            yield self._damaged
        if not chained:
            return
        self._find_unseen()
        missing = {
            line: name
            for line, name in self._unseen.items()
            if line[1] >= self._first.get(line[0], 0) and not any(_within(line, *gap) for gap in self._gaps)
        }
        if missing:
            self.trusted = False
            found = Damage(CHAIN)
            found.add(len(missing), [f"before line {seq} of {file}" for (_, seq), file in missing.items()])
            yield found

    def _find_unseen(self) -> None:
        """Search all files for lines that came later than the one that names them."""
        if not self._unseen:
            return
        for path in _files(self._folder):
            for line, _ in _lines(path, 0):
                with suppress(ValueError, KeyError, TypeError):
                    head = orjson.loads(line)
                    self._unseen.pop((head["instance"], head["seq"]), None)

    def read(self) -> None:
        """Read what is new in all files."""
        paths = _files(self._folder)
        for number, path in enumerate(paths):
            self._progress(number / len(paths))
            key = path.name.partition(".")[0]
            try:
                for lines in _batches(_lines(path, self._read.get(key, 0)), 20):
                    self._take(path, [line for line, _ in lines])
                    self._read[key] = lines[-1][1]
            except FileNotFoundError:
                # Renamed when it was closed, or dropped for room.
                continue
            if path.name.endswith(FINAL) and path.exists() and self._read.get(key, 0) < path.stat().st_size:
                self._damaged.add(1, [f"{path.name}: the last line is incomplete"])

    def add_tail(self, lines: bytes) -> None:
        """Take lines that are in the database still."""
        self._take(None, lines.splitlines())

    def _take(self, path: Path | None, texts: Sequence[bytes]) -> None:
        events: list[tuple[int, int, int]] = []
        boxes: dict[int, tuple[int, int]] = {}
        for text in texts:
            try:
                line = orjson.loads(text)
                if line.get("version", 1) == 1:
                    self._absorb(line, events, boxes)
                    if path is not None:
                        self._chain(line, path)
            except (ValueError, KeyError, TypeError, AttributeError):
                if path is not None:
                    self._damaged.add(1, [f"{path.name}: {text[:60].decode(errors='replace')}…"])
        self._memory.executemany(_EVENT, events)
        self._memory.executemany(_BOX, [(no, *state) for no, state in boxes.items()])

    def _absorb(self, line: Line, events: list[tuple[int, int, int]], boxes: dict[int, tuple[int, int]]) -> None:
        rows: Iterable[tuple[Any, ...]] = zip(*(line[name] for name in COLUMNS), strict=True)
        for at, what, mailbox, _, msg_id, *_ in rows:
            if what in _GIVEN:
                # While no journal was kept, anything may have gone unseen.
                unseen = int(at < self._off_since)
                last, ended = boxes.get(mailbox, (-1, 0))
                boxes[mailbox] = max(last, msg_id), max(ended, unseen)
                events.append((mailbox, msg_id, unseen))
            elif what in _GONE and msg_id >= 0:
                events.append((mailbox, msg_id, 1))
            elif what in _ENDED:
                boxes[mailbox] = boxes.get(mailbox, (-1, 0))[0], 1
            elif what == EventType.MAILBOX_CREATED:
                boxes.setdefault(mailbox, (-1, int(at < self._off_since)))

    def _chain(self, line: Line, path: Path) -> None:
        instance, seq, after = line["instance"], line["seq"], line["after"]
        self._first[instance] = min(seq, self._first.get(instance, seq))
        if after is not None and after != self._last.get(instance) and len(self._unseen) < _CHAINED:
            self._unseen[instance, after] = path.name
        self._unseen.pop((instance, seq), None)
        self._last[instance] = seq


def _within(line: tuple[str, int], name: str, first: int, last: int) -> bool:
    return line[0] == name and first <= line[1] <= last


def _files(folder: Path) -> list[Path]:
    found = (path for path in folder.iterdir() if path.name.endswith((FINAL, ACTIVE)) and path.name != GAPS)
    return sorted(found, key=lambda path: path.name)


def _lines(path: Path, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield the complete lines of a file from a byte on, each with where it ends."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            start += len(line)
            if line.endswith(b"\n"):
                yield line, start


def _batches(values: Iterable[T], count: int) -> Iterator[list[T]]:
    rest = iter(values)
    while batch := list(islice(rest, count)):
        yield batch


def _find_reused_ids(installation: Installation, memory: sqlite3.Connection) -> Iterator[Damage]:
    """Yield mailboxes that may give a msg_id once more, since they count from below what the journal has."""
    found = Damage(LOST)
    for batch in _batches(memory.execute("SELECT mailbox, last FROM box WHERE ended = 0 AND last >= 0"), 500):
        with installation.database.open() as ask:
            next_ids = _next_ids(ask, [no for no, _ in batch])
        for no, last in batch:
            if last >= next_ids.get(no, last + 1):
                found.add(last + 1 - next_ids[no], [f"mailbox {no} from message {next_ids[no]} to {last}"])
    if found.count:
        yield found


def _next_ids(ask: Ask, numbers: Sequence[int]) -> dict[int, int]:
    return {int(row[0]): int(row[1]) for row in ask(_NEXT.format(places=_placeholders(len(numbers))), numbers)}


def _placeholders(count: int) -> str:
    return ", ".join("?" * count)


def _find_lost(installation: Installation, memory: sqlite3.Connection, reader: _Reader) -> Iterator[Damage]:
    """Yield messages and mailboxes that the journal has and the database has not.

    Removals since are in the journal's tail in the database, and in what was added to the files.
    """
    if not reader.trusted:
        return
    for candidates, table in ((_LIVING_MESSAGES, "message"), (_LIVING_MAILBOXES, "mailbox")):
        for batch in _batches(memory.execute(candidates), _AT_ONCE):
            pairs = ", ".join(["(?, ?)"] * len(batch))
            numbers = "mailbox_no = a AND message.msg_id = b" if table == "message" else "no = a"
            sql = f"WITH wanted (a, b) AS (VALUES {pairs}) SELECT a, b FROM wanted"
            with installation.database.open() as ask:
                missing = ask(
                    f"{sql} WHERE NOT EXISTS (SELECT 1 FROM {table} WHERE {numbers})",
                    [number for pair in batch for number in pair],
                )
            memory.executemany("INSERT INTO missing VALUES (?, ?)", missing)
    _read_newer(installation, reader)
    for kind, sql, example in (
        (LOST_MAILBOXES, f"{_LIVING_MAILBOXES} AND (mailbox, -1) IN missing", "mailbox {0}"),
        (LOST, f"{_LIVING_MESSAGES} AND (mailbox, msg_id) IN missing", "message {1} of mailbox {0}"),
    ):
        found = Damage(kind)
        for row in memory.execute(sql):
            found.add(1, [example.format(*row)] if found.count < EXAMPLES else [])
        if found.count:
            yield found


def _read_newer(installation: Installation, reader: _Reader) -> None:
    """Read what the journal got meanwhile: a change writes its lines to the tail first, and from there to a file."""
    after = -1
    while True:
        with installation.database.open() as ask:
            tail = ask("SELECT seq, lines FROM journal_tail WHERE seq > ? ORDER BY seq LIMIT 100", (after,))
        if not tail:
            break
        after = tail[-1][0]
        for _, lines in tail:
            reader.add_tail(bytes(lines))
    reader.read()
