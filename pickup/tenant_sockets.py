"""WebSockets by the tenant of the wallet that uses them: how many each may have, and which end with it (A6, S7)."""

from mediator.errors import TenantRefusedError
from mediator.tenants.directory import TenantDirectory
from pickup.dispatcher import TransportChannel


class TenantSockets:
    """Used on the event loop."""

    def __init__(self, directory: TenantDirectory) -> None:
        self._directory = directory
        self._tenants: dict[TransportChannel, str] = {}

    def check(self, tenant: str) -> None:
        """Raise :class:`TenantRefusedError` for a tenant that was removed."""
        if self._directory.is_removed(tenant):
            raise TenantRefusedError

    def enter(self, channel: TransportChannel, tenant: str) -> None:
        """Count a WebSocket for the tenant of the first wallet on it; raises :class:`QuotaExceededError`."""
        if channel.persistent and channel not in self._tenants:
            self._directory.enter(tenant)
            self._tenants[channel] = tenant

    def leave(self, channel: TransportChannel) -> None:
        """Count a WebSocket out, if it counts."""
        if (tenant := self._tenants.pop(channel, None)) is not None:
            self._directory.leave(tenant)

    def of_removed(self) -> list[TransportChannel]:
        """Return the WebSockets of removed tenants."""
        return [channel for channel, tenant in self._tenants.items() if self._directory.is_removed(tenant)]
