"""Asks the service through its NATS door: who is asked as whom, the connection, and what to do with a refusal."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import nats
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from mediator.errors import BadRequestError, SetupError, UnavailableError, UnreachableError

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
"""How refusals begin that a later try may not meet."""
NOBODY = "unavailable: nobody takes messages there"
STRANGE = "unavailable: an answer that is none of the service"


@dataclass(frozen=True, slots=True)
class Server:
    """Where the service is, as whom it is asked, and how patiently."""

    servers: tuple[str, ...]
    user: str | None
    password: str | None = field(repr=False)
    patience: float
    """Seconds without any success after which it is given up."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read the options ``nats.…`` and ``timeoutSeconds``; :class:`BadRequestError` names a wrong one."""
        return cls(
            servers=tuple((options.get("nats.url") or DEFAULT_SERVER).split(",")),
            user=options.get("nats.user"),
            password=options.get("nats.password"),
            patience=whole(options, "timeoutSeconds", DEFAULT_SECONDS, MAX_SECONDS),
        )


async def connect(server: Server, closed: Callable[[], Awaitable[None]] | None = None) -> Client:
    """Connect, once and for as long as that holds; ``closed`` is called when it breaks.

    Raises :class:`SetupError` when the login is refused, :class:`UnreachableError` when nobody is there.
    """
    said: list[Exception] = []

    async def failed(error: Exception) -> None:
        said[:] = [error]

    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            return await nats.connect(
                list(server.servers),
                name="mediator pipeline",
                user=server.user,
                password=server.password,
                connect_timeout=3,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=FIRST_PAUSE,
                error_cb=failed,
                closed_cb=closed,
            )
    except (NatsError, OSError, TimeoutError, ValueError) as error:
        why = words(said[-1] if said else error)
        if "authorization violation" in why.lower():
            raise SetupError(f"nats.user: the server refuses the login, {why}") from None
        raise UnreachableError(f"cannot connect: {why}") from None


async def disconnect(client: Client) -> None:
    """Close a connection, whatever state it is in."""
    with contextlib.suppress(NatsError, OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_SECONDS):
            await client.close()


def ask(server: Server, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Make a request (``FETCH.orders``) and return its answer; it is made again where it fails for now.

    Raises :class:`BadRequestError` with the service's own words for a refusal that would be the same next time,
    :class:`UnavailableError` after ``patience`` seconds of failures, and :class:`SetupError` as :func:`connect`.
    """
    return asyncio.run(_asked(server, verb, body))


async def _asked(server: Server, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
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
        raise UnreachableError(words(error)) from None
    said = refusal(answer)
    if said.startswith(FOR_NOW):
        raise UnreachableError(said)
    if said:
        raise BadRequestError(verb, said)
    found: dict[str, Any] = orjson.loads(answer.data)
    return found


def refusal(answer: Msg) -> str:
    """Return why something was not done, "" when it was."""
    if not answer.data and (answer.headers or {}).get("Status") == "503":
        return NOBODY
    try:
        said = orjson.loads(answer.data)["error"]
    except (ValueError, KeyError, TypeError):
        return STRANGE
    return said if isinstance(said, str) else STRANGE


def words(error: Exception) -> str:
    """Return what an error says, at least its name."""
    return str(error) or type(error).__name__


def whole(options: Mapping[str, str], name: str, default: int, highest: int) -> int:
    """Return a whole number from 1 to ``highest``; :class:`BadRequestError` names the option."""
    text = options.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= highest:
        raise BadRequestError(name, f'expected a whole number from 1 to {highest}, got "{text[:40]}"')
    return int(text)
