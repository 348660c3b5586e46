"""Streams the journal: each event once, in the order of writing, also across restarts of the query."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError
from pipeline.source.journal_files import (
    JournalFile,
    LineRange,
    complete_size,
    events_dropped,
    files,
    open_file,
    read_lines,
    split_lines,
    take_events,
)
from pipeline.source.journal_rows import Placed, batches, check_columns
from pipeline.source.options import JOURNAL_STREAM, normalize_names
from pipeline.source.stream_options import EARLIEST, LATEST, Offset, StreamOptions, max_rows, one_of
from pipeline.source.tracebacks import hide_tracebacks

PARTITION_BYTES = 8 << 20
"""Bytes of the journal that one task reads, about 170 000 events."""


@dataclass(frozen=True, slots=True)
class JournalOffset:
    """A position: all earlier files are read, and this one up to a byte. No name: before all files."""

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
class JournalPartition(InputPartition):
    """The lines that one task reads."""

    pieces: tuple[LineRange, ...]


@hide_tracebacks
class JournalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The journal in a folder, as Spark asks for it; tasks open the files, the driver only measures them.

    An offset is one place in the order of writing, and closed files do not change, so a batch that is run again has
    the same rows. A file that is still open may lose lines it has shown when the machine loses power, which come
    again; consumers tell events apart by instance, seq and position.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """:class:`BadRequestError` names a wrong option or column."""
        check_columns(schema)
        given = normalize_names(options, JOURNAL_STREAM)
        self._folder = Path(given["journal"])
        self._schema = schema
        self._following = StreamOptions.of(given, EARLIEST)
        self._skip_bad = one_of(given, "badLines", ("fail", "skip")) == "skip"
        self._until: JournalOffset | None = None

    def initialOffset(self) -> Offset:
        """Return where a query without a checkpoint begins."""
        found = files(self._folder)
        match self._following.starting:
            case str(word) if word == LATEST:
                return self._walk(found, JournalOffset(), None).offset
            case str(word):
                assert word == EARLIEST
                return (JournalOffset(found[0].segment) if found and found[0].size else JournalOffset()).offset
            case given:
                place = JournalOffset.of(given)
                self._check_begins_line(place)
                return place.offset

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the events of one batch."""
        return self._following.limit

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return where the next batch ends: behind so many events, a line at least; :class:`LostDataError`."""
        found = files(self._folder)
        return self._walk(found, self._resume(found, JournalOffset.of(start)), max_rows(limit)).offset

    def reportLatestOffset(self) -> Offset:
        """Return where the journal ends now."""
        return self._walk(files(self._folder), JournalOffset(), None).offset

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the current end of the journal."""
        self._until = self._walk(files(self._folder), JournalOffset(), None)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Split a batch among tasks; :class:`LostDataError` if some of it is missing."""
        first, last = JournalOffset.of(start), JournalOffset.of(end)
        if (first.segment, first.byte) == (last.segment, last.byte):
            return []
        found = files(self._folder)
        there = {file.segment for file in found}
        for place in (first, last):
            known = not place.segment or place.segment in there or last.holes > first.holes
            if not known and not self._was_empty(found, place):
                self._following.report_lost(f"{place.segment} is gone, and what it and files behind it had to read")
        ranges = []
        for file in found:
            if first.segment <= file.segment <= last.segment:
                begin = first.byte if file.segment == first.segment else 0
                stop = last.byte if file.segment == last.segment else file.size
                if stop > file.size:
                    self._following.report_lost(
                        f"{file.segment} ends at byte {file.size}, before the {stop} that it had"
                    )
                ranges.append((file.segment, begin, min(stop, file.size)))
        return [JournalPartition(tuple(group)) for group in split_lines(ranges, PARTITION_BYTES)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one share, in a task."""
        assert isinstance(partition, JournalPartition)
        return batches(self._lines(partition), self._schema, skip_bad=self._skip_bad)

    def _lines(self, share: JournalPartition) -> Iterator[Placed]:
        for piece in share.pieces:
            try:
                yield from read_lines(self._folder, piece)
            except FileNotFoundError:
                self._following.report_lost(f"{piece.segment} went while it was read")

    def _resume(self, found: list[JournalFile], place: JournalOffset) -> JournalOffset:
        """Return where to continue: at the same position, or after missing files."""
        if not place.segment or any(file.segment == place.segment for file in found):
            return place
        if self._was_empty(found, place):
            return place
        following = next((file.segment for file in found if file.segment > place.segment), None)
        events = events_dropped(self._folder, place.segment, following)
        self._following.report_lost(
            f"{place.segment} is gone, which was read up to byte {place.byte}; it and files behind it that are gone"
            f" had {events} events, as far as gaps.jsonl tells"
        )
        return JournalOffset(following or "", 0, place.holes + 1, place.events + events)

    @staticmethod
    def _was_empty(found: list[JournalFile], place: JournalOffset) -> bool:
        """Whether a file is gone because nothing was written into it: then it is removed when it would be closed.

        Those with lines go when there is no more room, and the oldest first.
        """
        return not place.byte and any(file.segment < place.segment for file in found)

    def _walk(self, found: list[JournalFile], place: JournalOffset, most: int | None) -> JournalOffset:
        """Return the place behind at most so many events; a file counts as done when it is closed and read."""
        until, some = self._until, False
        for file in found:
            if file.segment < place.segment or (until is not None and file.segment > until.segment):
                continue
            start = place.byte if file.segment == place.segment else 0
            try:
                end = complete_size(self._folder, file, start)
                if until is not None and file.segment == until.segment:
                    end = min(end, until.byte)
                stop = max(start, end)
                if most is not None and start < end:
                    stop, taken = take_events(self._folder, file.segment, start, end, most, at_least_one=not some)
                    most, some = most - taken, True
            except FileNotFoundError:
                # Dropped a moment ago; the next look finds it gone.
                break
            if stop or place.segment:
                place = JournalOffset(file.segment, stop, place.holes, place.events)
            if stop < end or not file.closed:
                break
        return place

    def _check_begins_line(self, place: JournalOffset) -> None:
        if not place.byte:
            return
        try:
            with open_file(self._folder, place.segment) as data:
                data.seek(place.byte - 1)
                good = data.read(1) == b"\n"
        except FileNotFoundError:
            return
        if not good:
            raise BadRequestError("startingOffsets", f"no line of {place.segment} begins at byte {place.byte}")
