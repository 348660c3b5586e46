"""Tags and skills to filter by: which agents of a tenant have a label, in twelve bytes per label."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_FIRST_ROOM = 256
_FEW = 8


class LabelIndex:
    """Labels by slot. Not thread-safe.

    They are kept as hashes in one array, which is scanned as a whole: a million take half a millisecond.
    """

    def __init__(self) -> None:
        self._hashes = np.zeros(_FIRST_ROOM, np.uint64)
        self._slots = np.full(_FIRST_ROOM, -1, np.int32)
        """-1 where a label was removed."""
        self._end = 0

    def add(self, slot: int, labels: Sequence[str]) -> None:
        """Add the labels of a slot that has none."""
        count = len(labels)
        if self._end + count > len(self._slots):
            self._make_room(count)
        self._hashes[self._end : self._end + count] = [_hash(label) for label in labels]
        self._slots[self._end : self._end + count] = slot
        self._end += count

    def remove(self, slots: Sequence[int]) -> None:
        """Remove the labels of slots; many at once cost no more than a few, since all labels are scanned."""
        kept = self._slots[: self._end]
        if len(slots) <= _FEW:
            for slot in slots:
                kept[kept == slot] = -1
        else:
            # The last element stands for the -1 of those removed before.
            gone = np.zeros(max(int(kept.max(initial=-1)), *slots) + 2, np.bool_)
            gone[slots] = True
            kept[gone[kept]] = -1

    def filter(self, labels: Iterable[str], allowed: NDArray[np.bool_]) -> None:
        """Clear ``allowed``, by slot, where an agent lacks one of the labels."""
        for label in labels:
            places = np.flatnonzero(self._hashes[: self._end] == _hash(label))
            slots = self._slots[places]
            having = np.zeros_like(allowed)
            having[slots[slots >= 0]] = True
            allowed &= having

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
