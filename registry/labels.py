"""Tags and skills to filter by: which agents of a tenant have a label, in twelve bytes a label."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_FIRST_ROOM = 256
_FEW = 8


class Labels:
    """Labels by slot. Not thread-safe.

    They are kept as hashes in one row, which is read from end to end: a million take half a millisecond.
    """

    def __init__(self) -> None:
        self._hashes = np.zeros(_FIRST_ROOM, np.uint64)
        self._slots = np.full(_FIRST_ROOM, -1, np.int32)
        """-1 where a label was removed."""
        self._end = 0

    def put(self, slot: int, labels: Sequence[str]) -> None:
        """Take the labels of a slot that has none."""
        count = len(labels)
        if self._end + count > len(self._slots):
            self._make_room(count)
        self._hashes[self._end : self._end + count] = [_hash(label) for label in labels]
        self._slots[self._end : self._end + count] = slot
        self._end += count

    def remove(self, slots: Sequence[int]) -> None:
        """Forget the labels of some slots; of many in one go, since all labels are looked at."""
        kept = self._slots[: self._end]
        if len(slots) <= _FEW:
            for slot in slots:
                kept[kept == slot] = -1
        else:
            # The last one stands for those that were removed before.
            gone = np.zeros(max(int(kept.max(initial=-1)), *slots) + 2, np.bool_)
            gone[slots] = True
            kept[gone[kept]] = -1

    def mark(self, labels: Iterable[str], among: NDArray[np.bool_]) -> None:
        """Leave true in ``among``, by slot, only those that have all the labels."""
        for label in labels:
            places = np.flatnonzero(self._hashes[: self._end] == _hash(label))
            slots = self._slots[places]
            having = np.zeros_like(among)
            having[slots[slots >= 0]] = True
            among &= having

    def _make_room(self, count: int) -> None:
        kept = self._slots[: self._end] >= 0
        hashes, slots = self._hashes[: self._end][kept], self._slots[: self._end][kept]
        self._end = len(slots)
        room = max(_FIRST_ROOM, 2 * (self._end + count))
        self._hashes = np.zeros(room, np.uint64)
        self._slots = np.full(room, -1, np.int32)
        self._hashes[: self._end], self._slots[: self._end] = hashes, slots


def _hash(label: str) -> int:
    digest = blake2b(label.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
