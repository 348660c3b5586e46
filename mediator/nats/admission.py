"""Shares a bound on requests among tenants, and a tenant's part of it among its connections.

There are no fixed shares. A tenant may hold :data:`SHARE` times what is free, and a connection as much as its tenant
may still take: the dynamic thresholds of Choudhury and Hahne for shared buffers. A lone tenant gets most of the bound,
shares shrink as it fills, and a newcomer always finds room.
"""

from collections.abc import Hashable
from typing import Final

from mediator.errors import BusyError

SHARE: Final = 3
"""A tenant alone holds at most 3/4 of the bound, one connection alone 3/5."""
_UNIT_BITS: Final = 15


class AdmissionPool:
    """Counts requests of one kind that are under way: each as one, plus one for each 32 KiB of its body."""

    def __init__(self, limit: int, kind: str) -> None:
        """``kind`` names the requests in errors: ``requests``."""
        self._limit = limit
        self._kind = kind
        self._total = 0
        self._of_tenant: dict[str, int] = {}
        self._of_connection: dict[Hashable, int] = {}

    def enter(self, tenant: str, connection: Hashable, size: int) -> None:
        """Admit a request with ``size`` bytes of body; raises :class:`BusyError`, which says whose share is exhausted.

        ``connection`` belongs to this tenant only. Where one request is admitted, its size does not matter.
        """
        held = self._of_tenant.get(tenant, 0)
        own = self._of_connection.get(connection, 0)
        room = SHARE * (self._limit - self._total) - held
        if own >= room:
            self._refuse(room, held, own)
        weight = 1 + (size >> _UNIT_BITS)
        self._total += weight
        self._of_tenant[tenant] = held + weight
        self._of_connection[connection] = own + weight

    def leave(self, tenant: str, connection: Hashable, size: int) -> None:
        """Remove a request that was admitted with the same arguments."""
        weight = 1 + (size >> _UNIT_BITS)
        self._total -= weight
        # Tenants and connections without requests are forgotten.
        if left := self._of_connection[connection] - weight:
            self._of_connection[connection] = left
        else:
            del self._of_connection[connection]
        if left := self._of_tenant[tenant] - weight:
            self._of_tenant[tenant] = left
        else:
            del self._of_tenant[tenant]

    def _refuse(self, room: int, held: int, own: int) -> None:
        if self._total >= self._limit:
            raise BusyError(f"{self._kind} of all tenants are at the bound of {self._limit}")
        whose, count = ("tenant", held) if room <= 0 else ("connection", own)
        raise BusyError(f"this {whose} has {count} {self._kind} under way, its share of {self._limit}")
