"""What was pushed to one subscription and its client has not confirmed: a bounded window (E7)."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from mediator.mailboxes.pushing import Item

WINDOW: Final = 1000
"""Messages pushed and not confirmed, for each subscription (E7)."""
WINDOW_BYTES: Final = 1 << 20

Entry = tuple[Item, int]
"""A message in a window, with its size."""


class Window:
    """Messages and bytes pushed to one subscription and not confirmed, in the order of the pushes."""

    def __init__(self) -> None:
        self._waiting: deque[Entry] = deque()
        self._bytes = 0
        self._confirmed = 0

    @property
    def room(self) -> int:
        """How many more messages it takes."""
        return WINDOW - len(self._waiting) if self._bytes < WINDOW_BYTES else 0

    @property
    def room_bytes(self) -> int:
        """How many more bytes it takes."""
        return WINDOW_BYTES - self._bytes

    @property
    def count(self) -> int:
        """How many messages are not confirmed."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[Item]:
        """The messages that are not confirmed."""
        return [item for item, _ in self._waiting]

    def offer(self, entries: Sequence[Entry], size: int, part: int = 1) -> bool:
        """Add messages that are pushed, ``size`` bytes in all, if all of them fit; an empty window takes any one.

        ``part`` 2: half of the window.
        """
        fits = self.count + len(entries) <= WINDOW // part and self._bytes + size <= WINDOW_BYTES // part
        if not fits and (self._waiting or len(entries) > 1):
            return False
        self._waiting += entries
        self._bytes += size
        return True

    def add(self, item: Item, size: int) -> None:
        """Add a message that is pushed, whether it fits or not."""
        self._waiting.append((item, size))
        self._bytes += size

    def confirm(self, total: int) -> list[Item]:
        """Remove what the client confirmed, counted from the opening, and return it."""
        # A client may have stopped taking pushes before the last ones that were handed to it.
        count = min(total - self._confirmed, len(self._waiting))
        take = self._waiting.popleft
        confirmed = [take() for _ in range(count)]
        self._bytes -= sum(size for _, size in confirmed)
        self._confirmed += len(confirmed)
        return [item for item, _ in confirmed]
