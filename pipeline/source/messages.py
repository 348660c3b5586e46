"""Turns the rows of a data frame into messages: which columns there may be, and which header each becomes (S1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Self

import pyarrow as pa
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

_TAKEN = {**{header: column for column, header in HEADERS.items()}, "nats-msg-id": "dedup_id"}
_ADDRESSES = 4096
_WHOLE = (ByteType, ShortType, IntegerType, LongType)


@dataclass(frozen=True, slots=True)
class SinkMessage:
    """What one row says. ``dedup_id`` is None where the row leaves it to the sink, and is not in ``headers``."""

    address: str
    payload: bytes
    headers: Mapping[str, str]
    dedup_id: str | None

    def digest(self) -> str:
        """Return 16 hexadecimal digits that another message hardly has."""
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
    """The columns of a data frame that is to be sent; made in the driver, used in the tasks."""

    names: tuple[str, ...]
    address: str | None
    """The mailbox of all rows; None: the column says it."""

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

        What the service can judge (lane words, spans, lengths) is left to it. Refused here is what would not arrive
        there as it was written.
        """
        address = self.address or row["address"]
        if address is None:
            raise BadRequestError("address", "expected one in every row, got null")
        payload = row[PAYLOADS[0]] if PAYLOADS[0] in row else row[PAYLOADS[1]]
        headers = _own(row.get("headers"))
        dedup_id = None
        for column, header in HEADERS.items():
            value = row.get(column)
            if value is None:
                continue
            text = _carried(column, _tags(value) if column == "tags" else str(value))
            if column == "dedup_id":
                dedup_id = text or None
            elif text:
                headers[header] = text
        return SinkMessage(_address(address), _bytes(payload), headers, dedup_id)


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
            good = isinstance(kind, _WHOLE) and name in NUMBERS
    if not good:
        raise BadRequestError(name, f"expected {_expected(name)}, got {kind.simpleString()}")


def _expected(name: str) -> str:
    if name in PAYLOADS:
        return "binary or string"
    if name in NUMBERS:
        return "a whole number or string"
    return {"tags": "array<string> or string", "headers": "map<string,string>"}.get(name, "string")


@lru_cache(_ADDRESSES)
def _address(text: str) -> str:
    return writable_address(text, "address")


def _bytes(payload: bytes | str | None) -> bytes:
    if payload is None:
        return b""
    return payload.encode() if isinstance(payload, str) else payload


def _tags(value: str | Sequence[str | None]) -> str:
    if isinstance(value, str):
        return value
    return ",".join(parse_words([tag for tag in value if tag is not None], "tags", MAX_TAGS, MAX_TAG))


def _own(value: Sequence[tuple[str, str | None]] | None) -> dict[str, str]:
    """Read the sender's own headers, which Arrow hands over as pairs; one without a value is left out."""
    own: dict[str, str] = {}
    for name, text in value or ():
        column = _TAKEN.get(name.lower())
        if column is not None:
            raise BadRequestError("headers", f"{name} is given in the column {column}")
        if not name or has_controls(name) or not name.isascii() or any(char in name for char in ' :"(),/;<=>?@[\\]{}'):
            raise BadRequestError("headers", f"expected letters, digits and signs of a header name, got {name[:60]!r}")
        if text is not None:
            own[name] = _carried(f"headers: {name}", text)
    return own


def _carried(field: str, text: str) -> str:
    """Return a header's value if NATS carries it as it is."""
    if has_controls(text):
        raise BadRequestError(field, "expected text without control characters")
    if text != text.strip():
        raise BadRequestError(field, "expected no blanks around it, NATS does not carry them")
    return text
