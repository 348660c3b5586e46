"""Lines of the journal: a tenant's events, column by column; docs/journal.md is the format."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from mediator.mailboxes.events import Event, EventType
from mediator.ops.journal.segments import ACTIVE, Line, closed_segments, read_segment

COLUMNS = ("at", "what", "mailbox", "lane", "msg_id", "bytes", "created_at", "group")
LINE_EVENTS = 1000
"""Events of one line at most."""


def encode(
    events: Sequence[Event], *, instance: str, seqs: Iterator[int], after: int | None, mark: int | None
) -> tuple[bytes, int]:
    """Return whole lines and the last seq; ``after`` is the seq before the first, ``mark`` goes with the last line."""
    parts = list(_parts(events))
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


def _parts(events: Sequence[Event]) -> Iterator[tuple[str, Sequence[Sequence[Any]]]]:
    """Split events by tenant (nearly always one) and into lines."""
    if not events:
        yield "", ((),) * len(COLUMNS)
    for start in range(0, len(events), LINE_EVENTS):
        some = events[start : start + LINE_EVENTS]
        what, at, tenant, *others = zip(*some, strict=True)
        if tenant.count(tenant[0]) == len(some):
            yield tenant[0], (at, what, *others)
            continue
        for name in dict.fromkeys(tenant):
            what, at, _, *others = zip(*(event for event in some if event.tenant == name), strict=True)
            yield name, (at, what, *others)
