"""The form in which the store keeps the vectors of a card: half precision, which does not change the ranking."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

HalfFloats: TypeAlias = NDArray[np.float16]
_HEAD = np.dtype("<u2")
_NUMBER = np.dtype("<f2")


def pack_rows(rows: NDArray[np.float32]) -> bytes:
    """Pack rows, (n, dims), behind their number of dimensions."""
    return np.array([rows.shape[1]], _HEAD).tobytes() + rows.astype(_NUMBER).tobytes()


def unpack_rows(data: bytes) -> HalfFloats:
    """Read what :func:`pack_rows` wrote."""
    dims = int(np.frombuffer(data, _HEAD, 1)[0])
    return np.frombuffer(data, _NUMBER, offset=_HEAD.itemsize).reshape(-1, dims)
