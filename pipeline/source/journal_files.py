"""The journal's files for a stream: in order, each up to its last complete line; see docs/journal.md."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mediator.errors import BadRequestError
from mediator.ops.journal.segments import ACTIVE, FINAL, GAPS, read_gaps
from pipeline.source.journal_rows import Placed, count_events

LOOK_BACK = 1 << 16
"""Bytes read at a time when searching backwards for the last complete line."""


@dataclass(frozen=True, slots=True)
class JournalFile:
    """A file of the journal at one moment."""

    segment: str
    """Its name without ``.jsonl`` and ``.open``, which stays when the file is closed."""
    closed: bool
    size: int


@dataclass(frozen=True, slots=True)
class LineRange:
    """Lines that begin from ``start`` on and before ``stop``."""

    segment: str
    first: int
    """The byte where a line begins at the latest before ``start``; the same as ``start`` if one begins there."""
    start: int
    stop: int
    end: int
    """The last line ends here at the latest."""


def files(folder: Path) -> list[JournalFile]:
    """Return all files in the order of writing."""
    while True:
        names = _names(folder)
        # A file that is renamed during the listing may be missed; a second listing shows it.
        if _names(folder) != names:
            continue
        found = {}
        for name in names:
            segment = name.removesuffix(ACTIVE).removesuffix(FINAL)
            try:
                found[segment] = JournalFile(segment, name.endswith(FINAL), (folder / name).stat().st_size)
            except FileNotFoundError:
                break
        else:
            return [found[segment] for segment in sorted(found)]


def _names(folder: Path) -> list[str]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise BadRequestError("journal", f"expected the folder of a journal, {folder}: {error.strerror}") from error
    return sorted(name for name in names if name.endswith((FINAL, ACTIVE)) and name != GAPS)


def open_file(folder: Path, segment: str) -> BinaryIO:
    """Open a file, closed or not; :class:`FileNotFoundError` when it is gone."""
    for ending in (FINAL, ACTIVE):
        try:
            return (folder / f"{segment}{ending}").open("rb")
        except FileNotFoundError:
            continue
    return (folder / f"{segment}{FINAL}").open("rb")


def complete_size(folder: Path, file: JournalFile, start: int) -> int:
    """Return the end of the last complete line, at least ``start``; the open file may end in a torn line."""
    if file.closed:
        return file.size
    with open_file(folder, file.segment) as data:
        end = file.size
        while end > start:
            begin = max(start, end - LOOK_BACK)
            data.seek(begin)
            found = data.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return start


def take_events(
    folder: Path, segment: str, start: int, stop: int, events: int, *, at_least_one: bool
) -> tuple[int, int]:
    """Return the end of the lines with at most so many events, and how many they have."""
    taken = 0
    with open_file(folder, segment) as data:
        data.seek(start)
        for line in data:
            count = count_events(line)
            if taken + count > events and not at_least_one:
                break
            taken += count
            start += len(line)
            at_least_one = False
            if start >= stop:
                break
    return min(start, stop), taken


def read_lines(folder: Path, piece: LineRange) -> Iterator[Placed]:
    """Read the lines of a piece; :class:`FileNotFoundError` when the file is gone."""
    with open_file(folder, piece.segment) as data:
        byte = piece.start
        if byte > piece.first:
            # A line that began in the previous range belongs to that one.
            data.seek(byte - 1)
            byte += len(data.readline(piece.end - byte + 1)) - 1
        else:
            data.seek(byte)
        while byte < piece.stop and (line := data.readline(piece.end - byte)):
            yield piece.segment, byte, line
            byte += len(line)


def split_lines(ranges: Iterable[tuple[str, int, int]], size: int) -> list[list[LineRange]]:
    """Cut byte ranges of files into groups of about ``size`` bytes, in order."""
    groups: list[list[LineRange]] = []
    room = 0
    for segment, first, end in ranges:
        start = first
        while start < end:
            if room <= 0:
                groups.append([])
                room = size
            stop = min(end, start + room)
            groups[-1].append(LineRange(segment, first, start, stop, end))
            room -= stop - start
            start = stop
    return groups


def events_dropped(folder: Path, first: str, behind: str | None) -> int:
    """Return how many events were in files from ``first`` to before ``behind``, as far as ``gaps.jsonl`` knows."""
    total = 0
    for gap in read_gaps(folder):
        segment = str(gap.get("segment", "")).removesuffix(FINAL)
        if segment >= first and (behind is None or segment < behind):
            total += int(gap.get("events", 0))
    return total
