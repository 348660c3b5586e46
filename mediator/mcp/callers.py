"""The connections of the MCP server to the mediator: one for each tenant that calls, made when it is first needed."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from mcp.server.mcpserver import Context

from mediator.client import Client
from mediator.errors import BadRequestError, MailboxExistsError, MediatorError
from mediator.login import Login
from mediator.mcp.results import CallerIdentity, CreateResult

PROBE = "PUBLIC.LIST"
"""A request that changes nothing, to learn whether the mediator answers."""
TENANT = "mediator.tenant"
"""Key of an HTTP request's ASGI scope: whose token it has."""


PATIENCE = 5.0
"""Seconds for which a tool tries again while the mediator is away or busy."""


class Caller:
    """A tenant that calls tools, with its connection."""

    def __init__(self, client: Client, login: Login) -> None:
        self.login = login
        self.request = client.request
        self.mailbox = ""
        """The caller's own mailbox; empty if it has none."""
        self.reachable_at = ""
        """The address of that for others: it only takes mail (A10)."""

    def own(self, address: str, field: str = "address") -> str:
        """Return the address, or the caller's own where it is empty; :class:`BadRequestError` where it has none."""
        if not (address := address or self.mailbox):
            raise BadRequestError(field, "expected an address, since you have no mailbox of your own")
        return address

    async def create_mailbox(self, fields: Mapping[str, Any]) -> CreateResult:
        """Create a mailbox that may be there already."""
        try:
            reply = await self.request("MAILBOX.CREATE", fields, repeatable=bool(fields.get("name")))
            made = CreateResult(address=reply["mail_address"], created=True)
        except MailboxExistsError:
            made = CreateResult(address=fields["name"], created=False)
            reply = await self.request(f"MSG.QUERY.{fields['name']}", {"limit": 1, "headers_only": True})
        if reply.get("send_address"):
            made["send_address"] = reply["send_address"]
        return made

    async def have_mailbox(self, address: str) -> None:
        """Make an address the caller's own mailbox."""
        made = await self.create_mailbox({"name": address})
        self.mailbox, self.reachable_at = address, made.get("send_address", address)


class Callers:
    """All callers of a server, by tenant; over stdio there is one, whose tenant is nobody's business but NATS's."""

    def __init__(self, login_of: Callable[[str], Awaitable[Login]], mailbox: str) -> None:
        """``login_of`` says as whom to connect for a tenant, "" over stdio; raises what a tool then reports.

        ``mailbox`` is the own mailbox of each; it is made when it is not there yet.
        """
        self._login_of = login_of
        self.mailbox = mailbox
        self._callers: dict[str, Caller] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start without a connection: assistants list the tools also while the mediator is away."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._stack.aclose()

    async def of(self, request: "Request") -> Caller:
        """Return the caller of a tool, connected; after an error of connecting or CREATE it tries again next time."""
        tenant = tenant_of(request)
        async with self._locks[tenant]:
            if tenant not in self._callers:
                async with AsyncExitStack() as stack:
                    login = await self._login_of(tenant)
                    client = await stack.enter_async_context(_client(login))
                    caller = Caller(client, login)
                    if self.mailbox:
                        await caller.have_mailbox(self.mailbox)
                    self._stack.push_async_exit(stack.pop_all())
                self._callers[tenant] = caller
            return self._callers[tenant]

    async def identify(self, request: "Request") -> CallerIdentity:
        """Describe the caller of a tool, and ask whether the mediator answers."""
        identity = CallerIdentity(reachable=False)
        if tenant := tenant_of(request):
            identity["tenant"] = tenant
        if self.mailbox:
            identity["mailbox"] = self.mailbox
        try:
            caller = await self.of(request)
            identity["server"] = caller.login.shown
            if caller.login.user is not None:
                identity["user"] = caller.login.user
            if caller.reachable_at:
                identity["send_address"] = caller.reachable_at
            await caller.request(PROBE, {"limit": 1})
        except MediatorError as error:
            identity["problem"] = str(error)
        else:
            identity["reachable"] = True
        return identity


Request = Context[Callers, Any]
"""A call of a tool, or the reading of a resource."""


async def caller_of(request: Request) -> Caller:
    """Return who calls, connected."""
    return await request.request_context.lifespan_context.of(request)


def _client(login: Login) -> Client:
    return Client(
        login.server,
        patience=PATIENCE,
        name="mediator mcp",
        user=login.user,
        password=login.password,
        token=login.token,
        nkey=login.nkey,
        creds=login.creds,
        tls=login.tls,
    )


def tenant_of(request: "Request") -> str:
    """Return whose token an HTTP request has; "" over stdio."""
    http = request.request_context.request
    return "" if http is None else str(http.scope[TENANT])
