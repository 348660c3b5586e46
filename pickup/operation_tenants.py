"""Reads which tenant an operation of the DIDComm door is about."""

from collections.abc import Sequence

from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.operate.operations import OperationRequest, read_text
from pickup.dids.identities import OwnIdentities


class OperationTenants:
    """The tenants that have an identity."""

    def __init__(self, names: Sequence[str], identities: OwnIdentities) -> None:
        """``names`` may change while the service runs."""
        self._names = names
        self._identities = identities

    async def of(self, request: OperationRequest) -> str:
        """Return the tenant of a request, ``default`` if it has none; :class:`BadRequestError` lists those known."""
        tenant = read_text(request, "tenant") or DEFAULT_TENANT
        if tenant not in self._names:
            raise BadRequestError("tenant", f"expected one of {', '.join(self._names)}")
        await self._identities.ensure()
        return tenant
