"""What a row of the lake's events is: one event of the journal, in the order of docs/journal.md."""

from pyspark.sql.types import (
    ByteType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from mediator.mailboxes.events import What

EVENTS = StructType(
    [
        StructField("instance", StringType()),
        StructField("seq", LongType()),
        StructField("position", IntegerType()),
        StructField("tenant", StringType()),
        StructField("at", TimestampType()),
        StructField("what", ByteType()),
        StructField("mailbox", LongType()),
        StructField("lane", ByteType()),
        StructField("msg_id", LongType()),
        StructField("bytes", LongType()),
        StructField("created_at", TimestampType()),
        StructField("group", LongType()),
        StructField("date", DateType()),
    ]
)
"""Times have milliseconds, in UTC; ``created_at`` is null where it does not apply; ``date`` is the day of ``at``."""

IDENTITY = ("instance", "seq", "position")
"""Names an event for ever."""
PARTITION = "date"

BORN = (int(What.STORED), int(What.RELEASED))
"""A message has one event of these in its life, named by ``mailbox`` and ``msg_id``."""
