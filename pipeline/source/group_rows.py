"""Messages of a FETCH reply as rows (N9)."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError
from pipeline.source.messages import HEADERS
from pipeline.source.schema import MESSAGES

NAMES = (
    "mailbox",
    "msg_id",
    "lane",
    "key",
    "tags",
    "headers",
    "dedup_id",
    "reply_to",
    "created_at",
    "sent_at",
    "expire_at",
    "payload",
)
"""Columns as in :data:`pipeline.source.schema.MESSAGES`; times have seconds, and the lane ``low`` is ``normal``."""

Item = Mapping[str, Any]
"""A message as in a reply."""


def columns(names: Sequence[str], option: str) -> StructType:
    """Return the columns with these names, or all if there are none; :class:`BadRequestError` names ``option``."""
    for name in names:
        if name not in NAMES:
            raise BadRequestError(option, f'no column "{name[:100]}", of a group there are {", ".join(NAMES)}')
    return StructType([MESSAGES[name] for name in names or NAMES])


def checked(schema: StructType) -> StructType:
    """Return the given schema if each column has its expected type."""
    for field, own in zip(schema, columns(schema.fieldNames(), "schema"), strict=True):
        if field.dataType != own.dataType:
            raise BadRequestError("schema", f"expected {field.name} to be {own.dataType.simpleString()}")
    return schema


def rows(items: Sequence[Item], schema: StructType, address: str) -> pa.RecordBatch:
    """Make a record batch of messages, in their order."""
    made = [{name: _value(item, name, address) for name in schema.fieldNames()} for item in items]
    return pa.RecordBatch.from_pylist(made, schema=to_arrow_schema(schema, timezone="UTC"))


def _value(item: Item, name: str, address: str) -> Any:
    match name:
        case "mailbox":
            return address
        case "lane":
            return item["priority"]
        case "tags":
            return item.get("tags", [])
        case "headers":
            # The reply address has its own column.
            return {name: text for name, text in item.get("headers", {}).items() if name != HEADERS["reply_to"]}
        case "payload":
            return b64decode(item["payload"])
        case "created_at":
            return _moment(item["create_time"])
        case "sent_at":
            return _moment(item.get("sent_time", item["create_time"]))
        case "expire_at":
            return _moment(item["expire_at"]) if "expire_at" in item else None
        case _:
            return item.get(name)


def _moment(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
