"""Which tenant an HTTP request belongs to: said by its API token, and by nothing else it holds (A6)."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from multidict import MultiMapping

from mediator.endpoint import Endpoint
from mediator.errors import NotAuthenticatedError

DEFAULT = "default"


class HttpTenants:
    """Maps API tokens to tenants; without a token callers may be ``default``, where the settings allow that."""

    def __init__(self, tokens: Mapping[str, Iterable[str]], *, anonymous: bool) -> None:
        """``tokens`` are those of each tenant; ``anonymous``: see :attr:`mediator.settings.Settings.http_anonymous`."""
        self._tenants = [(_hash(token), tenant) for tenant, own in tokens.items() for token in own]
        self._anonymous = anonymous

    def of(self, headers: MultiMapping[str]) -> str:
        """Return the tenant of a request, or raise :class:`NotAuthenticatedError`."""
        given = headers.getall("Authorization", [])
        if not given:
            # A page in a browser may lead a name of its own to this machine; what it then asks for is that name.
            if self._anonymous and _names_this_machine(headers.get("Host", "")):
                return DEFAULT
            raise NotAuthenticatedError
        scheme, _, token = given[0].partition(" ")
        tenant = self._tenant(token.strip()) if len(given) == 1 and scheme.lower() == "bearer" else None
        if tenant is None:
            raise NotAuthenticatedError
        return tenant

    def _tenant(self, token: str) -> str | None:
        """Look at every token, so that the time it takes tells nothing of them."""
        asked, found = _hash(token), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, asked):
                found = tenant
        return found


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _names_this_machine(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and Endpoint(name, 0).loopback
