"""What waits for its turn by tenant: a tenant that brings thousands delays another's one by no more than a turn."""

from collections import OrderedDict


class TenantQueues:
    """Numbers in a queue for each tenant, taken from the queues in turn; bounded as a whole."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queues: OrderedDict[str, dict[int, None]] = OrderedDict()
        """Whose turn is next comes first; none is empty."""
        self._size = 0

    def __len__(self) -> int:
        """Return how many numbers wait."""
        return self._size

    def add(self, tenant: str, number: int) -> bool:
        """Queue a number unless it is there; False when one was left out, the last of the longest queue, for room."""
        queue = self._queues.setdefault(tenant, {})
        if number in queue:
            return True
        queue[number] = None
        self._size += 1
        if self._size <= self._capacity:
            return True
        longest = max(self._queues, key=lambda each: len(self._queues[each]))
        self._queues[longest].popitem()
        self._size -= 1
        if not self._queues[longest]:
            del self._queues[longest]
        return False

    def take(self, count: int) -> list[int]:
        """Take so many numbers at most, one from each queue in turn."""
        taken: list[int] = []
        while self._queues and len(taken) < count:
            tenant, queue = self._queues.popitem(last=False)
            number = next(iter(queue))
            del queue[number]
            taken.append(number)
            if queue:
                self._queues[tenant] = queue
        self._size -= len(taken)
        return taken
