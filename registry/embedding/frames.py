"""Frames on the pipes between the service and its worker: a JSON object followed by rows of float32.

A prefix has the lengths of both parts, four bytes each; ``rows`` and ``dims`` of the object give the shape of the rows.
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
"""Of rows, and of numbers in a row."""


class Lengths(NamedTuple):
    """Bytes that follow the prefix of a frame."""

    header: int
    rows: int


class PipeFrame(NamedTuple):
    """A message; ``rows`` has the shape (0, 0) if there are none."""

    header: dict[str, Any]
    rows: NDArray[np.float32]


def pack(header: Mapping[str, Any], rows: NDArray[np.float32] | None = None) -> bytes:
    """Write a frame; strings must be valid Unicode, ``rows`` have two dimensions. ValueError when it is too large."""
    tail = b""
    if rows is not None:
        header = {**header, "rows": rows.shape[0], "dims": rows.shape[1]}
        tail = np.ascontiguousarray(rows, "<f4").tobytes()
    head = json.dumps(header, ensure_ascii=False).encode()
    lengths = Lengths(len(head), len(tail))
    _check(lengths)
    return PREFIX.pack(*lengths) + head + tail


def lengths(prefix: bytes) -> Lengths:
    """Parse the prefix; ValueError when a part is longer than :data:`MAX_PART`."""
    found = Lengths(*PREFIX.unpack(prefix))
    _check(found)
    return found


def unpack(head: bytes, tail: bytes) -> PipeFrame:
    """Parse the two parts; ValueError when they are invalid."""
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
        return PipeFrame(header, np.empty((0, 0), np.float32))
    if shape[0] * shape[1] * 4 != len(tail):
        raise ValueError(f"expected {shape[0]} rows of {shape[1]} numbers, got {len(tail)} bytes")
    return PipeFrame(header, np.frombuffer(tail, "<f4").reshape(shape))


def _check(found: Lengths) -> None:
    if max(found) > MAX_PART:
        raise ValueError(f"a part of {max(found)} bytes is above the limit of {MAX_PART}")
