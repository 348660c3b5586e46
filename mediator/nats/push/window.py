"""What was pushed to one subscription and not yet confirmed: its client takes no more than that (E7)."""

from collections import deque

from mediator.mailboxes.pushing import Item
from mediator.nats.pushwire import WINDOW, WINDOW_BYTES


class Window:
    """Counts messages and bytes, in the order in which they were pushed."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._confirmed = 0

    @property
    def room(self) -> int:
        """How many more messages it takes."""
        return WINDOW - len(self._waiting) if self.rest > 0 else 0

    @property
    def rest(self) -> int:
        """How many more bytes it takes."""
        return WINDOW_BYTES - self._bytes

    @property
    def count(self) -> int:
        """How many messages are not confirmed."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[Item]:
        """What is not confirmed."""
        return [item for item, _ in self._waiting]

    def fits(self, size: int, part: int = 1) -> bool:
        """Whether a message may be pushed; one always may, whatever its size. ``part`` 2: in half of the window."""
        room = WINDOW // part - len(self._waiting)
        return not self._waiting or (room > 0 and self._bytes + size <= WINDOW_BYTES // part)

    def give(self, item: Item, size: int) -> None:
        """Note that a message is pushed."""
        self._waiting.append((item, size))
        self._bytes += size

    def confirm(self, total: int) -> list[Item]:
        """Note how many the client confirmed, counted from the opening, and return those it had not before."""
        # A gateway that counts more than was pushed is wrong.
        count = min(total - self._confirmed, len(self._waiting))
        items: list[Item] = []
        for _ in range(count):
            item, size = self._waiting.popleft()
            items.append(item)
            self._bytes -= size
        self._confirmed += len(items)
        return items
