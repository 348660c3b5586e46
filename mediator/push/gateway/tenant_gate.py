"""What the gateway knows of tenants: whose a connection is, how many each may have, logins that rotate (S7)."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import orjson

from mediator.errors import QuotaExceededError, TenantRefusedError
from mediator.nats import frames
from mediator.nats.accounts import AccountMap
from mediator.tenants.directory import TenantDirectory

_WITH_INFO: Final = 1
"""The version of the clients' protocol with INFO at any time."""


class TenantGate(NamedTuple):
    """The tenants of one gateway."""

    accounts: AccountMap
    directory: TenantDirectory


class TenantMembership:
    """The tenant that one connection counts for; without a gate, none."""

    def __init__(self, gate: TenantGate | None) -> None:
        self._gate = gate
        self._account = ""
        self._tenant: str | None = None
        self.problem = ""
        """Why the connection must end, as the client is told; empty: it need not."""
        self.hides_info = False
        """Whether the client expects one INFO only."""

    def connect(self, frame: bytes, options: Mapping[str, object]) -> bytes:
        """Return the client's CONNECT as the server gets it.

        It asks for the INFO that names the account, also for clients of a protocol without that, and has the login that
        the client's password is valid for while passwords are being rotated.
        """
        if self._gate is None:
            return frame
        changed: dict[str, object] = {}
        if options.get("protocol") != _WITH_INFO:
            changed["protocol"] = _WITH_INFO
            self.hides_info = True
        user, password = options.get("user"), options.get("pass")
        if isinstance(user, str) and isinstance(password, str):
            alias = self._gate.directory.alias(user, password)
            if alias is not None:
                changed["user"] = alias
        return b"CONNECT " + orjson.dumps({**options, **changed}) + frames.CRLF if changed else frame

    def enter(self, account: str) -> None:
        """Count the connection for the tenant of an account; who has none is not counted, but refused by the door."""
        if self._gate is None or account == self._account:
            return
        self.leave()
        self._account = account
        try:
            tenant = self._gate.accounts.tenant_of(account)
            self._gate.directory.enter(tenant)
            self._tenant = tenant
        except TenantRefusedError:
            pass
        except QuotaExceededError as error:
            self.problem = str(error)

    def check(self) -> None:
        """Find a problem if the tenant was removed, or the account is another tenant's now."""
        if self._gate is None or self._tenant is None:
            return
        try:
            gone = self._gate.accounts.tenant_of(self._account) != self._tenant
        except TenantRefusedError:
            gone = True
        if gone:
            self.problem = "Authorization Violation"

    def leave(self) -> None:
        """Count the connection out."""
        if self._gate is not None and self._tenant is not None:
            self._gate.directory.leave(self._tenant)
            self._tenant = None
