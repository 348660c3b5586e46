"""How a client logs in, and how it knows the server: the options, and the login and servers they make."""

import ssl
from dataclasses import replace
from pathlib import Path
from typing import TypedDict
from urllib.parse import SplitResult, unquote, urlsplit

from mediator.errors import SetupError
from mediator.login import Login


class LoginOptions(TypedDict, total=False):
    """Options that say who connects. Without any: nobody in particular, which a server may allow."""

    user: str | None
    """A NATS user, with its ``password``. Both may stand in the URL instead."""
    password: str | None
    token: str | None
    nkey: str | Path | None
    """The file that holds the seed of an nkey."""
    creds: str | Path | None
    """A credentials file, with JWT and seed."""
    tls: ssl.SSLContext | str | Path | None
    """What the server's certificate is checked with: a file of authorities in PEM, or a context of your own.

    None: what this machine trusts. Whether there is TLS, the server says; with a ``tls://`` URL, one that does not
    encrypt is refused before anything is sent to it.
    """


def read_login(url: str | Login, options: LoginOptions) -> tuple[Login, ssl.SSLContext | None]:
    """Return where to connect and as whom, and the context that was given; a login stays as it is."""
    if isinstance(url, Login):
        return url, None
    tls = options.get("tls")
    context = tls if isinstance(tls, ssl.SSLContext) else None
    files = {"nkey": options.get("nkey"), "creds": options.get("creds"), "tls_ca": None if context else tls}
    return Login(
        url,
        user=options.get("user"),
        password=options.get("password"),
        token=options.get("token"),
        **{name: None if path is None else str(path) for name, path in files.items()},
    ), context


def split_servers(login: Login) -> tuple[list[str], Login]:
    """Return the servers without a login, and the login with the one that a URL may hold.

    Raises :class:`SetupError`.
    """
    servers: list[str] = []
    for text in login.server.split(","):
        server = text.strip() if "://" in text else f"nats://{text.strip()}"
        try:
            part = urlsplit(server)
            port = part.port or 4222
        except ValueError as error:
            raise SetupError(f"url: {error}; expected nats://HOST:PORT") from None
        if part.scheme not in ("nats", "tls") or not part.hostname:
            raise SetupError("url: expected nats://HOST:PORT or tls://HOST:PORT")
        if login.kind is None:
            login = _with_login_of(login, part)
        host = f"[{part.hostname}]" if ":" in part.hostname else part.hostname
        servers.append(f"{part.scheme}://{host}:{port}")
    return servers, login


def _with_login_of(login: Login, part: SplitResult) -> Login:
    if part.username is None:
        return login
    if part.password is None:
        return replace(login, token=unquote(part.username))
    return replace(login, user=unquote(part.username), password=unquote(part.password))
