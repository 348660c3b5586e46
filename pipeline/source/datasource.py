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
from pipeline.source.mailbox_batch import MailboxReader
from pipeline.source.options import BATCH, STREAM, parse, split_words
from pipeline.source.schema import MESSAGES, check_schema
from pipeline.source.tracebacks import hide_tracebacks

FORMAT = "mq9"


@hide_tracebacks
class MailDataSource(DataSource):
    """The entry points that Spark calls; each module is imported on the machine that needs it."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``spark.read.format``."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of a message (fewer with ``group``), or of an event with ``journal``."""
        if self.options.get("journal"):
            from pipeline.journal_schema import EVENTS

            return EVENTS
        if self.options.get("group"):
            from pipeline.source import group_rows

            return group_rows.columns(split_words(self.options, "columns"), "columns")
        return StructType([MESSAGES[name] for name in parse(self.options, (*BATCH, *STREAM)).columns])

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader of mailboxes."""
        if self.options.get("group"):
            why = "a batch read cannot acknowledge messages; use readStream with trigger(availableNow=True)"
            raise BadRequestError("group", why)
        return MailboxReader(parse(self.options), check_schema(schema))

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
        from pipeline.source.group_stream import GroupStream

        return GroupStream(options, schema)
    if options.get("journal"):
        from pipeline.source.journal_stream import JournalStream

        return JournalStream(options, schema)
    from pipeline.source.mailbox_stream import MailboxStream

    return MailboxStream(options, schema)


def register(spark: SparkSession) -> None:
    """Register the format ``mq9`` with ``spark``, also for writing in this thread.

    ``df.write.format("mq9")`` finds it in threads that have called this, whoever made the frame.
    """
    spark.dataSource.register(MailDataSource)
    # For a write Spark uses the session that is active in the thread, not the frame's; this activates it.
    spark.createDataFrame([], "nothing int")
