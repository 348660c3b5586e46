"""Streams the journal: each event once, in the order of writing, also across restarts of the query.

docs/journal.md describes the files and their lines. The driver measures the files, the tasks read them.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError, DamagedError
from mediator.journal.segments import ACTIVE, COLUMNS, FINAL, GAPS, Line, read_gaps
from pipeline.source import hide_tracebacks
from pipeline.source.options import (
    EARLIEST,
    JOURNAL_STREAM,
    LATEST,
    Offset,
    StreamOptions,
    max_rows,
    normalize_names,
    one_of,
)
from pipeline.source.schema import EVENTS, MAX_SEQ, MAX_TIME, VERSION
from pipeline.source.side import who_looked

PARTITION_BYTES = 8 << 20
"""Bytes of the journal that one task reads, about 170 000 events."""
BATCH_EVENTS = 16_384
"""Approximate events of an Arrow batch; lines are not split."""
LOOK_BACK = 1 << 16
"""Bytes read at a time when searching backwards for the last complete line."""

_MINIMUM = {"at": 0, "what": 0, "lane": -1, "msg_id": -1, "bytes": 0, "created_at": 0}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JournalFile:
    """A file of the journal at one moment."""

    segment: str
    """Its name without ``.jsonl`` and ``.open``, which stays when the file is closed."""
    closed: bool
    size: int


@dataclass(frozen=True, slots=True)
class JournalOffset:
    """A position: all earlier files are read, and this one up to a byte. An empty name: before all files."""

    segment: str = ""
    byte: int = 0
    holes: int = 0
    """How often the next file was missing."""
    events: int = 0
    """Events in missing files, at most and as far as ``gaps.jsonl`` knows."""

    @classmethod
    def of(cls, offset: Offset) -> "JournalOffset":
        """Read an offset; :class:`BadRequestError` if it is not one of the journal."""
        lost = offset.get("lost", {})
        segment, byte = offset.get("segment"), offset.get("byte")
        if not isinstance(segment, str) or type(byte) is not int or byte < 0 or not isinstance(lost, dict):
            raise BadRequestError("startingOffsets", f'expected {{"segment": NAME, "byte": N}}, got {offset!r:.200}')
        return cls(segment, byte, lost.get("holes", 0), lost.get("events", 0))

    @property
    def offset(self) -> Offset:
        """The offset as JSON."""
        offset: Offset = {"segment": self.segment, "byte": self.byte}
        if self.holes:
            offset["lost"] = {"holes": self.holes, "events": self.events}
        return offset


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


@dataclass(frozen=True, slots=True)
class JournalPartition(InputPartition):
    """The lines that one task reads."""

    ranges: tuple[LineRange, ...]


JournalLine = tuple[str, int, bytes]
"""File, byte and content of a line."""


@hide_tracebacks
class JournalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The journal in a folder.

    An offset is one position in the order of writing, and closed files do not change, so a repeated batch has the same
    rows. A file that is still open may lose lines that were already read when the machine loses power, and they are
    written again; consumers tell events apart by instance, seq and position.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """:class:`BadRequestError` names a wrong option or column."""
        types = {field.name: field.dataType for field in EVENTS}
        for field in schema:
            if types.get(field.name) != field.dataType:
                known = types[field.name].simpleString() if field.name in types else f"one of {', '.join(types)}"
                raise BadRequestError(f"schema: {field.name}", f"expected {known}, got {field.dataType.simpleString()}")
        options = normalize_names(options, JOURNAL_STREAM)
        self._folder = Path(options["journal"])
        self._schema = schema
        self._stream_options = StreamOptions.of(options, EARLIEST)
        self._skip_bad = one_of(options, "badLines", ("fail", "skip")) == "skip"
        self._until: JournalOffset | None = None
        """Where a run with the trigger ``availableNow`` ends."""

    def initialOffset(self) -> Offset:
        """Return where a query without a checkpoint begins."""
        files = list_files(self._folder)
        match self._stream_options.starting:
            case str(word) if word == LATEST:
                return self._advance(files, JournalOffset(), None).offset
            case str(word):
                assert word == EARLIEST
                return (JournalOffset(files[0].segment) if files and files[0].size else JournalOffset()).offset
            case offset:
                position = JournalOffset.of(offset)
                self._check_begins_line(position)
                return position.offset

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the maximum number of events of one batch."""
        return self._stream_options.limit

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the end of the next batch: after the limit's events, but at least one line; :class:`LostDataError`."""
        files = list_files(self._folder)
        return self._advance(files, self._resume(files, JournalOffset.of(start)), max_rows(limit)).offset

    def reportLatestOffset(self) -> Offset:
        """Return where the journal ends now."""
        return self._advance(list_files(self._folder), JournalOffset(), None).offset

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the current end of the journal."""
        self._until = self._advance(list_files(self._folder), JournalOffset(), None)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Split a batch among tasks; :class:`LostDataError` if some of it is missing."""
        first, last = JournalOffset.of(start), JournalOffset.of(end)
        if (first.segment, first.byte) == (last.segment, last.byte):
            return []
        files = list_files(self._folder)
        segments = {file.segment for file in files}
        for position in (first, last):
            known = not position.segment or position.segment in segments or last.holes > first.holes
            if not known and not _was_empty(files, position):
                self._stream_options.report_lost(
                    f"{position.segment} is gone, and what it and files behind it had to read"
                )
        ranges = []
        for file in files:
            if first.segment <= file.segment <= last.segment:
                begin = first.byte if file.segment == first.segment else 0
                stop = last.byte if file.segment == last.segment else file.size
                if stop > file.size:
                    self._stream_options.report_lost(
                        f"{file.segment} ends at byte {file.size}, before the {stop} that it had"
                    )
                ranges.append((file.segment, begin, min(stop, file.size)))
        return [JournalPartition(tuple(group)) for group in split_lines(ranges, PARTITION_BYTES)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of a partition, in a task."""
        assert isinstance(partition, JournalPartition)
        return to_batches(self._lines(partition), self._schema, skip_bad=self._skip_bad)

    def _lines(self, partition: JournalPartition) -> Iterator[JournalLine]:
        for lines in partition.ranges:
            try:
                yield from read_lines(self._folder, lines)
            except FileNotFoundError:
                self._stream_options.report_lost(f"{lines.segment} went while it was read")

    def _resume(self, files: list[JournalFile], position: JournalOffset) -> JournalOffset:
        """Return where to continue: at the same position, or after missing files."""
        if not position.segment or any(file.segment == position.segment for file in files):
            return position
        if _was_empty(files, position):
            return position
        following = next((file.segment for file in files if file.segment > position.segment), None)
        events = _count_dropped_events(self._folder, position.segment, following)
        self._stream_options.report_lost(
            f"{position.segment} is gone, which was read up to byte {position.byte}; it and files behind it that are"
            f" gone had {events} events, as far as gaps.jsonl tells"
        )
        return JournalOffset(following or "", 0, position.holes + 1, position.events + events)

    def _advance(self, files: list[JournalFile], position: JournalOffset, max_events: int | None) -> JournalOffset:
        """Return the position after at most so many events; a file is done when it is closed and read to its end."""
        until, some = self._until, False
        for file in files:
            if file.segment < position.segment or (until is not None and file.segment > until.segment):
                continue
            start = position.byte if file.segment == position.segment else 0
            try:
                end = _complete_size(self._folder, file, start)
                if until is not None and file.segment == until.segment:
                    end = min(end, until.byte)
                stop = max(start, end)
                if max_events is not None and start < end:
                    stop, count = _limit_events(
                        self._folder, file.segment, start, end, max_events, at_least_one=not some
                    )
                    max_events, some = max_events - count, True
            except FileNotFoundError:
                # Dropped a moment ago; the next call finds it missing.
                break
            if stop or position.segment:
                position = JournalOffset(file.segment, stop, position.holes, position.events)
            if stop < end or not file.closed:
                break
        return position

    def _check_begins_line(self, position: JournalOffset) -> None:
        if not position.byte:
            return
        try:
            with _open_file(self._folder, position.segment) as data:
                data.seek(position.byte - 1)
                good = data.read(1) == b"\n"
        except FileNotFoundError:
            return
        if not good:
            raise BadRequestError("startingOffsets", f"no line of {position.segment} begins at byte {position.byte}")


def _was_empty(files: list[JournalFile], position: JournalOffset) -> bool:
    """Whether a file is missing because nothing was written to it: then it is removed instead of closed.

    Files with lines are dropped when there is no more room, the oldest first.
    """
    return not position.byte and any(file.segment < position.segment for file in files)


def list_files(folder: Path) -> list[JournalFile]:
    """Return all files in the order of writing."""
    while True:
        names = _list_names(folder)
        # A file that is renamed during the listing may be missed; a second listing shows it.
        if _list_names(folder) != names:
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


def _list_names(folder: Path) -> list[str]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        reason = f"expected the folder of a journal, {folder}: {error.strerror}{who_looked()}"
        raise BadRequestError("journal", reason) from error
    return sorted(name for name in names if name.endswith((FINAL, ACTIVE)) and name != GAPS)


def _open_file(folder: Path, segment: str) -> BinaryIO:
    """Open a file, closed or not; :class:`FileNotFoundError` when it is missing."""
    for ending in (FINAL, ACTIVE):
        try:
            return (folder / f"{segment}{ending}").open("rb")
        except FileNotFoundError:
            continue
    # It was closed, and so renamed, in between.
    return (folder / f"{segment}{FINAL}").open("rb")


def _complete_size(folder: Path, file: JournalFile, start: int) -> int:
    """Return the end of the last complete line, at least ``start``; the open file may end in a torn line."""
    if file.closed:
        return file.size
    with _open_file(folder, file.segment) as data:
        end = file.size
        while end > start:
            begin = max(start, end - LOOK_BACK)
            data.seek(begin)
            found = data.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return start


def _limit_events(
    folder: Path, segment: str, start: int, stop: int, max_events: int, *, at_least_one: bool
) -> tuple[int, int]:
    """Return the end of the lines with at most so many events, and how many they have."""
    total = 0
    with _open_file(folder, segment) as data:
        data.seek(start)
        for line in data:
            try:
                count = len(_parse_line(line)["what"])
            except ValueError:
                # Invalid lines count as well, so that a batch of them is limited too.
                count = 1
            if total + count > max_events and not at_least_one:
                break
            total += count
            start += len(line)
            at_least_one = False
            if start >= stop:
                break
    return min(start, stop), total


def read_lines(folder: Path, lines: LineRange) -> Iterator[JournalLine]:
    """Read the lines of a range; :class:`FileNotFoundError` when the file is missing."""
    with _open_file(folder, lines.segment) as data:
        byte = lines.start
        if byte > lines.first:
            # A line that began in the previous range belongs to that one.
            data.seek(byte - 1)
            byte += len(data.readline(lines.end - byte + 1)) - 1
        else:
            data.seek(byte)
        while byte < lines.stop and (line := data.readline(lines.end - byte)):
            yield lines.segment, byte, line
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


def _count_dropped_events(folder: Path, first: str, before: str | None) -> int:
    """Return the events of dropped files from ``first`` on and before ``before``, as far as ``gaps.jsonl`` knows."""
    total = 0
    for gap in read_gaps(folder):
        segment = str(gap.get("segment", "")).removesuffix(FINAL)
        if segment >= first and (before is None or segment < before):
            total += int(gap.get("events", 0))
    return total


def to_batches(lines: Iterable[JournalLine], schema: StructType, *, skip_bad: bool) -> Iterator[pa.RecordBatch]:
    """Yield the events of lines, in order, with the columns of ``schema``.

    An invalid line raises :class:`DamagedError` with its file and byte, or is logged and skipped.
    """
    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    parsed: list[tuple[JournalLine, Line]] = []
    events = 0
    for journal_line in lines:
        try:
            line = _parse_line(journal_line[2])
        except ValueError as error:
            _reject(journal_line, str(error), skip_bad)
            continue
        if line["what"]:
            parsed.append((journal_line, line))
            events += len(line["what"])
        if events >= BATCH_EVENTS:
            yield from _build_batches(parsed, arrow_schema, skip_bad)
            parsed, events = [], 0
    if events:
        yield from _build_batches(parsed, arrow_schema, skip_bad)


def _parse_line(data: bytes) -> Line:
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


def _build_batches(
    lines: list[tuple[JournalLine, Line]], schema: pa.Schema, skip_bad: bool
) -> Iterator[pa.RecordBatch]:
    """Build one batch; if a value does not fit, build the valid lines one by one."""
    try:
        yield _build_batch([line for _, line in lines], schema)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        if len(lines) == 1:
            _reject(lines[0][0], str(error), skip_bad)
            return
        for one in lines:
            yield from _build_batches([one], schema, skip_bad)


def _build_batch(lines: list[Line], schema: pa.Schema) -> pa.RecordBatch:
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
    return pa.RecordBatch.from_arrays([events[name] for name in schema.names], schema=schema)


def _numbers(name: str, values: list[Any]) -> pa.Array:
    if not set(map(type, values)) <= {int}:
        raise TypeError(f"{name}: expected whole numbers")
    numbers = pa.array(values, pa.int8() if name in {"what", "lane"} else pa.int64())
    span = pc.min_max(numbers).as_py()
    if span["min"] < _MINIMUM.get(name, span["min"]) or (name in {"at", "created_at"} and span["max"] > MAX_TIME):
        raise TypeError(f"{name}: out of range")
    return numbers


def _reject(line: JournalLine, problem: str, skip_bad: bool) -> None:
    file, byte, _ = line
    text = f"{file}, byte {byte}: {problem}"
    if not skip_bad:
        raise DamagedError(f"a line of the journal cannot be read: {text}; badLines=skip leaves it out")
    log.warning("skipped an invalid line of the journal: %s", text)
