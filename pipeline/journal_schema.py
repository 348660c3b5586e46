"""The journal as the pipeline reads it: the columns of an event, and the bounds of a line (docs/journal.md)."""

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

from mediator.mailboxes.events import EventType

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

PARTITION = "date"

VERSION = 1
"""Of the lines; a line without a version has it."""
MAX_SEQ = 2**53 - 1
MAX_TIME = 253_402_300_799_999
"""The last millisecond of the year 9999, the last that Spark and Python show as a date."""

BORN = (int(EventType.STORED), int(EventType.RELEASED))
"""A message has one event of these in its life, named by ``mailbox`` and ``msg_id``."""
