"""Finds the tenant of an HTTP request by its API token, and by nothing else in it (A6)."""

import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import Self
from urllib.parse import urlsplit

from multidict import MultiMapping

from mediator.config.settings import Settings
from mediator.endpoint import Endpoint
from mediator.errors import NotAuthenticatedError
from mediator.tenants.directory import TenantDirectory, digest_of

DEFAULT = "default"


class HttpTenants:
    """Maps API tokens to tenants; callers without a token are ``default`` where the settings allow it."""

    def __init__(
        self,
        tokens: Mapping[str, Iterable[str]],
        *,
        anonymous: bool,
        further: Callable[[str], str | None] = lambda _digest: None,
        name: Callable[[str], str | None] = lambda _digest: None,
    ) -> None:
        """``tokens`` by tenant; ``anonymous`` is ``Settings.http_anonymous``.

        ``further`` returns the tenant of another token by its SHA-256 in hexadecimal, and ``name`` its name.
        """
        self._tenants = [(digest_of(token), tenant) for tenant, own in tokens.items() for token in own]
        self._anonymous = anonymous
        self._further = further
        self._name = name

    @classmethod
    def of_service(cls, settings: Settings, directory: TenantDirectory) -> Self:
        """Use the tokens of all tenants of a service."""
        tokens = {
            name: [token.get_secret_value() for token in tenant.api_tokens] for name, tenant in settings.tenants.items()
        }
        return cls(
            tokens, anonymous=settings.http_anonymous, further=directory.tenant_of_token, name=directory.name_of_token
        )

    def of(self, headers: MultiMapping[str]) -> str:
        """Return the tenant of a request, or raise :class:`NotAuthenticatedError`."""
        given = headers.getall("Authorization", [])
        if not given:
            # A web page may point a name of its own at this machine (DNS rebinding); the request then has that name.
            if self._anonymous and names_this_machine(headers.get("Host", "")):
                return DEFAULT
            raise NotAuthenticatedError
        scheme, _, token = given[0].partition(" ")
        tenant = self._tenant(token.strip()) if len(given) == 1 and scheme.lower() == "bearer" else None
        if tenant is None:
            raise NotAuthenticatedError
        return tenant

    def _tenant(self, token: str) -> str | None:
        """Compare with every token, so the time it takes reveals nothing about them."""
        wanted, found = digest_of(token), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, wanted):
                found = tenant
        return found or self._further(wanted)

    def credential_of(self, headers: MultiMapping[str]) -> str:
        """Name the token of a request that :meth:`of` let in, as :mod:`mediator.callers` does; "" for none."""
        token = headers.get("Authorization", "").partition(" ")[2].strip()
        digest = digest_of(token)
        return f"token {self._name(digest) or digest}" if token else ""


def names_this_machine(host: str) -> bool:
    """Whether the header ``Host`` of a request names this machine itself."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and Endpoint(name, 0).loopback
