"""TLS of the service's own connections and of the gateway: from files that may be renewed without a restart."""

import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import structlog
from nats.errors import Error as NatsError

from mediator import tls_client
from mediator.errors import SetupError

_log = structlog.get_logger("tls")


class TlsFiles:
    """A TLS context for new connections. Open connections keep the one that they began with."""

    def __init__(self, make: Callable[[], ssl.SSLContext], files: Iterable[Path | str | None]) -> None:
        """``make`` reads the files and raises :class:`SetupError` for what it cannot use, here as well.

        Without files, what this machine trusts is read (20 ms) when it is first needed.
        """
        self._make = make
        self._files = [Path(file) for file in files if file is not None]
        self._seen = self._stamps()
        self._context = make() if self._files else None

    def current(self) -> ssl.SSLContext:
        """Return the context of the files as they are now, or the last good one while they cannot be used."""
        if self._context is None:
            self._context = self._make()
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen = stamps
            try:
                self._context = self._make()
            except SetupError as error:
                # A pair is replaced one file after the other; the second change brings us here again.
                _log.error("certificate not reloaded", reason=str(error))
            else:
                _log.info("certificate reloaded", files=[file.name for file in self._files])
        return self._context

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(file) for file in self._files]


def server_context(cert: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """Return what the gateway encrypts with; with ``client_ca`` clients must show a certificate of it.

    Raises :class:`SetupError`.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:
        raise SetupError(f"gateway.tls_cert, gateway.tls_key: {error.strerror or error}") from error
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(client_ca)
        except OSError as error:
            raise SetupError(f"gateway.tls_client_ca: {error.strerror or error}") from error
    return context


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class TlsClient(tls_client.TlsClient):
    """The client of agents with what the service needs: it never goes on in the clear."""

    tls_files: TlsFiles | None = None
    """What TLS is made from at each connection; None: the option ``tls`` of ``connect``."""

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """The context of the next handshake."""
        return super().ssl_context if self.tls_files is None else self.tls_files.current()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # nats-py would go on in the clear, and send the password so.
        server = self._current_server
        if initial_connection and server is not None and server.uri.scheme == "tls" and not info.get("tls_required"):
            raise NatsError("nats: the server does not encrypt, but the URL begins with tls://")
        await super()._process_info(info, initial_connection)
