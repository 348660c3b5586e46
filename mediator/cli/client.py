"""A NATS client for one command: connects, asks the service, and turns what can go wrong into one line."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import typer

from mediator.cli.failing import CommandError

PREFIX = "$mq9.AI."
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
DEFAULT_SERVER = "nats://127.0.0.1:4222"


class RefusedError(CommandError):
    """The service answered with an error; ``raw`` is its whole reply."""

    def __init__(self, text: str, raw: bytes) -> None:
        super().__init__(text)
        self.raw = raw


class UnansweredError(CommandError):
    """Nobody answered: no server, no service, or not in time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply without error."""

    raw: bytes
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Login:
    """Where to connect, and as whom."""

    server: str
    user: str | None = None
    password: str | None = None

    @classmethod
    def of(cls, server: str | None, user: str | None, password: str | None) -> Self:
        """Fill in what the options leave out: the settings of this machine's service, else its defaults."""
        return cls(server or default_server(), user, password)

    @property
    def shown(self) -> str:
        """The servers without what may be secret."""
        return ",".join(_without_login(url) for url in self.server.split(","))


def default_server() -> str:
    """Where the service configured here is reached, in the eyes of a client."""
    if not any(name.upper().startswith("MEDIATOR_") for name in os.environ):
        return DEFAULT_SERVER
    from mediator.settings import Settings

    settings = Settings.load()
    if settings.nats_url is not None:
        url = settings.nats_url.get_secret_value()
        # With accounts, the login there is the service's own: it sees all tenants and is none.
        return ",".join(map(_without_login, url.split(","))) if settings.nats_accounts else url
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.nats.host, settings.nats.host)
    return f"nats://[{host}]:{settings.nats.port}" if ":" in host else f"nats://{host}:{settings.nats.port}"


def _without_login(url: str) -> str:
    parts = urlsplit(url.strip())
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


class Client:
    """A connection, used as ``async with``. Raises :class:`UnansweredError` when it cannot be had."""

    def __init__(self, login: Login, *, lasting: bool = False) -> None:
        """``lasting``: a connection that breaks is made anew, for as long as it takes."""
        self._login = login
        self._lasting = lasting
        self._said: list[Exception] = []

    async def __aenter__(self) -> Self:
        """Connect."""
        import nats
        from nats.errors import Error as NatsError

        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                self._nats = await nats.connect(
                    self._login.server.split(","),
                    name="mediator command line",
                    user=self._login.user,
                    password=self._login.password,
                    connect_timeout=3,
                    allow_reconnect=self._lasting,
                    max_reconnect_attempts=-1 if self._lasting else 1,
                    reconnect_time_wait=0.2,
                    error_cb=self._failed,
                )
        except (NatsError, OSError, TimeoutError, ValueError) as error:
            why = self._said[-1] if self._said else error
            raise UnansweredError(
                f"cannot connect to {self._login.shown}: {why or type(why).__name__}; is `mediator serve` running?"
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self._nats.close()

    async def _failed(self, error: Exception) -> None:
        self._said = [error]

    async def ask(
        self,
        verb: str,
        body: bytes | Mapping[str, Any] = b"",
        *,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> Answer:
        """Ask on the subject of a verb, and return the reply. ``wait``: seconds the service itself may wait.

        Raises :class:`RefusedError` with the service's own words, :class:`UnansweredError` when none came.
        """
        import orjson
        from nats.errors import Error as NatsError
        from nats.errors import MaxPayloadError, NoRespondersError

        data = body if isinstance(body, bytes) else orjson.dumps(dict(body))
        seconds = ANSWER_SECONDS + wait
        try:
            message = await self._nats.request(
                PREFIX + verb, data, timeout=seconds, headers=dict(headers) if headers else None
            )
        except NoRespondersError:
            raise UnansweredError(f"no mediator answers on {self._login.shown}") from None
        except MaxPayloadError:
            raise UnansweredError(
                f"payload: {len(data)} bytes, this NATS server takes at most {self._nats.max_payload}"
            ) from None
        except TimeoutError:
            raise UnansweredError(f"no answer from {self._login.shown} within {seconds:g} s") from None
        except (NatsError, OSError) as error:
            raise UnansweredError(f"{self._login.shown}: {error or type(error).__name__}") from None
        try:
            fields = orjson.loads(message.data)
            text = fields.get("error") or ""
        except (ValueError, AttributeError):
            raise UnansweredError("the answer is not of a mediator") from None
        if text:
            raise RefusedError(str(text), message.data)
        return Answer(message.data, fields)


def talk(login: Login, work: Callable[[Client], Awaitable[None]], *, as_json: bool, lasting: bool = False) -> None:
    """Run a command's conversation; with ``as_json`` a refusal's reply is printed as well."""

    async def conversation() -> None:
        async with Client(login, lasting=lasting) as client:
            await work(client)

    try:
        asyncio.run(conversation())
    except RefusedError as error:
        if as_json:
            typer.echo(error.raw.decode())
        raise
    except KeyboardInterrupt:
        # The way to end what goes on for ever.
        if not lasting:
            raise
