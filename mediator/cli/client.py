"""How commands reach the service: over NATS as any client, or through its control socket; failures become one line."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Self

import typer

from mediator.cli.context_files import (
    FIELDS,
    LOGIN_FIELDS,
    TLS_FIELDS,
    Context,
    context_names,
    find_context,
    selected_context,
)
from mediator.cli.errors import CommandError
from mediator.cli.options import CommandOptions, SettingsOptions
from mediator.login import Login
from mediator.ops.units import format_count

PREFIX = "$mq9.AI."
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0

VARIABLE = "MEDIATOR_NATS_"
"""How the variables of these options begin; the option's name in capitals follows."""
CONTEXT_VARIABLE = "MEDIATOR_CONTEXT"
PANEL = "Connection"
"""The heading of these options in a command's help."""


def _file(name: str, text: str) -> Any:
    return typer.Option(metavar="FILE", help=text, envvar=VARIABLE + name, rich_help_panel=PANEL)


Server = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="NATS server to connect to.",
        envvar=VARIABLE + "SERVER",
        show_default="the service on the data directory",
        rich_help_panel=PANEL,
    ),
]
ContextName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Server and login of this context, or of a file whose path has a slash.",
        envvar=CONTEXT_VARIABLE,
        show_default="the selected one",
        autocompletion=context_names,
        rich_help_panel=PANEL,
    ),
]
User = Annotated[str | None, typer.Option(help="NATS user.", envvar=VARIABLE + "USER", rich_help_panel=PANEL)]
Password = Annotated[
    str | None, typer.Option(help="Its password.", envvar=VARIABLE + "PASSWORD", rich_help_panel=PANEL)
]
Token = Annotated[str | None, typer.Option(help="NATS token.", envvar=VARIABLE + "TOKEN", rich_help_panel=PANEL)]
Nkey = Annotated[str | None, _file("NKEY", "Log in with the nkey whose seed is in this file.")]
Creds = Annotated[str | None, _file("CREDS", "Log in with this credentials file (JWT and seed).")]
TlsCa = Annotated[str | None, _file("TLS_CA", "Trust servers whose certificate these authorities sign.")]
TlsCert = Annotated[str | None, _file("TLS_CERT", "Show the server this certificate.")]
TlsKey = Annotated[str | None, _file("TLS_KEY", "Its private key.")]


class RefusedError(CommandError):
    """The service replied with an error; ``fields`` are the rest of its reply."""


class UnansweredError(CommandError):
    """No reply: no server, no service, or not in time."""


class ReplyFields(dict[str, Any]):
    """The fields of a reply without error."""

    raw: bytes
    """The reply as the service sent it."""


@dataclass(frozen=True)
class ServerOptions:
    """Where a client connects."""

    server: Server = None
    context: ContextName = None


@dataclass(frozen=True)
class CredentialOptions:
    """As whom a client connects."""

    user: User = None
    password: Password = None
    token: Token = None
    nkey: Nkey = None
    creds: Creds = None


@dataclass(frozen=True)
class TlsOptions:
    """The files by which a client and its server know each other."""

    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None


@dataclass(frozen=True)
class NatsOptions(TlsOptions, CredentialOptions, ServerOptions):
    """Where a client connects, and as whom."""

    def login(self, service: SettingsOptions) -> Login:
        """Return these options, completed by a context, else by the service on the data directory.

        Raises :class:`UnansweredError` when no server is named and no service runs there, :class:`CommandError` for
        options that contradict each other or a context that cannot be used.
        """
        given = {name: value for name in FIELDS if (value := getattr(self, name)) is not None}
        if self.context is not None and self.context != os.environ.get(CONTEXT_VARIABLE):
            # The command line wins over the environment, and no login that is meant for one server goes to another.
            given = {name: value for name, value in given.items() if value != os.environ.get(VARIABLE + name.upper())}
            if "server" in given:
                raise CommandError("context: it has a server of its own; give either --context or --server")
            given = _complete(given, find_context(self.context))
        elif "server" not in given and not service.names_service:
            context = selected_context() if self.context is None else find_context(self.context)
            given = given if context is None else _complete(given, context)
        certificate = None
        if "server" not in given:
            given["server"], certificate = _find_server(service)
        return Login(**given, certificate=certificate)


def _complete(given: Mapping[str, str], context: Context) -> dict[str, str]:
    """Add what the context remembers; a part of one login with a part of another would be neither."""
    fields = dict(context.fields)
    for group in (LOGIN_FIELDS, TLS_FIELDS):
        if group & given.keys():
            fields = {name: value for name, value in fields.items() if name not in group}
    return {**fields, **given}


def _find_server(options: SettingsOptions) -> tuple[str, str | None]:
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
        """Connect; raises :class:`SetupError` for a login that cannot be used."""
        from nats.errors import Error as NatsError

        from mediator.nats.tls import TlsClient

        options = self._login.nats_options
        self._nats = TlsClient()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._nats.connect(
                    self._login.server.split(","),
                    name="mediator command line",
                    **options,
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


_REFUSED = {
    None: "it asks for a login; give --user and --password, --token, --nkey or --creds",
    "user": "user or password is wrong; give --user and --password",
    "token": "the token is wrong; give --token",
    "nkey": "it does not know this nkey; give --nkey",
    "creds": "it does not accept these credentials; give --creds",
}
"""What to say when a server refuses a login, by its kind."""


def _why(error: Exception, login: Login) -> str:
    """Explain why there is no connection, and what to do."""
    import socket
    import ssl

    text = str(error)
    if "authorization violation" in text.lower() or "authentication" in text.lower():
        return _REFUSED[login.kind or ("user" if "@" in login.server else None)]
    match error:
        case ssl.SSLCertVerificationError():
            reason = error.verify_message.rstrip(".")
            return f"its certificate is not trusted ({reason}); --tls-ca names a file with its authority"
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

        login = self.login(self)
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

        login = self.login(self)
        return asyncio.run(requested())
