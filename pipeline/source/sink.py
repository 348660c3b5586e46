"""The sink of the ``mq9`` data source: every row becomes a message, exactly once (S1, S3)."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError
from pipeline.source.batch_sender import BatchSender, SinkOptions
from pipeline.source.messages import SinkColumns
from pipeline.source.options import SINK, normalize_names
from pipeline.source.tracebacks import hide_tracebacks

MAX_PREFIX = 256
_QUERY = ("checkpointlocation", "queryname")
"""Options of a query that Spark also passes to the sink."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sent(WriterCommitMessage):
    """What the task of one partition sent; ``bytes`` are those of the payloads."""

    partition: int
    rows: int
    bytes: int


def writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> "MailboxWriter":
    """Make the writer of ``df.write.format("mq9").mode("append")``; BadRequestError names a wrong option or column."""
    _only_append(overwrite)
    options = normalize_names(options, SINK)
    # Made once, in the driver, so that a task that is tried again makes the same ids.
    return MailboxWriter(_columns(options, schema), SinkOptions.of(options), _prefix(options) or uuid4().hex)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> "MailboxStreamWriter":
    """Make the writer of ``df.writeStream.format("mq9")``; BadRequestError names a wrong option or column."""
    _only_append(overwrite)
    options = normalize_names({name: value for name, value in options.items() if name.lower() not in _QUERY}, SINK)
    return MailboxStreamWriter(_columns(options, schema), SinkOptions.of(options), _prefix(options))


@hide_tracebacks
class MailboxWriter(DataSourceArrowWriter):
    """Sends the rows of a batch write."""

    def __init__(self, columns: SinkColumns, target: SinkOptions, write_id: str) -> None:
        self._columns = columns
        self._target = target
        self._write_id = write_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send one partition, in a task."""
        partition = _task().partitionId()
        return asyncio.run(send(iterator, self._columns, self._target, self._write_id, partition))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log how much was sent; all of it is stored already."""
        _log_sent("write", self._write_id, messages)


@hide_tracebacks
class MailboxStreamWriter(DataSourceStreamArrowWriter):
    """Sends the rows of a stream; a repeated batch makes the same ids."""

    def __init__(self, columns: SinkColumns, target: SinkOptions, prefix: str | None) -> None:
        self._columns = columns
        self._target = target
        self._prefix = prefix

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send one partition, in a task."""
        task = _task()
        query = self._prefix or task.getLocalProperty("sql.streaming.queryId")
        batch = task.getLocalProperty("streaming.sql.batchId")
        assert query, "Spark tells each task of a stream the query"
        assert batch, "Spark tells each task of a stream the batch"
        return asyncio.run(send(iterator, self._columns, self._target, f"{query}-{batch}", task.partitionId()))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Log how much was sent; all of it is stored already."""
        _log_sent("batch", str(batchId), messages)


async def send(
    batches: Iterable[pa.RecordBatch], columns: SinkColumns, target: SinkOptions, prefix: str, partition: int
) -> Sent:
    """Send one partition's rows in their order, and return when each has its receipt.

    A row is known to the service as ``{prefix}-{partition}-{row}-{digest}``, unless it brings a dedup id. The digest
    is there for plans whose rows come in another order when a task is tried again: the row that stands in the place
    of another must not be taken for it (A8).
    """
    row = size = 0
    async with BatchSender(target, f"of partition {partition}") as sender:
        for batch in batches:
            for values in columns.rows(batch):
                try:
                    message = columns.message(values)
                except BadRequestError as error:
                    raise BadRequestError(f"row {row} of partition {partition}", str(error)) from None
                dedup_id = message.dedup_id or f"{prefix}-{partition}-{row}-{message.digest()}"
                await sender.send(row, message, dedup_id)
                size += len(message.payload)
                row += 1
            # The next batch may be long in coming, and the loop stands still meanwhile.
            await sender.settle()
    return Sent(partition, row, size)


def total(messages: Iterable[WriterCommitMessage | None]) -> tuple[int, int]:
    """Return how many rows and bytes of payload the tasks of one write sent."""
    sent = [message for message in messages if isinstance(message, Sent)]
    return sum(message.rows for message in sent), sum(message.bytes for message in sent)


def _log_sent(what: str, name: str, messages: list[WriterCommitMessage | None]) -> None:
    rows, size = total(messages)
    log.info("%s %s: %d rows sent, %d bytes, from %d partitions", what, name, rows, size, len(messages))


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark writes in tasks"
    return task


def _only_append(overwrite: bool) -> None:
    if overwrite:
        raise BadRequestError("mode", "expected append: messages that were sent cannot be overwritten")


def _columns(options: Mapping[str, str], schema: StructType) -> SinkColumns:
    named = {options[name] for name in ("address", "topic") if options.get(name)}
    if len(named) > 1:
        raise BadRequestError("address", "expected the same as in the option topic")
    return SinkColumns.of(schema, named.pop() if named else None)


def _prefix(options: Mapping[str, str]) -> str | None:
    prefix = options.get("dedup.prefix")
    if not prefix:
        return None
    if len(prefix) > MAX_PREFIX or not (prefix.isascii() and prefix.isprintable()) or prefix != prefix.strip():
        raise BadRequestError("dedup.prefix", f"expected at most {MAX_PREFIX} ASCII characters, no blanks around them")
    return prefix
