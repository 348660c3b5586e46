"""nats-py's client with TLS on its one stream, for the service as for the client of agents, which is installed alone.

nats-py makes a second stream for TLS, of which the first does not know; asyncio then warns when that one is closed.
"""

import asyncio
import ssl
import time
from urllib.parse import ParseResult

from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.transport import TcpTransport


class TlsClient(Client):
    """Connects as nats-py does, and starts TLS on the stream that there is."""

    async def _connect_to_server(self, s: Srv) -> None:
        if s.uri.scheme not in ("nats", "tls"):
            await super()._connect_to_server(s)
            return
        s.last_attempt = time.monotonic()
        transport = self._transport or _Transport()  # type: ignore[no-untyped-call]
        self._transport = transport
        await transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        # The task that reconnects can miss that it is cancelled, as asyncio.wait_for does when a connection is made at
        # that moment; it would then connect for ever.
        task = self._reconnection_task
        while task is not None and task is not asyncio.current_task() and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=0.1)
        if not self.is_connected:
            # Nobody reads what still waits; nats-py would write it to the broken connection, fail, and not close it.
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)


class _Transport(TcpTransport):
    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        if self._io_writer is not None:
            # nats-py leaves open what it connected to without a greeting, and connects again.
            self._io_writer.close()
        await super().connect(uri, buffer_size, connect_timeout)

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
