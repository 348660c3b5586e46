"""The service's NATS client: its TLS is made from files that may be renewed, and it never goes on in the clear."""

import ssl
from typing import Any

from nats.errors import Error as NatsError

from mediator import tls_client
from mediator.nats.tls_files import TlsFiles


class TlsClient(tls_client.TlsClient):
    """The client of agents with what the service needs."""

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
