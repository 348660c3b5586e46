"""Who a client is to a NATS server, and how it knows the server: the options, as nats-py takes them."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import SplitResult, unquote, urlsplit

from mediator.errors import BadRequestError


class Login(TypedDict, total=False):
    """Options that say who connects. Without any: nobody in particular, which a server may allow."""

    user: str | None
    """A NATS user, with its ``password``. Both may stand in the URL instead."""
    password: str | None
    token: str | None
    nkey: str | Path | None
    """The seed of an nkey (``SU…``), or the file that holds it."""
    creds: str | Path | None
    """A credentials file, with JWT and seed."""
    tls: ssl.SSLContext | str | Path | None
    """What the server's certificate is checked with: a file of authorities in PEM, or a context of your own.

    None: what this machine trusts. Whether there is TLS, the server says; with a ``tls://`` URL, one that does not
    encrypt is refused before anything is sent to it.
    """


def split_servers(url: str) -> tuple[list[str], Login]:
    """Split URLs that are joined by commas from the login that one of them may hold.

    Raises :class:`BadRequestError` naming ``url``.
    """
    servers: list[str] = []
    login = Login()
    for text in url.split(","):
        server = text.strip() if "://" in text else f"nats://{text.strip()}"
        try:
            part = urlsplit(server)
            port = part.port or 4222
        except ValueError as error:
            raise BadRequestError("url", f"{error}; expected nats://HOST:PORT") from None
        if part.scheme not in ("nats", "tls") or not part.hostname:
            raise BadRequestError("url", "expected nats://HOST:PORT or tls://HOST:PORT")
        login = login or _login_of(part)
        host = f"[{part.hostname}]" if ":" in part.hostname else part.hostname
        servers.append(f"{part.scheme}://{host}:{port}")
    return servers, login


def _login_of(part: SplitResult) -> Login:
    if part.username is None:
        return Login()
    if part.password is None:
        return Login(token=unquote(part.username))
    return Login(user=unquote(part.username), password=unquote(part.password))


def tls_context(tls: ssl.SSLContext | str | Path | None) -> ssl.SSLContext:
    """Return the context that checks the server; raises :class:`BadRequestError` naming ``tls`` for a bad file."""
    if isinstance(tls, ssl.SSLContext):
        return tls
    try:
        return ssl.create_default_context(cafile=None if tls is None else str(tls))
    except OSError as error:
        raise BadRequestError("tls", f"cannot read authorities in {tls}: {error.strerror or error}") from None


def connect_options(login: Login, check: Callable[[], None]) -> dict[str, Any]:
    """Return nats-py's options for a login. ``check`` is called before a secret is sent, and raises to prevent it.

    Raises :class:`BadRequestError` naming the option that is wrong.
    """
    given = [name for name in ("user", "token", "nkey", "creds") if login.get(name)]
    if len(given) > 1:
        raise BadRequestError(given[1], f"expected one way to log in, got {given[0]} too")

    def secret(text: str) -> Callable[[], str]:
        def show() -> str:
            check()
            return text

        return show

    if user := login.get("user"):
        return {"user": secret(user), "password": secret(login.get("password") or "")}
    if token := login.get("token"):
        return {"token": secret(token)}
    if nkey := login.get("nkey"):
        seed = str(nkey)
        if not seed.startswith("SU"):
            seed = _read("nkey", nkey)
        return {"nkeys_seed_str": _checked_seed(seed.strip())}
    if creds := login.get("creds"):
        if "-----BEGIN NATS USER JWT-----" not in _read("creds", creds):
            raise BadRequestError("creds", f"{creds} is not a NATS credentials file")
        return {"user_credentials": str(creds)}
    return {}


def _read(field: str, path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequestError(field, f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _checked_seed(seed: str) -> str:
    import nkeys

    try:
        nkeys.from_seed(bytearray(seed.encode()))
    except Exception:  # a wrong checksum, length or kind each has a class of its own
        raise BadRequestError("nkey", "expected the seed of a user, SU…, or a file that holds one") from None
    return seed
