"""Frames on the pipes between the service and its workers: a JSON object and, behind it, rows of float32.

The lengths of both parts stand before them, four bytes each. Rows are described by ``rows`` and ``dims`` of the object.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

PREFIX: Final = struct.Struct("!II")
MAX_PART: Final = 8 * 1024 * 1024
"""Bytes of one part of a frame."""
MAX_NUMBER: Final = 1 << 20
"""Rows, and numbers in a row."""


class Lengths(NamedTuple):
    """Bytes that follow the prefix of a frame."""

    header: int
    rows: int


class Frame(NamedTuple):
    """What was sent; ``rows`` is (0, 0) where there were none."""

    header: dict[str, Any]
    rows: NDArray[np.float32]


def pack(header: Mapping[str, Any], rows: NDArray[np.float32] | None = None) -> bytes:
    """Write a frame; strings must be well-formed, ``rows`` of two dimensions. ValueError when it is too large."""
    tail = b""
    if rows is not None:
        header = {**header, "rows": rows.shape[0], "dims": rows.shape[1]}
        tail = np.ascontiguousarray(rows, "<f4").tobytes()
    head = json.dumps(header, ensure_ascii=False).encode()
    lengths = Lengths(len(head), len(tail))
    _check(lengths)
    return PREFIX.pack(*lengths) + head + tail


def lengths(prefix: bytes) -> Lengths:
    """Read the prefix; ValueError when it promises more than a frame may hold."""
    found = Lengths(*PREFIX.unpack(prefix))
    _check(found)
    return found


def unpack(head: bytes, tail: bytes) -> Frame:
    """Read the two parts; ValueError when they are no frame."""
    try:
        header = json.loads(head)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError("expected an object")
    shape = (header.get("rows", 0), header.get("dims", 0))
    if any(type(number) is not int or not 0 <= number <= MAX_NUMBER for number in shape):
        raise ValueError("expected numbers of rows and dims")
    if not (tail or shape[0]):
        return Frame(header, np.empty((0, 0), np.float32))
    if shape[0] * shape[1] * 4 != len(tail):
        raise ValueError(f"expected {shape[0]} rows of {shape[1]} numbers, got {len(tail)} bytes")
    return Frame(header, np.frombuffer(tail, "<f4").reshape(shape))


def _check(found: Lengths) -> None:
    if max(found) > MAX_PART:
        raise ValueError(f"a part of {max(found)} bytes is above the limit of {MAX_PART}")
