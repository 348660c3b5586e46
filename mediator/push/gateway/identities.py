"""Asks the service which tenant a client is: on the client's own connection, so that nats-server vouches for it (A6).

The question carries a secret token, and any instance of the service may take it. The answer comes back to the gateway
as a control message, which clients can neither forge nor see.
"""

import base64
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson
import structlog
from nats.errors import Error as NatsError

from mediator.errors import BadRequestError
from mediator.nats import control_messages, subjects
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection
from mediator.nats.verbs import Verb, VerbCall

if TYPE_CHECKING:
    from mediator.push.gateway.session import GatewaySession

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
        self._asked: dict[str, tuple[GatewaySession, float]] = {}

    async def open(self) -> None:
        """Start listening."""
        await self._connection.subscribe_control(control_messages.GATEWAY + self._name, "", self._receive)
        await self._connection.settle(5)

    @property
    def connected(self) -> bool:
        """Whether answers can come."""
        return self._connection.connected

    def ask(self, client: "GatewaySession") -> tuple[str, bytes]:
        """Return a new token, and the body of the question, which the client's connection must publish at once."""
        token = _new_secret()
        self._asked[token] = client, self._clock()
        return token, orjson.dumps({"gateway": self._name, "token": token})

    def expire(self) -> None:
        """Give up the questions that were not answered in time."""
        last = self._clock() - ANSWER_SECONDS
        # They are in the order in which they were asked.
        while self._asked:
            token, (client, at) = next(iter(self._asked.items()))
            if at > last:
                return
            del self._asked[token]
            client.unidentified(token)

    def _receive(self, message: Request) -> None:
        answer = orjson.loads(message.data)
        asked = self._asked.pop(answer["token"], None)
        if asked is not None:
            more = (answer.get(name, "") for name in ("user", "connection"))
            identity = ClientIdentity(answer["tenant"], answer["account"], *more)
            asked[0].identified(answer["token"], identity)


def identity_verb(connection: NatsConnection) -> Verb:
    """Return the verb with which the service answers gateways."""

    async def answer(call: VerbCall) -> bytes:
        gateway, token = (call.fields.text(name, 64) or "" for name in ("gateway", "token"))
        for name, value in (("gateway", gateway), ("token", token)):
            if not _SECRET.fullmatch(value):
                raise BadRequestError(name, "expected 26 characters of lowercase base32")
        account, _ = subjects.split_request(call.message.subject)
        # Without accounts the client could have written itself who it is.
        client = call.message.client.connection if account is not None else ""
        answer = {"token": token, "tenant": call.tenant, "account": account, "connection": client}
        body = orjson.dumps({**answer, "user": call.message.login})
        with suppress(NatsError):
            # Without an answer the gateway asks again.
            await connection.publish([connection.seal(control_messages.GATEWAY + gateway, body)])
        return b""

    return Verb("OPEN", answer)


def _new_secret() -> str:
    """Return a name that cannot be guessed: 130 random bits in lowercase base32."""
    return base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]
