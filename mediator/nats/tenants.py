"""Which tenant a request belongs to: said by its subject, which no client can forge (A6)."""

from collections.abc import Iterable, Mapping

from mediator.errors import TenantRefusedError
from mediator.mailboxes.address import DEFAULT_TENANT


class Tenants:
    """Maps NATS accounts to tenants; accounts that are not mapped are ``default`` while that is the only tenant."""

    def __init__(self, accounts: Mapping[str, str], names: Iterable[str]) -> None:
        """``accounts`` maps account names to tenants, ``names`` are all tenants there are."""
        self._accounts = dict(accounts)
        self._alone = set(names) <= {DEFAULT_TENANT}

    def of(self, account: str) -> str:
        """Return the tenant of an account, or raise :class:`TenantRefusedError`."""
        tenant = self._accounts.get(account)
        if tenant is not None:
            return tenant
        if self._alone:
            return DEFAULT_TENANT
        raise TenantRefusedError
