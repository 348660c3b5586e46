"""Remembers the connections of callers, so that their requests do not read the database for them."""

from collections import OrderedDict, defaultdict

from mediator.store.writer import Committed
from pickup.rules.records import Connection
from pickup.tables import CONNECTIONS

MAX_CALLERS = 4096


class CallerCache:
    """Connections by tenant and caller, as of the last commit; the oldest are dropped.

    Only for a database that no other process changes. Used on the event loop, where a commit is announced before its
    requests are answered.
    """

    def __init__(self) -> None:
        self._connections: OrderedDict[tuple[str, str], Connection] = OrderedDict()
        self._callers: defaultdict[int, set[tuple[str, str]]] = defaultdict(set)

    def get(self, tenant: str, caller: str) -> Connection | None:
        """Return the connection of a caller, if it is remembered."""
        return self._connections.get((tenant, caller))

    def add(self, tenant: str, caller: str, connection: Connection) -> None:
        """Remember what was just read; nothing may be awaited in between."""
        self._connections[tenant, caller] = connection
        self._callers[connection.no].add((tenant, caller))
        if len(self._connections) > MAX_CALLERS:
            key, oldest = self._connections.popitem(last=False)
            self._callers[oldest.no].discard(key)
            if not self._callers[oldest.no]:
                del self._callers[oldest.no]

    def forget(self, committed: Committed) -> None:
        """Forget the connections that a commit changed."""
        for what in committed.changed:
            if isinstance(what, tuple) and what[0] == CONNECTIONS:
                for key in self._callers.pop(what[1], ()):
                    del self._connections[key]
