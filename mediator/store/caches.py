"""What a store remembers between transactions: mailboxes, positions of groups, and numbers of rows."""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from itertools import islice

from mediator.mailboxes.mailbox import Mailbox
from mediator.store.rows import KeptMailbox

COUNT_SECONDS = 5.0
"""How long a count is believed; what is added here is counted meanwhile."""


class MailboxCache:
    """Mailboxes that were read, by place and by number; the least recently used are dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_place: OrderedDict[tuple[str, str], KeptMailbox] = OrderedDict()
        self._by_no: dict[int, KeptMailbox] = {}
        self._by_send_only: dict[tuple[str, str], KeptMailbox] = {}

    def at(self, tenant: str, address: str) -> KeptMailbox | None:
        """Return the mailbox at a place."""
        mailbox = self._by_place.get((tenant, address))
        if mailbox is not None:
            self._by_place.move_to_end((tenant, address))
        return mailbox

    def at_send_only(self, tenant: str, address: str) -> KeptMailbox | None:
        """Return the mailbox that was found by a send-only address before (A10)."""
        mailbox = self._by_send_only.get((tenant, address))
        return mailbox if mailbox is not None and self.at(*mailbox.place) is mailbox else None

    def found_by_send_only(self, mailbox: KeptMailbox) -> None:
        """Remember a mailbox that is here by its send-only address, too."""
        self._by_send_only[mailbox.tenant, mailbox.send_only] = mailbox

    def numbered(self, no: int) -> KeptMailbox | None:
        """Return the mailbox with a number."""
        return self._by_no.get(no)

    def add(self, mailbox: KeptMailbox) -> None:
        """Remember a mailbox that has an address."""
        self._by_place[mailbox.tenant, mailbox.address] = mailbox
        self._by_no[mailbox.no] = mailbox

    def forget(self, mailbox: Mailbox) -> None:
        """Forget a mailbox, under whatever place it was known."""
        known = self._by_no.pop(mailbox.no, None)
        if known is not None and self._by_place.get((known.tenant, known.address)) is known:
            del self._by_place[known.tenant, known.address]
        if known is not None:
            self._by_send_only.pop((known.tenant, known.send_only), None)

    def trim(self) -> None:
        """Forget the least recently used above the capacity; only between transactions."""
        while len(self._by_place) > self._capacity:
            _, mailbox = self._by_place.popitem(last=False)
            self._by_no.pop(mailbox.no, None)
            self._by_send_only.pop((mailbox.tenant, mailbox.send_only), None)


class UnflushedPositions:
    """Positions of groups that are newer than their rows, by number; a crash loses them, which costs duplicates (K2).

    Where several instances share a database, each must see them at once: there ``capacity`` is 0, and rows are written.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._states: OrderedDict[int, bytes] = OrderedDict()

    def get(self, no: int) -> bytes | None:
        """Return the position that is newer than the row's."""
        return self._states.get(no)

    def put(self, no: int, state: bytes | None) -> None:
        """Remember a position; None: the row is right again."""
        if state is None:
            self._states.pop(no, None)
        else:
            self._states[no] = state
            self._states.move_to_end(no)

    def surplus(self) -> list[tuple[int, bytes]]:
        """Return the positions that are more than may be remembered, least recently used first."""
        return list(islice(self._states.items(), max(0, len(self._states) - self._capacity)))

    def all(self) -> list[tuple[int, bytes]]:
        """Return every position that is remembered."""
        return list(self._states.items())


class Counted:
    """How many rows there are of one kind: counted now and then, and added to in between."""

    def __init__(self) -> None:
        self._count = 0
        self._counted_at = 0.0

    def read(self, count: Callable[[], int]) -> int:
        """Return the number, counting anew when the last count is old."""
        now = time.monotonic()
        if not self._counted_at or now - self._counted_at > COUNT_SECONDS:
            self._count = count()
            self._counted_at = now
        return self._count

    def add(self, by: int) -> None:
        """Note how many rows were inserted or, below 0, deleted."""
        self._count += by


MAX_COUNTS = 10_000


class Counts(defaultdict[Hashable, Counted]):
    """Numbers of rows that are needed so often that counting them each time would hold up others, by what is counted.

    Of more than are kept, those go first that came first: they are counted anew.
    """

    def __init__(self) -> None:
        super().__init__(Counted)

    def __missing__(self, what: Hashable) -> Counted:
        """Begin to count, and forget the oldest where there are too many."""
        # Readers look here too: a copy does not change meanwhile.
        for oldest in list(self)[: max(0, len(self) - MAX_COUNTS + 1)]:
            self.pop(oldest, None)
        return super().__missing__(what)
