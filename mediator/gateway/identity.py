"""Who a client is: the service is asked for its tenant, and each tenant has so many connections (A6, S7).

The question goes on the client's own connection, so that nats-server vouches for it. It carries a secret token, and
any instance of the service may take it. The answer comes back to the gateway as a control message, which clients can
neither forge nor see.
"""

import base64
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import orjson
import structlog
from nats.errors import Error as NatsError

from mediator.errors import BadRequestError, QuotaExceededError, TenantRefusedError
from mediator.nats import control_messages, subjects
from mediator.nats.accounts import AccountMap
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection
from mediator.nats.verbs import PendingRequest, Verb
from mediator.tenants.directory import TenantDirectory

ANSWER_SECONDS: Final = 2.0
"""For the service to answer."""
_SECRET: Final = re.compile(r"[a-z2-7]{26}")

log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Who a client is."""

    tenant: str
    account: str | None
    """The NATS account, None where tenants have none."""
    user: str = ""
    """The login, where the server tells it."""
    connection: str = ""
    """What the server calls the client's connection, where it tells that."""


class ClientIdentities:
    """The questions of one gateway."""

    def __init__(self, connection: NatsConnection, clock: Callable[[], float]) -> None:
        """``connection`` is the service's own login; ``clock`` gives seconds that never go back."""
        self._name = _new_secret()
        self._connection = connection
        self._clock = clock
        self._asked: dict[str, tuple[Callable[[ClientIdentity | None], None], float]] = {}
        """What takes the answer to each question, and when that was asked, in this order."""

    async def open(self) -> None:
        """Start listening."""
        await self._connection.subscribe_control(control_messages.GATEWAY + self._name, "", self._receive)
        await self._connection.flush(5)

    @property
    def connected(self) -> bool:
        """Whether answers can come."""
        return self._connection.connected

    def make_identity_request(self) -> tuple[str, bytes]:
        """Return a new token, and the body of the question, which the client's connection must publish."""
        token = _new_secret()
        return token, orjson.dumps({"gateway": self._name, "token": token})

    def expect(self, token: str, on_answer: Callable[[ClientIdentity | None], None]) -> None:
        """Have ``on_answer`` called with the answer to a question, or None if none comes in time."""
        self._asked[token] = on_answer, self._clock()

    def expire(self) -> None:
        """Give up the questions that were not answered in time."""
        last = self._clock() - ANSWER_SECONDS
        while self._asked:
            token, (on_answer, at) = next(iter(self._asked.items()))
            if at > last:
                return
            del self._asked[token]
            on_answer(None)

    def _receive(self, message: Request) -> None:
        answer = orjson.loads(message.data)
        asked = self._asked.pop(answer["token"], None)
        if asked is not None:
            more = (answer.get(name, "") for name in ("user", "connection"))
            asked[0](ClientIdentity(answer["tenant"], answer["account"], *more))


def identity_verb(connection: NatsConnection) -> Verb:
    """Return the verb with which the service answers gateways."""

    async def answer(pending: PendingRequest) -> bytes:
        gateway, token = (pending.fields.text(name, 64) or "" for name in ("gateway", "token"))
        for name, value in (("gateway", gateway), ("token", token)):
            if not _SECRET.fullmatch(value):
                raise BadRequestError(name, "expected 26 characters of lowercase base32")
        account, _ = subjects.split_request(pending.message.subject)
        # Without accounts the client could have written itself who it is.
        client = pending.message.client.connection if account is not None else ""
        answer = {"token": token, "tenant": pending.tenant, "account": account, "connection": client}
        body = orjson.dumps({**answer, "user": pending.message.login})
        with suppress(NatsError):
            # Without an answer the gateway asks again.
            await connection.publish([connection.seal(control_messages.GATEWAY + gateway, body)])
        return b""

    return Verb("OPEN", answer)


def _new_secret() -> str:
    """Return a name that cannot be guessed: 130 random bits in lowercase base32."""
    return base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]


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

    @property
    def tenant(self) -> str | None:
        """The tenant; None: it is in none, or that is not known."""
        return self._tenant

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
