"""How commands reach the service: over NATS as any client, or through its control socket; failures become one line."""

import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from mediator.cli.options import CommandError, CommandOptions, SettingsOptions
from mediator.errors import LoginRefusedError, MediatorError, SetupError, UnavailableError, UnreachableError
from mediator.login import MAX_FILE, Login
from mediator.system.private_files import make_folder, open_file

if TYPE_CHECKING:
    from mediator.client import Client, Reply

LOGIN_FIELDS = frozenset({"user", "password", "token", "nkey", "creds"})
TLS_FIELDS = frozenset({"tls_ca", "tls_cert", "tls_key"})
FIELDS = ("server", *sorted(LOGIN_FIELDS), *sorted(TLS_FIELDS))
"""The keys of a context's file; all values are text."""
SECRETS = frozenset({"password", "token"})
"""What is never printed."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""What a context may be called."""

DEFAULT_SERVER = "nats://127.0.0.1:4222"
"""Where commands connect if nothing names a server, as every NATS tool does."""

_ENDING = ".json"


@dataclass(frozen=True, slots=True)
class Context:
    """A remembered server; ``fields`` are :data:`FIELDS` that are set, the server always."""

    name: str
    file: Path
    fields: Mapping[str, str]

    @classmethod
    def read(cls, name: str, file: Path) -> Self:
        """Read a file; raises :class:`CommandError` that names it, and no secret."""
        try:
            with file.open("rb") as opened:
                fields = json.loads(opened.read(MAX_FILE))
        except OSError as error:
            raise CommandError(f"context {name}: cannot read {file}: {error.strerror}") from None
        except ValueError:
            raise CommandError(f"context {name}: {file} is not JSON") from None
        if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
            raise CommandError(f"context {name}: {file}: expected an object whose values are text")
        if unknown := fields.keys() - set(FIELDS):
            raise CommandError(f"context {name}: {file}: unknown {min(unknown)}, expected {', '.join(FIELDS)}")
        if not fields.get("server"):
            raise CommandError(f"context {name}: {file}: server is missing")
        return cls(name, file, fields)

    @property
    def login(self) -> Login:
        """Server and login."""
        return Login(**self.fields)

    def describe(self) -> dict[str, Any]:
        """Return what may be shown: everything but :data:`SECRETS`, and passwords in URLs."""
        login = self.login
        fields = {name: value for name, value in self.fields.items() if name not in SECRETS}
        return {"name": self.name, "selected": self.name == selected_name(), **fields, "server": login.shown} | {
            "login": login.kind or ("url" if login.shown != login.server else "none")
        }


def folder() -> Path:
    """Return where contexts are kept: below XDG_CONFIG_HOME, else ~/.config."""
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".config") / "mediator" / "contexts"


def context_names() -> list[str]:
    """Return the names of all contexts in order."""
    with suppress(OSError):
        return sorted(file.stem for file in folder().iterdir() if file.suffix == _ENDING)
    return []


def find_context(name: str) -> Context:
    """Return the context of this name, or in this file where it has a slash; raises :class:`CommandError`."""
    if "/" in name:
        return Context.read(Path(name).stem, Path(name))
    file = _context_file(name)
    if not file.is_file():
        known = ", ".join(context_names()) or "none"
        raise CommandError(f"there is no context {name}; known: {known}; `mediator context add` makes one")
    return Context.read(name, file)


def add_context(name: str, fields: Mapping[str, str]) -> Context:
    """Keep a new context; raises :class:`CommandError` where the name is taken or nothing can be written."""
    file = _context_file(name)
    for private in (file.parent.parent, file.parent):
        make_folder(private)
    try:
        write_private(file, json.dumps(dict(fields), indent=2) + "\n")
    except FileExistsError:
        raise CommandError(f"context {name} exists; remove it first: mediator context remove {name}") from None
    return Context(name, file, fields)


def remove_context(name: str) -> None:
    """Remove a context; where it is selected, none is any more. Raises :class:`CommandError` if there is none."""
    find_context(name).file.unlink()
    if selected_name() == name:
        select_context(None)


def select_context(name: str | None) -> None:
    """Use this context where nothing else names a server; None: none. Raises :class:`CommandError` if there is none."""
    if name is None:
        _selection().unlink(missing_ok=True)
        return
    find_context(name)
    new = _selection().with_suffix(".new")
    new.unlink(missing_ok=True)
    write_private(new, f"{name}\n")
    new.replace(_selection())


def selected_name() -> str | None:
    """Return the name of the selected context."""
    with suppress(OSError, UnicodeDecodeError):
        return _selection().read_text(encoding="utf-8-sig").strip() or None
    return None


def selected_context() -> Context | None:
    """Return the selected context; raises :class:`CommandError` when it is gone or cannot be used."""
    name = selected_name()
    return None if name is None else find_context(name)


def contexts() -> Iterator[Context]:
    """Read all contexts in the order of their names; raises :class:`CommandError` as :meth:`Context.read`."""
    return map(find_context, context_names())


def write_private(file: Path, text: str) -> None:
    """Write a new file that only its owner may read; raises FileExistsError where there is one."""
    with os.fdopen(open_file(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as new:
        new.write(text)


def _selection() -> Path:
    return folder().with_name("selected-context")


def _context_file(name: str) -> Path:
    if not NAME.fullmatch(name):
        raise CommandError("expected a context's name of letters, digits, -, _ and ., at most 64")
    return folder() / f"{name}{_ENDING}"


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
        show_default="the service on the data directory, else nats://127.0.0.1:4222",
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
        """Return these options, completed by a context, else by the service on the data directory, else the default.

        Raises :class:`UnreachableError` when a data directory is named or there, and no service runs on it,
        :class:`CommandError` for options that contradict each other or a context that cannot be used: a login that
        is meant for one server never goes to the default one.
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
    """Return where clients of the service on the data directory connect, and with which certificate.

    Without a data directory it is the settings' ``nats_url``, else the default server. A directory that was named, or
    is there, means its own service: another one may listen on the default port. Raises :class:`UnreachableError`.
    """
    from mediator.system.extras import has_server

    if not has_server():
        return DEFAULT_SERVER, None
    import asyncio

    from mediator.operate.control import send_command

    settings = options.load()
    try:
        answer = asyncio.run(send_command(settings.data_dir, "endpoints"))
    except UnavailableError as error:
        raise UnreachableError(str(error)) from None
    except SetupError as error:
        if (url := settings.client_nats_url) is not None:
            return url, None
        if not options.names_service and not settings.data_dir.exists():
            return DEFAULT_SERVER, None
        raise UnreachableError(
            f"{error}; start `{options.serve_command}`, or name another directory with --data-dir, or a NATS server "
            "with --server or --context"
        ) from None
    if answer["error"]:
        raise UnreachableError(f"the service on {settings.data_dir} is not ready yet")
    return answer["nats"], answer["certificate"]


_LOGIN_ADVICE = {
    None: "give --user and --password, --token, --nkey or --creds",
    "user": "give --user and --password",
    "token": "give --token",
    "nkey": "give --nkey",
    "creds": "give --creds",
}
"""What to do when a server refuses a login, by its kind."""


@contextmanager
def _without_aiohttp() -> Iterator[None]:
    """Let nats-py import no aiohttp: only its WebSockets need it, and it takes as long as all else of a command."""
    if "aiohttp" in sys.modules or "nats.aio.transport" in sys.modules:
        yield
        return
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["aiohttp"]


@asynccontextmanager
async def connect(login: Login) -> "AsyncIterator[Client]":
    """Connect once; raises :class:`UnreachableError` or :class:`LoginRefusedError`, with what to do about it."""
    with _without_aiohttp():
        from mediator.client import Client

    client = Client(login, patience=0, name="mediator command line")
    try:
        await client.__aenter__()
    except (UnreachableError, LoginRefusedError) as error:
        raise type(error)(f"{error}{_advice(error, login)}") from error
    try:
        yield client
    finally:
        await client.__aexit__()


def _advice(error: MediatorError, login: Login) -> str:
    import ssl

    if isinstance(error, LoginRefusedError):
        return f"; {_LOGIN_ADVICE[login.kind or ('user' if '@' in login.server else None)]}"
    match error.__cause__:
        case ssl.SSLCertVerificationError():
            return "; --tls-ca names a file with its authority"
        case ConnectionRefusedError():
            return "; is `mediator serve` running? --server, --context or --data-dir names another service"
    return ""


@dataclass(frozen=True)
class ClientOptions(CommandOptions, NatsOptions):
    """Options of a command that is a NATS client."""

    def run(self, work: "Callable[[Client], Awaitable[None]]", *, lasting: bool = False) -> None:
        """Connect and run ``work``; with ``lasting`` until it is interrupted."""
        import asyncio

        async def connected() -> None:
            async with connect(login) as client:
                await work(client)

        login = self.login(self)
        try:
            asyncio.run(connected())
        except KeyboardInterrupt:
            if not lasting:
                raise

    def request(
        self, verb: str, body: bytes | Mapping[str, Any] = b"", *, headers: Mapping[str, str] | None = None
    ) -> "Reply":
        """Connect for one request and return its reply; raises as :meth:`mediator.client.Client.request`."""
        import asyncio

        async def requested() -> "Reply":
            async with connect(login) as client:
                return await client.request(verb, body, headers=headers)

        login = self.login(self)
        return asyncio.run(requested())
