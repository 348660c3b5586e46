"""Columns of values as PostgreSQL's binary arrays, several times cheaper to write than through the driver."""

import struct
from collections.abc import Sequence

from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format

_HEAD = struct.Struct("!iiIii")
_EMPTY = struct.Struct("!iiI")
_INT8 = struct.Struct("!iq").pack
_LENGTH = struct.Struct("!i").pack
_NULL = b"\xff\xff\xff\xff"


class Array:
    """One array, ready for the wire."""

    element: int
    """The type's number in PostgreSQL's catalogue, the same in every server."""

    __slots__ = ("wire",)

    def __init__(self, count: int, nulls: bool, items: bytes) -> None:
        self.wire = _HEAD.pack(1, nulls, self.element, count, 1) + items if count else _EMPTY.pack(0, 0, self.element)


class BigInts(Array):
    """``bigint[]``."""

    __slots__ = ()
    element = 20

    def __init__(self, values: Sequence[int | None]) -> None:
        nulls = None in values
        if nulls:
            items = [_NULL if value is None else _INT8(8, value) for value in values]
        else:
            items = [_INT8(8, value) for value in values]
        super().__init__(len(values), nulls, b"".join(items))


class Blobs(Array):
    """``bytea[]``."""

    __slots__ = ()
    element = 17

    def __init__(self, values: Sequence[bytes | None]) -> None:
        items = []
        for value in values:
            if value is None:
                items.append(_NULL)
            else:
                items += (_LENGTH(len(value)), value)
        super().__init__(len(values), None in values, b"".join(items))


class Texts(Blobs):
    """``text[]``."""

    __slots__ = ()
    element = 25

    def __init__(self, values: Sequence[str | None]) -> None:
        super().__init__([None if value is None else value.encode() for value in values])


class _ArrayDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Array) -> bytes:
        return obj.wire


class BigIntsDumper(_ArrayDumper):
    """Tells the driver what :class:`BigInts` are."""

    oid = 1016


class BlobsDumper(_ArrayDumper):
    """Tells the driver what :class:`Blobs` are."""

    oid = 1001


class TextsDumper(_ArrayDumper):
    """Tells the driver what :class:`Texts` are."""

    oid = 1009


def teach(adapters: AdaptersMap) -> None:
    """Make a connection take arrays as parameters."""
    adapters.register_dumper(BigInts, BigIntsDumper)
    adapters.register_dumper(Blobs, BlobsDumper)
    adapters.register_dumper(Texts, TextsDumper)
