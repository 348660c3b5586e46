"""A NATS client that starts TLS on its existing stream, so that closing it causes no warning, by renewable files."""

import asyncio
import ssl
import time
from typing import Any
from urllib.parse import ParseResult

from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError

from mediator.nats.tls_files import TlsFiles


class TlsClient(Client):
    """nats-py's client makes a second stream for TLS, and asyncio warns when the first one is closed."""

    tls_files: TlsFiles | None = None
    """What TLS is made from at each connection; None: the option ``tls`` of ``connect``."""

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """The context of the next handshake."""
        return super().ssl_context if self.tls_files is None else self.tls_files.current()

    async def _connect_to_server(self, s: Srv) -> None:
        if s.uri.scheme not in ("nats", "tls"):
            await super()._connect_to_server(s)
            return
        s.last_attempt = time.monotonic()
        transport = self._transport or _Transport()  # type: ignore[no-untyped-call]
        self._transport = transport
        await transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # nats-py would go on in the clear, and send the password so.
        server = self._current_server
        if initial_connection and server is not None and server.uri.scheme == "tls" and not info.get("tls_required"):
            raise NatsError("nats: the server does not encrypt, but the URL begins with tls://")
        await super()._process_info(info, initial_connection)


class _Transport(TcpTransport):
    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        writer = self._io_writer
        assert writer is not None
        name = uri if isinstance(uri, str) else uri.hostname
        try:
            async with asyncio.timeout(connect_timeout):
                await writer.start_tls(ssl_context, server_hostname=name)
        except BaseException:
            # The stream does not learn that a connection whose handshake failed is closed: waiting for it would hang.
            writer.transport.abort()
            self._io_writer = None
            raise
