"""Where a client connects and as whom: server, one kind of login, and the files for TLS."""

from codecs import BOM_UTF8
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mediator.endpoint import without_login
from mediator.errors import SetupError

if TYPE_CHECKING:
    import ssl

MAX_FILE = 64 * 1024
"""Bytes of a file with a seed or credentials."""
LOGINS = ("user", "token", "nkey", "creds")
"""The kinds of login, of which a connection has at most one."""


@dataclass(frozen=True, slots=True)
class Login:
    """A NATS server, or several joined by commas, and how to log in there.

    ``nkey``, ``creds`` and the ``tls_…`` are paths of files; of :data:`LOGINS` at most one is given.
    """

    server: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    nkey: str | None = None
    """A file with the seed of an nkey."""
    creds: str | None = None
    """A file with the JWT and the seed of a user, as `nsc` writes it."""
    tls_ca: str | None = None
    """The authorities that sign the server's certificate; None: those that this machine trusts."""
    tls_cert: str | None = None
    tls_key: str | None = None
    certificate: str | None = None
    """The server's certificate in PEM; None: it must be one that an authority signed."""

    @property
    def shown(self) -> str:
        """The servers without user names and passwords."""
        return without_login(self.server)

    @property
    def kind(self) -> str | None:
        """The kind of login; None where the URL has it, or there is none."""
        return next((name for name in LOGINS if getattr(self, name) is not None), None)

    @property
    def nats_options(self) -> dict[str, Any]:
        """What nats-py's ``connect`` takes besides the servers; raises :class:`SetupError` as :meth:`check`."""
        return {**self.credentials, "tls": self.tls}

    @property
    def credentials(self) -> dict[str, Any]:
        """The same without TLS."""
        self.check()
        return {
            "user": self.user,
            "password": self.password,
            "token": self.token,
            "nkeys_seed": self.nkey,
            "user_credentials": self.creds,
        }

    @property
    def has_tls_files(self) -> bool:
        """Whether it says itself whom to trust, or has a certificate of its own."""
        return (self.tls_ca, self.tls_cert, self.certificate) != (None, None, None)

    @property
    def tls(self) -> "ssl.SSLContext":
        """The settings by which the client verifies the server, and shows a certificate of its own.

        Raises :class:`SetupError` naming the file that cannot be used.
        """
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.tls_ca, cadata=self.certificate)
        except OSError as error:
            raise SetupError(f"tls_ca: cannot use {self.tls_ca}: {_reason(error)}") from None
        if self.certificate is not None:
            # Exactly this certificate is trusted, whoever signed it and whatever name it bears.
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if self.tls_cert is not None:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key)
            except OSError as error:
                files = " and ".join(filter(None, (self.tls_cert, self.tls_key)))
                raise SetupError(f"tls_cert: cannot use {files}: {_reason(error)}") from None
        return context

    def check(self) -> None:
        """Raise :class:`SetupError` for contradictions, and for files that hold something else."""
        given = [name for name in LOGINS if getattr(self, name) is not None]
        if len(given) > 1:
            raise SetupError(f"{given[1]}: there is another login, {given[0]}; give one of {', '.join(LOGINS)}")
        if self.password is not None and self.user is None:
            raise SetupError("user: expected the name that the password belongs to")
        if self.tls_key is not None and self.tls_cert is None:
            raise SetupError("tls_cert: expected the certificate that tls_key belongs to")
        if self.nkey is not None:
            _check_seed("nkey", self.nkey, _read("nkey", self.nkey).strip())
        if self.creds is not None:
            # nats-py reads a file without these lines for ever.
            lines = _read("creds", self.creds).splitlines()
            _line_after(b"BEGIN NATS USER JWT", lines, self.creds)
            _check_seed("creds", self.creds, _line_after(b"BEGIN USER NKEY SEED", lines, self.creds).strip())


def _read(name: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_FILE).removeprefix(BOM_UTF8)
    except OSError as error:
        raise SetupError(f"{name}: cannot read {path}: {error.strerror}") from None


def _line_after(head: bytes, lines: list[bytes], path: str) -> bytes:
    for number, line in enumerate(lines[:-1]):
        if head in line:
            return lines[number + 1]
    raise SetupError(f"creds: {path} is no credentials file, it has no line {head.decode()}")


def _check_seed(name: str, path: str, seed: bytes) -> None:
    import binascii

    import nkeys

    try:
        is_user = seed[:2] == b"SU" and nkeys.from_seed(bytearray(seed)) is not None
    except (nkeys.NkeysError, binascii.Error, ValueError):
        is_user = False
    if not is_user:
        raise SetupError(f"{name}: {path} does not hold the seed of a user's nkey, which begins with SU")


def _reason(error: OSError) -> str:
    import ssl

    return (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or "no certificate in PEM"
