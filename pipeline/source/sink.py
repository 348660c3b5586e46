"""The sink of the ``mq9`` data source: every row of a data frame becomes a message, exactly once (S1, S3)."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Self
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from mediator.errors import BadRequestError
from mediator.fields import has_controls, parse_words
from mediator.mailboxes.address import writable_address
from mediator.mailboxes.bounds import MAX_TAG, MAX_TAGS
from pipeline.source import hide_tracebacks
from pipeline.source.nats_client import BatchSender, InFlightMessage, SinkOptions
from pipeline.source.options import SINK, normalize_names

HEADERS = {
    "lane": "mq9-priority",
    "key": "mq9-key",
    "tags": "mq9-tags",
    "delay": "mq9-delay",
    "ttl": "mq9-ttl",
    "dedup_id": "mq9-dedup-id",
    "reply_to": "mq9-reply-to",
}
"""The header of each column that has one; ``mq9-send-at`` and the like have none and are given in ``headers``."""
PAYLOADS = ("payload", "value")
NUMBERS = ("delay", "ttl")
COLUMNS = ("address", *PAYLOADS, *HEADERS, "headers")
ROWS_AT_ONCE = 512
"""Rows turned into Python objects at a time."""
MAX_PREFIX = 256

_COLUMN_OF_HEADER = {**{header: column for column, header in HEADERS.items()}, "nats-msg-id": "dedup_id"}
_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_QUERY_OPTIONS = ("checkpointlocation", "queryname")
"""Options of a query that Spark also passes to the sink."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SinkMessage:
    """The message of one row. ``dedup_id`` is None where the row leaves it to the sink, and is not in ``headers``."""

    address: str
    payload: bytes
    headers: Mapping[str, str]
    dedup_id: str | None

    def digest(self) -> str:
        """Return 16 hexadecimal digits that tell different messages apart."""
        digest = blake2b(self.payload, digest_size=8)
        for name, value in self.headers.items():
            digest.update(f"\n{name}\n{value}".encode())
        return digest.hexdigest()

    def frame(self, dedup_id: str) -> bytes:
        """Return the message as one of a batch: its sizes, its headers, its payload (S8)."""
        lines = [f"{name}: {value}\r\n" for name, value in self.headers.items()]
        head = f"NATS/1.0\r\n{''.join(lines)}mq9-dedup-id: {dedup_id}\r\n\r\n".encode()
        return b"%d %d\r\n%b%b\r\n" % (len(head), len(head) + len(self.payload), head, self.payload)


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """The columns of a data frame to send; created in the driver, used in the tasks."""

    names: tuple[str, ...]
    address: str | None
    """The mailbox of all rows; None: each row has it in the column ``address``."""

    @classmethod
    def of(cls, schema: StructType, address: str | None) -> Self:
        """Check the columns before anything is sent; :class:`BadRequestError` names the one that is wrong."""
        names = schema.fieldNames()
        unknown = [name for name in names if name not in COLUMNS]
        if unknown:
            raise BadRequestError(unknown[0], f"not a column that can be sent, expected only {', '.join(COLUMNS)}")
        if len(set(names)) < len(names):
            raise BadRequestError("columns", "expected each name once")
        for field in schema.fields:
            _check_type(field.name, field.dataType)
        if sum(name in PAYLOADS for name in names) != 1:
            raise BadRequestError("payload", "expected one column of this name, or of the name value")
        if address is not None:
            writable_address(address, "address")
        elif "address" not in names:
            raise BadRequestError("address", "expected a column or an option of this name")
        return cls(tuple(names), address)

    def rows(self, batch: pa.RecordBatch) -> Iterator[Mapping[str, Any]]:
        """Return the rows of a batch, by column; ``None`` where a row has no value."""
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            values = [column.to_pylist() for column in batch.slice(start, ROWS_AT_ONCE).columns]
            for row in zip(*values, strict=True):
                yield dict(zip(self.names, row, strict=True))

    def message(self, row: Mapping[str, Any]) -> SinkMessage:
        """Read one row; :class:`BadRequestError` names the column and what is wrong with it.

        The service checks most values (lanes, durations, lengths). Refused here are values that would not arrive as
        they are.
        """
        address = self.address or row["address"]
        if address is None:
            raise BadRequestError("address", "expected one in every row, got null")
        payload = row[PAYLOADS[0]] if PAYLOADS[0] in row else row[PAYLOADS[1]]
        if isinstance(payload, str):
            payload = payload.encode()
        headers = _read_headers(row.get("headers"))
        dedup_id = None
        for column, header in HEADERS.items():
            value = row.get(column)
            if value is None:
                continue
            text = _header_value(column, _join_tags(value) if column == "tags" else str(value))
            if column == "dedup_id":
                dedup_id = text or None
            elif text:
                headers[header] = text
        return SinkMessage(_check_address(address), payload or b"", headers, dedup_id)


def _check_type(name: str, kind: DataType) -> None:
    match kind:
        case StringType():
            good = name != "headers"
        case BinaryType():
            good = name in PAYLOADS
        case ArrayType(elementType=StringType()):
            good = name == "tags"
        case MapType(keyType=StringType(), valueType=StringType()):
            good = name == "headers"
        case _:
            good = isinstance(kind, _INTEGERS) and name in NUMBERS
    if not good:
        expected = {
            **dict.fromkeys(PAYLOADS, "binary or string"),
            **dict.fromkeys(NUMBERS, "a whole number or string"),
            "tags": "array<string> or string",
            "headers": "map<string,string>",
        }
        raise BadRequestError(name, f"expected {expected.get(name, 'string')}, got {kind.simpleString()}")


@lru_cache(4096)
def _check_address(text: str) -> str:
    return writable_address(text, "address")


def _join_tags(value: str | Sequence[str | None]) -> str:
    if isinstance(value, str):
        return value
    return ",".join(parse_words([tag for tag in value if tag is not None], "tags", MAX_TAGS, MAX_TAG))


def _read_headers(value: Sequence[tuple[str, str | None]] | None) -> dict[str, str]:
    """Read the sender's own headers, pairs in Arrow; one without a value is left out."""
    headers: dict[str, str] = {}
    for name, text in value or ():
        column = _COLUMN_OF_HEADER.get(name.lower())
        if column is not None:
            raise BadRequestError("headers", f"{name} is given in the column {column}")
        if not name or has_controls(name) or not name.isascii() or any(char in name for char in ' :"(),/;<=>?@[\\]{}'):
            raise BadRequestError("headers", f"expected letters, digits and signs of a header name, got {name[:60]!r}")
        if text is not None:
            headers[name] = _header_value(f"headers: {name}", text)
    return headers


def _header_value(field: str, text: str) -> str:
    """Return a header's value if NATS transmits it unchanged."""
    if has_controls(text):
        raise BadRequestError(field, "expected text without control characters")
    if text != text.strip():
        raise BadRequestError(field, "expected no blanks around it, NATS does not carry them")
    return text


@dataclass(frozen=True, slots=True)
class Sent(WriterCommitMessage):
    """What the task of one partition sent; ``bytes`` are those of the payloads."""

    partition: int
    rows: int
    bytes: int


@hide_tracebacks
class MailboxWriter(DataSourceArrowWriter):
    """Sends the rows of a batch write."""

    def __init__(self, columns: SinkColumns, options: SinkOptions, write_id: str) -> None:
        self._columns = columns
        self._options = options
        self._write_id = write_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send one partition, in a task."""
        partition = _task().partitionId()
        return asyncio.run(send(iterator, self._columns, self._options, self._write_id, partition))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log how much was sent; all of it is stored already."""
        rows, size = total(messages)
        log.info("write %s: %d rows sent, %d bytes, from %d partitions", self._write_id, rows, size, len(messages))


@hide_tracebacks
class MailboxStreamWriter(DataSourceStreamArrowWriter):
    """Sends the rows of a stream; a repeated batch has the same dedup ids."""

    def __init__(self, columns: SinkColumns, options: SinkOptions, prefix: str | None) -> None:
        self._columns = columns
        self._options = options
        self._prefix = prefix

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send one partition, in a task."""
        task = _task()
        query = self._prefix or task.getLocalProperty("sql.streaming.queryId")
        batch = task.getLocalProperty("streaming.sql.batchId")
        assert query, "Spark tells each task of a stream the query"
        assert batch, "Spark tells each task of a stream the batch"
        return asyncio.run(send(iterator, self._columns, self._options, f"{query}-{batch}", task.partitionId()))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Log how much was sent; all of it is stored already."""
        rows, size = total(messages)
        log.info("batch %s: %d rows sent, %d bytes, from %d partitions", batchId, rows, size, len(messages))


def writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> MailboxWriter:
    """Make the writer of ``df.write.format("mq9").mode("append")``; BadRequestError names a wrong option or column."""
    columns, sink_options, prefix = _read_options(options, schema, overwrite)
    # Made once, in the driver, so that a repeated task makes the same ids.
    return MailboxWriter(columns, sink_options, prefix or uuid4().hex)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> MailboxStreamWriter:
    """Make the writer of ``df.writeStream.format("mq9")``; BadRequestError names a wrong option or column."""
    own_options = {name: value for name, value in options.items() if name.lower() not in _QUERY_OPTIONS}
    return MailboxStreamWriter(*_read_options(own_options, schema, overwrite))


def _read_options(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> tuple[SinkColumns, SinkOptions, str | None]:
    """Return the columns, the options of the sender and the prefix of dedup ids."""
    if overwrite:
        raise BadRequestError("mode", "expected append: messages that were sent cannot be overwritten")
    options = normalize_names(options, SINK)
    addresses = {options[name] for name in ("address", "topic") if options.get(name)}
    if len(addresses) > 1:
        raise BadRequestError("address", "expected the same as in the option topic")
    columns = SinkColumns.of(schema, addresses.pop() if addresses else None)
    sink_options = SinkOptions.of(options)
    prefix = options.get("dedup.prefix") or None
    if prefix is not None and (
        len(prefix) > MAX_PREFIX or not (prefix.isascii() and prefix.isprintable()) or prefix != prefix.strip()
    ):
        raise BadRequestError("dedup.prefix", f"expected at most {MAX_PREFIX} ASCII characters, no blanks around them")
    return columns, sink_options, prefix


async def send(
    batches: Iterable[pa.RecordBatch], columns: SinkColumns, options: SinkOptions, prefix: str, partition: int
) -> Sent:
    """Send one partition's rows in their order, and return when each is confirmed.

    The dedup id of a row is ``{prefix}-{partition}-{row}-{digest}``, unless it brings its own. The digest is there for
    plans whose rows come in another order when a task is repeated: another row with the same number must not be taken
    for a duplicate (A8).
    """
    row = size = 0
    async with BatchSender(options, f"of partition {partition}") as sender:
        for batch in batches:
            for values in columns.rows(batch):
                try:
                    message = columns.message(values)
                except BadRequestError as error:
                    raise BadRequestError(f"row {row} of partition {partition}", str(error)) from None
                dedup_id = message.dedup_id or f"{prefix}-{partition}-{row}-{message.digest()}"
                await sender.send(InFlightMessage(row, message.address, message.frame(dedup_id)))
                size += len(message.payload)
                row += 1
            # The next batch may take long, and it blocks the event loop meanwhile.
            await sender.flush()
    return Sent(partition, row, size)


def total(messages: Iterable[WriterCommitMessage | None]) -> tuple[int, int]:
    """Return how many rows and bytes of payload the tasks of one write sent."""
    sent = [message for message in messages if isinstance(message, Sent)]
    return sum(message.rows for message in sent), sum(message.bytes for message in sent)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark writes in tasks"
    return task
