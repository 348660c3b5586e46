"""Requests to the service over NATS: server and login, the connection, and the handling of refusals."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import nats
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from mediator.errors import BadRequestError, SetupError, UnavailableError, UnreachableError
from mediator.login import Login
from pipeline.source.options import LOGIN, read_integer

SUBJECT = "$mq9.AI.MSG."
DEFAULT_SERVER = "nats://127.0.0.1:4222"
DEFAULT_SECONDS = 60
MAX_SECONDS = 3600
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""How long an answer may take; the longest wait of a FETCH is below it (F2)."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
FOR_NOW = ("unavailable:", "quota_exceeded:", "archive_backlog_full:")
"""Prefixes of temporary refusals."""
NOBODY = "unavailable: nobody takes messages there"
STRANGE = "unavailable: an answer that is none of the service"


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Servers, login, and how long to retry."""

    login: Login
    patience: float
    """Seconds without success after which to give up."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options ``nats.…`` and ``timeoutSeconds``; :class:`BadRequestError` names a wrong one."""
        return cls(
            login=Login(
                **{"server": DEFAULT_SERVER} | {LOGIN[name]: options[name] for name in LOGIN if options.get(name)}
            ),
            patience=read_integer(options, "timeoutSeconds", 1, MAX_SECONDS) or DEFAULT_SECONDS,
        )


async def connect(server: ServiceOptions, closed: Callable[[], Awaitable[None]] | None = None) -> Client:
    """Connect once, without reconnecting; ``closed`` is called when the connection breaks.

    Raises :class:`SetupError` when the login is refused or cannot be used, and :class:`UnreachableError` when no
    server answers.
    """
    errors: list[Exception] = []
    login = server.login.nats_options

    async def failed(error: Exception) -> None:
        errors[:] = [error]

    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            return await nats.connect(
                server.login.server.split(","),
                name="mediator pipeline",
                **login,
                connect_timeout=3,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=FIRST_PAUSE,
                error_cb=failed,
                closed_cb=closed,
            )
    except (NatsError, OSError, TimeoutError, ValueError) as error:
        why = error_text(errors[-1] if errors else error)
        if "authorization violation" in why.lower():
            raise SetupError(f"nats.{server.login.kind or 'url'}: the server refuses the login, {why}") from None
        raise UnreachableError(f"cannot connect: {why}") from None


async def disconnect(client: Client) -> None:
    """Close a connection in any state."""
    with contextlib.suppress(NatsError, OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_SECONDS):
            await client.close()


def request(server: ServiceOptions, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Make a request (``FETCH.orders``) and return its answer; temporary failures are retried.

    Raises :class:`BadRequestError` with the service's error for a permanent refusal,
    :class:`UnavailableError` after ``patience`` seconds of failures, and :class:`SetupError` as :func:`connect`.
    """
    return asyncio.run(_asked(server, verb, body))


async def _asked(server: ServiceOptions, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    now = asyncio.get_running_loop().time
    begun, pause = now(), FIRST_PAUSE
    while True:
        try:
            client = await connect(server)
            try:
                return await _answer(client, verb, body)
            finally:
                await disconnect(client)
        except UnreachableError as error:
            if now() - begun > server.patience:
                raise UnavailableError(f"{verb} was not answered in {server.patience:g} s: {error}") from None
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)


async def _answer(client: Client, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    try:
        answer = await client.request(SUBJECT + verb, orjson.dumps(body), timeout=ANSWER_SECONDS)
    except NoRespondersError:
        raise UnreachableError(NOBODY) from None
    except (NatsError, OSError, TimeoutError) as error:
        raise UnreachableError(error_text(error)) from None
    reason = refusal(answer)
    if reason.startswith(FOR_NOW):
        raise UnreachableError(reason)
    if reason:
        raise BadRequestError(verb, reason)
    found: dict[str, Any] = orjson.loads(answer.data)
    return found


def refusal(answer: Msg) -> str:
    """Return the error of a reply, "" on success."""
    if not answer.data and (answer.headers or {}).get("Status") == "503":
        return NOBODY
    try:
        reason = orjson.loads(answer.data)["error"]
    except (ValueError, KeyError, TypeError):
        return STRANGE
    return reason if isinstance(reason, str) else STRANGE


def error_text(error: Exception) -> str:
    """Return an error's text, or its class name."""
    return str(error) or type(error).__name__
