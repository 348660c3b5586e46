"""Lines of the journal: what a commit did to a tenant's mail, column by column; docs/journal.md is the format."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from mediator.mailboxes.events import Event
from mediator.segments import ACTIVE, Line, closed_segments, read_segment

COLUMNS = ("what", "mailbox", "lane", "msg_id", "bytes", "created_at", "group")


def encode(
    events: Sequence[Event], now: int, *, instance: str, seqs: Iterator[int], after: int | None, mark: int | None
) -> tuple[bytes, int]:
    """Return whole lines and the last seq; ``after`` is the seq before the first, ``mark`` goes with the last line."""
    parts = _parts(events, now)
    lines = []
    for index, ((at, tenant), columns) in enumerate(parts):
        seq = next(seqs)
        head: dict[str, Any] = {"instance": instance, "seq": seq, "after": after, "at": at, "tenant": tenant}
        if mark is not None and index == len(parts) - 1:
            head["mark"] = mark
        what, mailbox, lane, msg_id, size, created_at, group = columns
        head |= {
            "what": what,
            "mailbox": mailbox,
            "lane": lane,
            "msg_id": msg_id,
            "bytes": size,
            "created_at": created_at,
            "group": group,
        }
        lines.append(orjson.dumps(head, option=orjson.OPT_APPEND_NEWLINE))
        after = seq
    assert after is not None
    return b"".join(lines), after


def expand(line: Line) -> Iterator[dict[str, Any]]:
    """Return a line's events; instance, seq and position together name one for ever."""
    head = {name: line[name] for name in ("instance", "seq", "at", "tenant")}
    rows = zip(*(line[name] for name in COLUMNS), strict=True)
    for position, row in enumerate(rows):
        yield {**head, "position": position, **dict(zip(COLUMNS, row, strict=True))}


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """Return all events that a journal's folder holds, in order of its files; what came twice is there twice."""
    for path in (*closed_segments(folder), *sorted(folder.glob(f"*{ACTIVE}"))):
        for line in read_segment(path):
            yield from expand(line)


_Part = tuple[tuple[int, str], Iterable[Sequence[Any]]]


def _parts(events: Sequence[Event], now: int) -> list[_Part]:
    """Split by time and tenant; nearly always there is one of each."""
    if not events:
        return [((now, ""), ((),) * len(COLUMNS))]
    what, at, tenant, *rest = zip(*events, strict=True)
    if at.count(at[0]) == tenant.count(tenant[0]) == len(events):
        return [((at[0], tenant[0]), (what, *rest))]
    split: defaultdict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        split[event.at, event.tenant].append(event)
    return [part for some in split.values() for part in _parts(some, now)]
