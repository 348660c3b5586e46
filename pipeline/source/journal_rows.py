"""Turns lines of the journal into Arrow batches of events; docs/journal.md is their format."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError, DamagedError
from mediator.ops.journal.lines import COLUMNS
from mediator.ops.journal.segments import Line
from pipeline.journal_schema import EVENTS, MAX_SEQ, MAX_TIME, VERSION

BATCH_EVENTS = 16_384
"""Approximate events of an Arrow batch; lines are not split."""

_LOWEST = {"at": 0, "what": 0, "lane": -1, "msg_id": -1, "bytes": 0, "created_at": 0}

Placed = tuple[str, int, bytes]
"""File, byte and content of a line."""

log = logging.getLogger(__name__)


def check_columns(schema: StructType) -> None:
    """Raise :class:`BadRequestError` for columns that events do not have, or with another type."""
    kinds = {field.name: field.dataType for field in EVENTS}
    for field in schema:
        if kinds.get(field.name) != field.dataType:
            expected = kinds[field.name].simpleString() if field.name in kinds else f"one of {', '.join(kinds)}"
            raise BadRequestError(f"schema: {field.name}", f"expected {expected}, got {field.dataType.simpleString()}")


def batches(lines: Iterable[Placed], schema: StructType, *, skip_bad: bool) -> Iterator[pa.RecordBatch]:
    """Return the events of lines, in order, with the columns of ``schema``.

    An invalid line raises :class:`DamagedError` with its file and byte, or is logged and skipped.
    """
    shape = to_arrow_schema(schema, timezone="UTC")
    waiting: list[tuple[Placed, Line]] = []
    events = 0
    for placed in lines:
        try:
            line = _parse(placed[2])
        except ValueError as error:
            _refuse(placed, str(error), skip_bad)
            continue
        if line["what"]:
            waiting.append((placed, line))
            events += len(line["what"])
        if events >= BATCH_EVENTS:
            yield from _columns(waiting, shape, skip_bad)
            waiting, events = [], 0
    if events:
        yield from _columns(waiting, shape, skip_bad)


def count_events(line: bytes) -> int:
    """Return the number of events of a line; 1 for an invalid one, so that those count against limits too."""
    try:
        return len(_parse(line)["what"])
    except ValueError:
        return 1


def _parse(data: bytes) -> Line:
    """Read a line as far as its columns; :class:`ValueError` says what is wrong."""
    if not data.endswith(b"\n"):
        raise ValueError("cut off")
    line = orjson.loads(data)
    if not isinstance(line, dict):
        raise ValueError("expected an object")
    for name, kind in (("instance", str), ("seq", int), ("tenant", str), *((name, list) for name in COLUMNS)):
        if type(line.get(name)) is not kind:
            raise ValueError(f"{name}: expected {kind.__name__}")
    if line.get("version", VERSION) != VERSION:
        raise ValueError("of another version")
    if not 0 <= line["seq"] <= MAX_SEQ:
        raise ValueError("seq: out of range")
    if len({len(line[name]) for name in COLUMNS}) > 1:
        raise ValueError("columns of different lengths")
    return line


def _columns(placed: list[tuple[Placed, Line]], shape: pa.Schema, skip_bad: bool) -> Iterator[pa.RecordBatch]:
    """Build one batch; if a value does not fit, build the valid lines one by one."""
    try:
        yield _batch([line for _, line in placed], shape)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        if len(placed) == 1:
            _refuse(placed[0][0], str(error), skip_bad)
            return
        for one in placed:
            yield from _columns([one], shape, skip_bad)


def _batch(lines: list[Line], shape: pa.Schema) -> pa.RecordBatch:
    """Build all columns, also unselected ones: whether a line is valid must not depend on the selection."""
    counts = [len(line["what"]) for line in lines]
    events: dict[str, pa.Array] = {
        name: _numbers(name, [value for line in lines for value in line[name]]) for name in COLUMNS
    }
    for name in ("instance", "seq", "tenant"):
        values = [line[name] for line, count in zip(lines, counts, strict=True) for _ in range(count)]
        events[name] = pa.array(values, pa.int64() if name == "seq" else pa.string())
    events["position"] = pa.array([position for count in counts for position in range(count)], pa.int32())
    for name in ("at", "created_at"):
        times = events[name].cast(pa.timestamp("ms", tz="UTC"))
        if name == "created_at":
            times = pc.if_else(pc.equal(events[name], 0), None, times)
        events[name] = times.cast(pa.timestamp("us", tz="UTC"))
    events["date"] = events["at"].cast(pa.timestamp("us")).cast(pa.date32())
    return pa.RecordBatch.from_arrays([events[name] for name in shape.names], schema=shape)


def _numbers(name: str, values: list[Any]) -> pa.Array:
    if not set(map(type, values)) <= {int}:
        raise TypeError(f"{name}: expected whole numbers")
    numbers = pa.array(values, pa.int8() if name in {"what", "lane"} else pa.int64())
    span = pc.min_max(numbers).as_py()
    if span["min"] < _LOWEST.get(name, span["min"]) or (name in {"at", "created_at"} and span["max"] > MAX_TIME):
        raise TypeError(f"{name}: out of range")
    return numbers


def _refuse(placed: Placed, problem: str, skip_bad: bool) -> None:
    file, byte, _ = placed
    text = f"{file}, byte {byte}: {problem}"
    if not skip_bad:
        raise DamagedError(f"a line of the journal cannot be read: {text}; badLines=skip leaves it out")
    log.warning("a line of the journal is left out: %s", text)
