"""A NATS client for one command: connects, asks the service, and turns what can go wrong into one line."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mediator.cli.failing import CommandError
from mediator.cli.options import load, serve_command
from mediator.endpoint import without_login
from mediator.operators.spans import show_count

if TYPE_CHECKING:
    import ssl

PREFIX = "$mq9.AI."
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0


class RefusedError(CommandError):
    """The service answered with an error; ``fields`` are the rest of its reply."""


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
    certificate: str | None = None
    """In PEM, the one that the server is known to have; None: it must be one that this machine trusts."""

    @classmethod
    def of(
        cls,
        server: str | None,
        user: str | None,
        password: str | None,
        config: Path | None,
        data_dir: Path | None,
    ) -> Self:
        """Take the server that was named, else that of the service on the data directory.

        Raises :class:`UnansweredError` when none was named and no service runs there.
        """
        if server is not None:
            return cls(server, user, password)
        found, certificate = _service(config, data_dir)
        return cls(found, user, password, certificate)

    @property
    def shown(self) -> str:
        """The servers without what may be secret."""
        return without_login(self.server)

    @property
    def tls(self) -> "ssl.SSLContext":
        """What the client checks the server by."""
        import ssl

        context = ssl.create_default_context(cadata=self.certificate)
        if self.certificate is not None:
            # It is this very one, whoever signed it, and whatever name this machine has for its own service.
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


def _service(config: Path | None, data_dir: Path | None) -> tuple[str, str | None]:
    """Ask the service on the data directory where its clients connect, and with which certificate.

    Where none runs, only a ``nats_url`` in the settings leads anywhere: what listens on a default port may be another
    service. Raises :class:`UnansweredError`.
    """
    from mediator.errors import SetupError, UnavailableError
    from mediator.operators.control import ask

    settings = load(config, data_dir=data_dir)
    try:
        answer = asyncio.run(ask(settings.data_dir, "endpoints"))
    except UnavailableError as error:
        raise UnansweredError(str(error)) from None
    except SetupError as error:
        if (url := settings.client_nats_url) is not None:
            return url, None
        start = serve_command(config, data_dir)
        raise UnansweredError(
            f"{error}; start `{start}`, or name another directory with --data-dir, or a NATS server with --server"
        ) from None
    if answer["error"]:
        raise UnansweredError(f"the service on {settings.data_dir} is not ready yet")
    return answer["nats"], answer["certificate"]


class Client:
    """A connection, used as ``async with``. Raises :class:`UnansweredError` when it cannot be had."""

    def __init__(self, login: Login, *, lasting: bool = False) -> None:
        """``lasting``: a connection that breaks is made anew, for as long as it takes."""
        self._login = login
        self._lasting = lasting
        self._said: list[Exception] = []

    async def __aenter__(self) -> Self:
        """Connect."""
        from nats.errors import Error as NatsError

        from mediator.nats.encrypting import EncryptingClient

        self._nats = EncryptingClient()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._nats.connect(
                    self._login.server.split(","),
                    name="mediator command line",
                    user=self._login.user,
                    password=self._login.password,
                    tls=self._login.tls,
                    connect_timeout=3,
                    allow_reconnect=self._lasting,
                    max_reconnect_attempts=-1 if self._lasting else 1,
                    reconnect_time_wait=0.2,  # type: ignore[arg-type]  # parts of a second do
                    error_cb=self._failed,
                )
        except (NatsError, OSError, TimeoutError, ValueError) as error:
            await self._nats.close()
            # It tries until the time is up; the reason is what the last attempt met.
            why = _why(self._said[-1] if self._said else error, self._login)
            raise UnansweredError(f"cannot connect to {self._login.shown}: {why}") from error
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
                f"payload: {show_count(len(data), 'byte')}, this NATS server takes at most {self._nats.max_payload}"
            ) from None
        except TimeoutError:
            # What the server does not permit, it says beside the request.
            refused = f": {self._said[-1]}" if self._said else ""
            raise UnansweredError(f"no answer from {self._login.shown} within {seconds:g} s{refused}") from None
        except (NatsError, OSError) as error:
            raise UnansweredError(f"{self._login.shown}: {error or type(error).__name__}") from None
        try:
            fields = orjson.loads(message.data)
            text = fields.get("error") or ""
        except (ValueError, AttributeError):
            raise UnansweredError("the answer is not of a mediator") from None
        if text:
            raise RefusedError(str(text), **{name: value for name, value in fields.items() if name != "error"})
        return Answer(message.data, fields)


def _why(error: Exception, login: Login) -> str:
    """Say why there is no connection, and what to do."""
    import socket
    import ssl

    text = str(error)
    if "authorization violation" in text.lower() or "authentication" in text.lower():
        wrong = "user or password is wrong" if login.user or "@" in login.server else "it asks for a login"
        return f"{wrong}; give --user and --password"
    match error:
        case ssl.SSLCertVerificationError():
            reason = error.verify_message.rstrip(".")
            return f"its certificate is not trusted ({reason}); SSL_CERT_FILE names a file with its authority"
        case ssl.SSLError():
            return f"TLS failed ({error.reason or text})"
        case ConnectionRefusedError():
            return "nothing listens there; is `mediator serve` running?"
        case socket.gaierror():
            return "no such host"
        case TimeoutError():
            return f"no NATS server answers there within {CONNECT_SECONDS:g} s"
    if "expecting INFO" in text or "json parse" in text:
        return "it is not a NATS server"
    return text.removeprefix("nats: ") or type(error).__name__


def talk(login: Login, work: Callable[[Client], Awaitable[None]], *, lasting: bool = False) -> None:
    """Run a command's conversation; one that is ``lasting`` ends when it is interrupted."""

    async def conversation() -> None:
        async with Client(login, lasting=lasting) as client:
            await work(client)

    try:
        asyncio.run(conversation())
    except KeyboardInterrupt:
        if not lasting:
            raise
