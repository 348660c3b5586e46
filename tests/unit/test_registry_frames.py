"""Frames come out as they went in, and what is no frame is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from registry.embedding.worker import MAX_PART, PREFIX, PipeFrame, lengths, pack, unpack

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
HEADERS = st.dictionaries(TEXT.filter(lambda key: key not in ("rows", "dims")), st.lists(TEXT) | TEXT | st.integers())
ROWS = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9))


def read(frame: bytes) -> PipeFrame:
    found = lengths(frame[: PREFIX.size])
    rest = frame[PREFIX.size :]
    assert len(rest) == found.header + found.rows
    return unpack(rest[: found.header], rest[found.header :])


@given(header=HEADERS, rows=ROWS)
def test_a_frame_survives_packing(header: dict[str, object], rows: np.ndarray) -> None:
    found = read(pack(header, rows))
    assert found.header == header | {"rows": rows.shape[0], "dims": rows.shape[1]}
    assert found.rows.shape == rows.shape
    assert found.rows.tobytes() == rows.astype("<f4").tobytes()


@given(header=HEADERS)
def test_a_frame_without_rows(header: dict[str, object]) -> None:
    found = read(pack(header))
    assert found.header == header
    assert found.rows.shape == (0, 0)


def test_rows_need_not_lie_in_order() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert (read(pack({}, rows.T)).rows == rows.T).all()


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        (b"", b""),
        (b"[1]", b""),
        (b"{", b""),
        (b'"\xff"', b""),
        (b"[" * 200_000, b""),
        (b'{"rows": 1, "dims": 2}', bytes(7)),
        (b'{"rows": 1, "dims": 2}', bytes(12)),
        (b'{"rows": 2, "dims": 1}', b""),
        (b'{"rows": -1, "dims": -2}', bytes(8)),
        (b'{"rows": 1.0, "dims": 2}', bytes(8)),
        (b'{"rows": true, "dims": 2}', bytes(8)),
        (b'{"rows": "1", "dims": 2}', bytes(8)),
        (b'{"rows": 4611686018427387904, "dims": 4}', bytes(8)),
        (b"{}", bytes(4)),
    ],
)
def test_an_invalid_frame_is_refused(head: bytes, tail: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(head, tail)


@given(head=st.binary(max_size=60), tail=st.binary(max_size=60))
def test_any_bytes_are_a_frame_or_refused(head: bytes, tail: bytes) -> None:
    try:
        found = unpack(head, tail)
    except ValueError:
        return
    assert found.rows.size * 4 == len(tail)


@pytest.mark.parametrize("prefix", [PREFIX.pack(MAX_PART + 1, 0), PREFIX.pack(0, MAX_PART + 1), b"\xff" * 8])
def test_a_prefix_that_promises_too_much_is_refused(prefix: bytes) -> None:
    with pytest.raises(ValueError, match="above the limit"):
        lengths(prefix)


def test_a_too_large_frame_is_not_sent() -> None:
    with pytest.raises(ValueError, match="above the limit"):
        pack({"texts": ["x" * MAX_PART]})
