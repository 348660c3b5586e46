"""For which tenants the registry remembers what served whom, and how much (G6, G8)."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Literal

from mediator.mailboxes.bounds import DAY


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """The settings of the memory of use."""

    mode: Literal["auto", "on", "off"] = "off"
    """For tenants that are not named below; ``auto``: on where a tenant is one party."""
    tenants: Set[str] = frozenset()
    """Where it is on in any case."""
    signs: Set[str] = frozenset()
    """Tenants where a message to an agent that was just found is a weak sign (G8)."""
    parties: Callable[[str], int] = lambda _tenant: 0
    """Returns how many credentials a tenant has."""
    most: int = 100_000
    """Requests of a tenant that are remembered."""
    keep: int = 90 * DAY
    """Milliseconds for which one is remembered that is not asked again."""

    def on(self, tenant: str) -> bool:
        """Return whether requests of a tenant are remembered."""
        if tenant in self.tenants:
            return True
        return self.mode == "on" or (self.mode == "auto" and not self.several(tenant))

    def several(self, tenant: str) -> bool:
        """Return whether parties share a tenant that may have interests of their own."""
        return self.parties(tenant) > 1

    def is_only_party(self, tenant: str, credential: str) -> bool:
        """Return whether a caller is the only party of a tenant: beside a credential, anonymous callers are others."""
        return self.parties(tenant) <= (1 if credential else 0)


NO_MEMORY = MemoryPolicy()
