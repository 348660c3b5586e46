"""How commands reach the service: over NATS as any client, or through its control socket; failures become one line."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from mediator.cli.errors import CommandError
from mediator.cli.options import CommandOptions
from mediator.endpoint import without_login
from mediator.ops.units import format_count

if TYPE_CHECKING:
    import ssl

PREFIX = "$mq9.AI."
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0

Server = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="NATS server to connect to.",
        envvar="MEDIATOR_NATS_SERVER",
        show_default="the service on the data directory",
    ),
]
User = Annotated[str | None, typer.Option(help="NATS user.", envvar="MEDIATOR_NATS_USER")]
Password = Annotated[str | None, typer.Option(help="Its password.", envvar="MEDIATOR_NATS_PASSWORD")]


class RefusedError(CommandError):
    """The service replied with an error; ``fields`` are the rest of its reply."""


class UnansweredError(CommandError):
    """No reply: no server, no service, or not in time."""


class ReplyFields(dict[str, Any]):
    """The fields of a reply without error."""

    raw: bytes
    """The reply as the service sent it."""


@dataclass(frozen=True)
class NatsOptions:
    """Where a client connects, and as whom."""

    server: Server = None
    user: User = None
    password: Password = None


@dataclass(frozen=True, slots=True)
class Login:
    """Where to connect, and as whom."""

    server: str
    user: str | None = None
    password: str | None = None
    certificate: str | None = None
    """The server's certificate in PEM; None: it must be one that this machine trusts."""

    @classmethod
    def of(cls, nats: NatsOptions, service: CommandOptions) -> Self:
        """Use the server that is named, else that of the service on the data directory.

        Raises :class:`UnansweredError` when none is named and no service runs there.
        """
        url, certificate = (nats.server, None) if nats.server is not None else _find_server(service)
        return cls(url, nats.user, nats.password, certificate)

    @property
    def shown(self) -> str:
        """The servers without user names and passwords."""
        return without_login(self.server)

    @property
    def tls(self) -> "ssl.SSLContext":
        """The settings by which the client verifies the server."""
        import ssl

        context = ssl.create_default_context(cadata=self.certificate)
        if self.certificate is not None:
            # Exactly this certificate is trusted, whoever signed it and whatever name it bears.
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


def _find_server(options: CommandOptions) -> tuple[str, str | None]:
    """Ask the service on the data directory where its clients connect, and with which certificate.

    Where none runs, only a ``nats_url`` in the settings is used: another service may listen on the default port.
    Raises :class:`UnansweredError`.
    """
    from mediator.errors import SetupError, UnavailableError
    from mediator.ops.control import send_command

    settings = options.load()
    try:
        answer = asyncio.run(send_command(settings.data_dir, "endpoints"))
    except UnavailableError as error:
        raise UnansweredError(str(error)) from None
    except SetupError as error:
        if (url := settings.client_nats_url) is not None:
            return url, None
        raise UnansweredError(
            f"{error}; start `{options.serve_command}`, or name another directory with --data-dir, or a NATS server "
            "with --server"
        ) from None
    if answer["error"]:
        raise UnansweredError(f"the service on {settings.data_dir} is not ready yet")
    return answer["nats"], answer["certificate"]


class Client:
    """A connection, used as ``async with``. Raises :class:`UnansweredError` when it cannot be made."""

    def __init__(self, login: Login, *, lasting: bool = False) -> None:
        """``lasting``: reconnect when the connection breaks, for as long as it takes."""
        self._login = login
        self._lasting = lasting
        self._errors: list[Exception] = []

    async def __aenter__(self) -> Self:
        """Connect."""
        from nats.errors import Error as NatsError

        from mediator.nats.tls import TlsClient

        self._nats = TlsClient()
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
            # It tries until the time is up; the reason is the error of the last attempt.
            why = _why(self._errors[-1] if self._errors else error, self._login)
            raise UnansweredError(f"cannot connect to {self._login.shown}: {why}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self._nats.close()

    async def _failed(self, error: Exception) -> None:
        self._errors = [error]

    async def request(
        self,
        verb: str,
        body: bytes | Mapping[str, Any] = b"",
        *,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> ReplyFields:
        """Send a request of a verb and return the reply. ``wait``: seconds the service itself may wait.

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
                f"payload: {format_count(len(data), 'byte')}, this NATS server takes at most {self._nats.max_payload}"
            ) from None
        except TimeoutError:
            # The server reports a missing permission beside the request.
            refused = f": {self._errors[-1]}" if self._errors else ""
            raise UnansweredError(f"no answer from {self._login.shown} within {seconds:g} s{refused}") from None
        except (NatsError, OSError) as error:
            raise UnansweredError(f"{self._login.shown}: {error or type(error).__name__}") from None
        try:
            fields = ReplyFields(orjson.loads(message.data))
            text = fields.get("error") or ""
        except (ValueError, TypeError):
            raise UnansweredError("the reply is not from a mediator") from None
        if text:
            raise RefusedError(str(text), **{name: value for name, value in fields.items() if name != "error"})
        fields.raw = message.data
        return fields


def _why(error: Exception, login: Login) -> str:
    """Explain why there is no connection, and what to do."""
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


@dataclass(frozen=True)
class ClientOptions(CommandOptions, NatsOptions):
    """Options of a command that is a NATS client."""

    def run(self, work: Callable[[Client], Awaitable[None]], *, lasting: bool = False) -> None:
        """Connect and run ``work``; with ``lasting`` until it is interrupted."""

        async def connected() -> None:
            async with Client(login, lasting=lasting) as client:
                await work(client)

        login = Login.of(self, self)
        try:
            asyncio.run(connected())
        except KeyboardInterrupt:
            if not lasting:
                raise

    def request(
        self, verb: str, body: bytes | Mapping[str, Any] = b"", *, headers: Mapping[str, str] | None = None
    ) -> ReplyFields:
        """Connect for one request and return its reply; raises as :meth:`Client.request`."""

        async def requested() -> ReplyFields:
            async with Client(login) as client:
                return await client.request(verb, body, headers=headers)

        login = Login.of(self, self)
        return asyncio.run(requested())
