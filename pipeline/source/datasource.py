"""``mq9`` as a Spark data source: mailboxes as frames, mailboxes and the journal as streams, rows as mail."""

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
from pipeline.source.failing import reason_first
from pipeline.source.options import BATCH, STREAM, parse, words
from pipeline.source.reading import MailReader
from pipeline.source.schema import MESSAGES, narrowed

FORMAT = "mq9"


@reason_first
class MailSource(DataSource):
    """What Spark asks; each door has its own module, imported on the machine that needs it."""

    @classmethod
    def name(cls) -> str:
        """Return the word for ``spark.read.format``."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of a message, fewer where a ``group`` is given it; with ``journal`` those of an event."""
        if self.options.get("journal"):
            from pipeline.lake.events import EVENTS

            return EVENTS
        if self.options.get("group"):
            from pipeline.source import group_rows

            return group_rows.columns(words(self.options, "columns"), "columns")
        return StructType([MESSAGES[name] for name in parse(self.options, (*BATCH, *STREAM)).columns])

    def reader(self, schema: StructType) -> DataSourceReader:
        """Read what mailboxes hold now."""
        if self.options.get("group"):
            why = "nothing tells a batch that its job went well; use readStream with trigger(availableNow=True)"
            raise BadRequestError("group", why)
        return MailReader(parse(self.options), narrowed(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Follow a mailbox, or the journal."""
        from pipeline.source.stream import stream_reader

        return stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Send the rows of a frame as messages."""
        from pipeline.source.sink import writer

        return writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Send the rows of a stream as messages, each once."""
        from pipeline.source.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)


def register(spark: SparkSession) -> None:
    """Let ``spark`` know the format ``mq9``, and let this thread write in it.

    ``df.write.format("mq9")`` finds it in threads that have called this, whoever made the frame.
    """
    spark.dataSource.register(MailSource)
    # For a write Spark does not ask the frame's session but the one that is active in the thread: this makes it that.
    spark.createDataFrame([], "nothing int")
