"""Journals as a service writes them, and what a lake has to hold of one, in plain Python."""

from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import orjson
from deltalake import DeltaTable

from mediator.journal.segments import Line, encode, expand
from mediator.mailboxes.events import Event, EventType
from pipeline.source.schema import EVENTS

START = 1_767_225_600_000
DAY = 86_400_000
Row = tuple[Any, ...]


def event(number: int, at: int = START, **other: Any) -> Event:
    """Return an event that differs from those with other numbers."""
    return Event(EventType.STORED, at + number, "default", 7, 2, number, 256, at + number)._replace(**other)


def line(seq: int, events: Sequence[Event], instance: str = "host-1") -> bytes:
    """Return a line of the journal."""
    return encode(events, instance=instance, seqs=iter([seq]), after=None, mark=None)[0]


def write(journal: Path, number: int, lines: Iterable[bytes], instance: str = "host-1") -> Path:
    """Write a closed file."""
    journal.mkdir(parents=True, exist_ok=True)
    path = journal / f"{number:020d}-{instance}.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def fill(journal: Path, files: int, lines: int = 20, events: int = 5, first: int = 1) -> int:
    """Write closed files with what differs from line to line; return how many events."""
    seqs = count(first)
    for _ in range(files):
        start = next(seqs)
        numbers = [start, *(next(seqs) for _ in range(lines - 1))]
        write(journal, start, (line(seq, [event(seq * events + at) for at in range(events)]) for seq in numbers))
    return files * lines * events


def row(told: Line) -> Row:
    """Return the lake's row of an event that :func:`mediator.journal.segments.expand` made, times in milliseconds."""
    return (*(told[name] for name in EVENTS.names if name not in ("date", "created_at")), told["created_at"] or None)


def expected(lines: Iterable[bytes]) -> set[Row]:
    """Return the rows of good lines."""
    return {row(told) for each in lines for told in expand(orjson.loads(each))}


def held(lake: Path) -> list[Row]:
    """Return the rows that any reader finds in a lake's events, without Spark."""
    found = []
    for told in DeltaTable(lake / "events").to_pyarrow_table().to_pylist():
        at, created = told["at"], told["created_at"]
        assert told["date"] == at.date()
        times = {"at": _milliseconds(at), "created_at": created and _milliseconds(created)}
        found.append(row(told | times))
    return found


def _milliseconds(moment: Any) -> int:
    return round(moment.timestamp() * 1000)
