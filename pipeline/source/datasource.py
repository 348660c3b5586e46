"""``mq9`` as a Spark data source: mailboxes as frames, mailboxes and the journal as streams, rows as mail."""

from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError
from pipeline.source import hide_tracebacks
from pipeline.source.options import READ, parse, split_words
from pipeline.source.schema import EVENTS, MESSAGES, check_schema

FORMAT = "mq9"


@hide_tracebacks
class MailDataSource(DataSource):
    """The entry points that Spark calls; each imports its module, whose libraries only it needs."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``spark.read.format``."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of a message (fewer with ``group``), or of an event with ``journal``."""
        if self.options.get("journal"):
            return EVENTS
        if self.options.get("group"):
            from pipeline.source.groups import columns

            return columns(split_words(self.options, "columns"), "columns")
        return StructType([MESSAGES[name] for name in parse(self.options, READ).columns])

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader of mailboxes."""
        if self.options.get("group"):
            why = "a batch read cannot acknowledge messages; use readStream with trigger(availableNow=True)"
            raise BadRequestError("group", why)
        from pipeline.source.mailboxes import BatchOffsets, MailboxReader

        return MailboxReader(parse(self.options), check_schema(schema), BatchOffsets.of(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Follow mailboxes, the journal, or a mailbox as a consumer group."""
        return stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Send the rows of a frame as messages."""
        from pipeline.source.sink import writer

        return writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Send the rows of a stream as messages, each once."""
        from pipeline.source.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)


def stream_reader(options: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """Make the reader of ``readStream.format("mq9")``; :class:`BadRequestError` names a wrong option.

    With ``group`` it reads as that consumer group, with ``journal`` it follows the journal in that folder.
    """
    if options.get("group"):
        from pipeline.source.groups import GroupStream

        return GroupStream(options, schema)
    if options.get("journal"):
        from pipeline.source.journal import JournalStream

        return JournalStream(options, schema)
    from pipeline.source.mailboxes import MailboxStream

    return MailboxStream(options, schema)


def register(spark: SparkSession) -> None:
    """Register the format ``mq9`` with ``spark``.

    Each thread that writes must call this: ``df.write`` looks the format up in the thread's active session.
    """
    spark.dataSource.register(MailDataSource)
    # This makes the session the active one of the thread.
    spark.createDataFrame([], "nothing int")
