"""The journal's files: one open, the others closed for readers, with a bound on their total size; docs/journal.md.

Every call may block on the disk, so none is for the event loop.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from mediator.mailboxes.events import Event, EventType
from mediator.system.private_files import make_folder, open_file

FOLDER = "journal"
"""Below the data directory."""
FINAL = ".jsonl"
ACTIVE = ".jsonl.open"
GAPS = "gaps.jsonl"
READ = "read.json"
OFF = "off.json"
GAPS_BYTES = 1 << 20
"""Bytes of the file of gaps; above, its older half is dropped."""

Line = dict[str, Any]
COLUMNS = ("at", "what", "mailbox", "lane", "msg_id", "bytes", "created_at", "group")
LINE_EVENTS = 1000
"""Events of one line at most."""


class Segments:
    """The files one instance writes into a folder."""

    def __init__(
        self,
        folder: Path,
        instance: str,
        *,
        segment_bytes: int,
        total_bytes: int,
        segment_seconds: float,
        on_drop: Callable[[], None],
    ) -> None:
        """``on_drop`` is called for each file that was dropped unread."""
        self._folder = folder
        self._instance = instance
        self._segment_bytes = segment_bytes
        self._total_bytes = total_bytes
        self._segment_seconds = segment_seconds
        self._on_drop = on_drop
        self.active: Path | None = None
        """The file that is open."""
        self._file = -1
        self._number = 0
        self._size = 0
        self._opened_at = 0.0

    def close_former(self) -> bool:
        """Close the files a former run left open, without a torn last line; return whether there were none."""
        make_folder(self._folder)
        left = sorted(self._folder.glob(f"*{ACTIVE}"))
        for path in left:
            self._finish(path, _mend(path))
        return not left

    def open(self, number: int) -> None:
        """Open a new file; ``number`` is the first seq that may come into it."""
        self._create(number)
        self._make_room()

    def append(self, lines: bytes) -> None:
        """Write whole lines to the disk; :class:`OSError` leaves the file as it was."""
        try:
            view = memoryview(lines)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(lines)

    @property
    def rotation_due(self) -> bool:
        """Whether it is time for a new file."""
        old = time.monotonic() - self._opened_at >= self._segment_seconds
        return self.has_lines and (old or self._size >= self._segment_bytes)

    @property
    def has_lines(self) -> bool:
        """Whether the open file has lines."""
        return self.active is not None and self._size > 0

    def rotate(self, number: int) -> None:
        """Begin a new file and then close the one before, so that a crash between them shows in two open files."""
        before, file, size = self.active, self._file, self._size
        self._create(number)
        os.close(file)
        assert before is not None
        self._finish(before, size)
        self._make_room()

    def close(self, complete: bool) -> None:
        """Close the file; unless ``complete`` it keeps its open name for the next start to check."""
        if self.active is None:
            return
        os.close(self._file)
        path, self.active = self.active, None
        if complete:
            self._finish(path, self._size)

    def record_gap(self, **fields: object) -> None:
        """Record a gap: events that readers will not find."""
        path = self._folder / GAPS
        kept = path.read_bytes() if path.exists() else b""
        if len(kept) > GAPS_BYTES:
            kept = kept[kept.index(b"\n", len(kept) // 2) + 1 :]
        _replace(path, kept + orjson.dumps({"at": time.time_ns() // 1_000_000, **fields}) + b"\n")

    def _create(self, number: int) -> None:
        number = max(number, self._number + 1)
        path = self._folder / f"{number:020d}-{self._instance}{ACTIVE}"
        file = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self._sync_folder()
        except OSError:
            os.close(file)
            path.unlink()
            raise
        self._file, self.active, self._number, self._size = file, path, number, 0
        self._opened_at = time.monotonic()

    def _finish(self, path: Path, size: int) -> None:
        if size:
            path.rename(path.with_name(path.name.removesuffix(ACTIVE) + FINAL))
        else:
            path.unlink()
        self._sync_folder()

    def _make_room(self) -> None:
        """Drop the oldest closed files until there is room for the open one to fill up."""
        closed = [(path, path.stat().st_size) for path in closed_segments(self._folder)]
        total = sum(size for _, size in closed) + self._segment_bytes
        read = read_up_to(self._folder)
        for path, size in closed:
            if total <= self._total_bytes:
                break
            summary = _summary(path) if path.name > read else None
            # Before the gap is recorded, which may need the space on a full disk.
            path.unlink()
            total -= size
            if summary is not None:
                self._on_drop()
                self.record_gap(why="space", segment=path.name, **summary)

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def closed_segments(folder: Path) -> list[Path]:
    """Return the closed files, in order."""
    return [path for path in sorted(folder.glob(f"*{FINAL}")) if path.name != GAPS]


def read_segment(path: Path) -> Iterator[Line]:
    """Return the lines of a file in order; of the open one, those that are complete."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield orjson.loads(line)


def read_gaps(folder: Path) -> list[Line]:
    """Return what was dropped before it was read, oldest first."""
    path = folder / GAPS
    return list(read_segment(path)) if path.exists() else []


def mark_read(folder: Path, segment: str) -> None:
    """Record that this closed file and all before it were read: dropping them leaves no gap."""
    _replace(folder / READ, orjson.dumps({"segment": segment}))


def read_up_to(folder: Path) -> str:
    """Return the name of the last file that was read, empty if none was."""
    try:
        return str(orjson.loads((folder / READ).read_bytes())["segment"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ""


def mark_off(folder: Path) -> None:
    """Record that no journal is kept from now on: what is in these files may end without an event."""
    if closed_segments(folder):
        _replace(folder / OFF, orjson.dumps({"at": time.time_ns() // 1_000_000}))


def off_since(folder: Path) -> int:
    """Return when a service last started without a journal, milliseconds since the epoch; 0: never."""
    try:
        return int(orjson.loads((folder / OFF).read_bytes())["at"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def _mend(path: Path) -> int:
    """Truncate an incomplete last line; return the remaining size."""
    with path.open("r+b") as file:
        if not path.stat().st_size:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            whole = data.rfind(b"\n") + 1
        file.truncate(whole)
        os.fsync(file.fileno())
    return whole


def _summary(path: Path) -> Line:
    """Return the range of seqs and times of a file, and its size."""
    seqs: dict[str, list[int]] = {}
    first, last, events = [], [], 0
    for line in read_segment(path):
        span = seqs.setdefault(line["instance"], [line["seq"], line["seq"]])
        span[0], span[1] = min(span[0], line["seq"]), max(span[1], line["seq"])
        if line["at"]:
            first.append(min(line["at"]))
            last.append(max(line["at"]))
        events += len(line["what"])
    return {
        "seqs": seqs,
        "from": min(first, default=0),
        "to": max(last, default=0),
        "events": events,
        "bytes": path.stat().st_size,
    }


def _replace(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    with os.fdopen(open_file(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def encode(
    events: Sequence[Event], *, instance: str, seqs: Iterator[int], after: int | None, mark: int | None
) -> tuple[bytes, int]:
    """Return whole lines and the last seq; ``after`` is the seq before the first, ``mark`` goes with the last line."""
    parts = _parts(events)
    lines = []
    for index, (tenant, columns) in enumerate(parts):
        seq = next(seqs)
        line: Line = {"instance": instance, "seq": seq, "after": after, "tenant": tenant}
        if mark is not None and index == len(parts) - 1:
            line["mark"] = mark
        line.update(zip(COLUMNS, columns, strict=True))
        lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        after = seq
    assert after is not None
    return b"".join(lines), after


def expand(line: Line) -> Iterator[dict[str, Any]]:
    """Return a line's events; instance, seq and position together identify an event permanently."""
    head = {name: line[name] for name in ("instance", "seq", "tenant")}
    rows = zip(*(line[name] for name in COLUMNS), strict=True)
    for position, row in enumerate(rows):
        yield {**head, "position": position, **dict(zip(COLUMNS, row, strict=True))}


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """Return all events that a journal's folder holds, in the order of its files; repeated events are repeated."""
    for path in (*closed_segments(folder), *sorted(folder.glob(f"*{ACTIVE}"))):
        for line in read_segment(path):
            yield from expand(line)


def count_accepted(folder: Path, since: int) -> int:
    """Return how many messages were accepted after a time in milliseconds, as far as a journal's folder tells."""
    count = 0
    for path in reversed((*closed_segments(folder), *sorted(folder.glob(f"*{ACTIVE}")))):
        times = [
            at
            for line in read_segment(path)
            for at, what in zip(line["at"], line["what"], strict=True)
            if what in (EventType.STORED, EventType.DELAYED)
        ]
        later = sum(at > since for at in times)
        count += later
        if later < len(times):
            break
    return count


def _parts(events: Sequence[Event]) -> list[tuple[str, Sequence[Sequence[Any]]]]:
    """Split events by tenant (nearly always one) and into lines."""
    if not events:
        return [("", ((),) * len(COLUMNS))]
    parts: list[tuple[str, Sequence[Sequence[Any]]]] = []
    for start in range(0, len(events), LINE_EVENTS):
        some = events[start : start + LINE_EVENTS]
        what, at, tenant, *others = zip(*some, strict=True)
        if tenant.count(tenant[0]) == len(some):
            parts.append((tenant[0], (at, what, *others)))
            continue
        for name in dict.fromkeys(tenant):
            what, at, _, *others = zip(*(event for event in some if event.tenant == name), strict=True)
            parts.append((name, (at, what, *others)))
    return parts
