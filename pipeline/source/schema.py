"""The columns of a message and of an event of the journal, and the Arrow arrays they are read into."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DateType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from mediator.errors import BadRequestError
from mediator.mailboxes.events import EventType
from mediator.mailboxes.lanes import LANES

MESSAGES = StructType(
    [
        StructField("tenant", StringType()),
        StructField("mailbox", StringType()),
        StructField("mailbox_no", LongType()),
        StructField("msg_id", LongType()),
        StructField("lane", StringType()),
        StructField("key", StringType()),
        StructField("tags", ArrayType(StringType())),
        StructField("headers", MapType(StringType(), StringType())),
        StructField("dedup_id", StringType()),
        StructField("reply_to", StringType()),
        StructField("recipient", StringType()),
        StructField("size", LongType()),
        StructField("created_at", TimestampType()),
        StructField("sent_at", TimestampType()),
        StructField("expire_at", TimestampType()),
        StructField("payload", BinaryType()),
    ]
)
"""``mailbox`` is its address, ``mailbox_no`` names one generation of it (A3); times have milliseconds, in UTC.

Null are ``key``, ``dedup_id``, ``reply_to``, ``recipient`` and ``expire_at`` of a message that has none; tags and
headers are empty then.
"""
NAMES = tuple(MESSAGES.fieldNames())

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

NOTHING = "\0"
"""Stands for a missing text; no text of a message has control characters."""

_STORED = {
    "tenant": (),
    "mailbox": ("mailbox_no",),
    "headers": ("extra",),
    "dedup_id": ("extra",),
    "reply_to": ("extra",),
    "sent_at": ("created_at", "extra"),
}
_RARE = {"dedup_id": "d", "reply_to": "r"}
_MAP = pa.map_(pa.string(), pa.string())
_NONE: Mapping[str, Any] = {}

Column: TypeAlias = Any
"""An Arrow array, of which there are no types."""


def check_names(names: Sequence[str], option: str) -> tuple[str, ...]:
    """Return ``names`` if each is a column of a message, else raise :class:`BadRequestError` naming ``option``."""
    for name in names:
        if name not in NAMES:
            raise BadRequestError(option, f'no column "{name[:100]}", there are {", ".join(NAMES)}')
    return tuple(names)


def check_schema(schema: StructType) -> tuple[str, ...]:
    """Return the columns of a schema that a caller gave; each has the type that it has here."""
    names = check_names(schema.fieldNames(), "schema")
    for field in schema:
        expected = MESSAGES[field.name].dataType.simpleString()
        if field.dataType.simpleString() != expected:
            raise BadRequestError("schema", f"expected {field.name} to be {expected}")
    return names


def stored_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return which columns of the table of messages these are made of, at least one."""
    return tuple(dict.fromkeys(part for name in names for part in _STORED.get(name, (name,)))) or ("msg_id",)


def to_batch(rows: Any, names: Sequence[str], tenant: str, addresses: Mapping[int, str]) -> Any:
    """Make a record batch of the columns ``names`` from one of the :func:`stored_columns` columns."""
    raw = {name: rows.column(name) for name in rows.schema.names}
    rare = [orjson.loads(extra) if extra else _NONE for extra in raw["extra"].to_pylist()] if "extra" in raw else []
    return pa.RecordBatch.from_arrays(
        [_column(name, raw, rare, rows.num_rows, tenant, addresses) for name in names], names=list(names)
    )


def _column(
    name: str,
    raw: Mapping[str, Column],
    rare: Sequence[Mapping[str, Any]],
    count: int,
    tenant: str,
    addresses: Mapping[int, str],
) -> Column:
    match name:
        case "tenant":
            return pa.repeat(pa.scalar(tenant), count)
        case "mailbox":
            numbers = pa.array(list(addresses), pa.int64())
            return pa.array(list(addresses.values()), pa.string()).take(pc.index_in(raw["mailbox_no"], numbers))
        case "lane":
            return _lanes().take(raw["lane"])
        case "tags":
            return _tags(_text(raw["tags"]))
        case "headers":
            return pa.array([list(each.get("h", _NONE).items()) for each in rare], _MAP)
        case "dedup_id" | "reply_to":
            return pa.array([each.get(_RARE[name]) for each in rare], pa.string())
        case "sent_at":
            own = pa.array([each.get("s") for each in rare], pa.int64())
            return _time(pc.coalesce(own, raw["created_at"]))
        case "created_at" | "expire_at":
            return _time(raw[name])
        case "key" | "recipient":
            return _text(raw[name])
        case "payload":
            return raw[name].cast(pa.binary())
        case _:
            return raw[name].cast(pa.int64())


@cache
def _lanes() -> Column:
    # The first array of a process loads pandas, and most of Spark's workers that load this make none.
    return pa.array([lane.name.lower() for lane in LANES])


def _time(milliseconds: Column) -> Column:
    return milliseconds.cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))


def _text(texts: Column) -> Column:
    texts = texts.cast(pa.string())
    return pc.if_else(pc.equal(texts, NOTHING), None, texts)


def _tags(texts: Column) -> Column:
    """Split tags at their commas; no tags are an empty list, not none."""
    parts = pc.split_pattern(texts, ",")
    ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(parts), 0))
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends.cast(pa.int32())])
    return pa.ListArray.from_arrays(offsets, pc.list_flatten(parts))
