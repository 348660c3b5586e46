"""One connection to a NATS server: requests are tried again while it makes sense, errors are those of the service."""

import asyncio
import json
import logging
import random
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from nats.aio.client import Server
from nats.aio.msg import Msg
from nats.errors import (
    ConnectionClosedError,
    MaxPayloadError,
    NoRespondersError,
    OutboundBufferLimitError,
)
from nats.errors import Error as NatsError

from mediator.client.login import split_servers
from mediator.errors import (
    BadRequestError,
    LoginRefusedError,
    MediatorError,
    MessageTooLargeError,
    NoReplyError,
    QuotaExceededError,
    TooManyDelayedError,
    UncertainError,
    UnreachableError,
    error_of_reply,
)
from mediator.login import Login
from mediator.tls_client import TlsClient

PREFIX = "$mq9.AI."
CONNECT_SECONDS = 5.0
"""For one attempt to connect."""
ANSWER_SECONDS = 5.0
"""For the answer to one request, beyond the wait that the request itself asks for."""
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
"""Seconds between two attempts: doubled each time, between half and all of it."""
LONGEST_TOLD = 3600.0
"""Seconds of patience above which the log does not say how long it will be."""
PING_SECONDS = 10
RESETS = 5
"""Connections to one server that may be reset before that counts as the reason."""
IN_FLIGHT = 256
"""Requests at the same time; others wait, so that each has its time for an answer to itself."""
LASTING = (QuotaExceededError, TooManyDelayedError)
"""What lasts until somebody acknowledges or deletes: it is raised at once, since asking again soon does not help."""

log = logging.getLogger("mediator.client")


class Reply(dict[str, Any]):
    """The fields of a reply without error."""

    raw: bytes = b""
    """The reply as the service sent it."""


class _UnencryptedError(NatsError):
    def __str__(self) -> str:
        return "the server does not encrypt, but the URL begins with tls://"


class _Nats(TlsClient):
    """Knows whether the connection at hand is encrypted: nats-py asks for the context when a server wants TLS."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._context = context
        self.encrypted = False

    @property
    def ssl_context(self) -> ssl.SSLContext:
        self.encrypted = True
        if self._context is None:
            # Reading all authorities that the machine trusts takes longer than a request.
            self._context = ssl.create_default_context()
        return self._context


class Connection:
    """Connects, reconnects and asks."""

    def __init__(self, login: Login, context: ssl.SSLContext | None, *, patience: float, name: str) -> None:
        """``context`` takes the place of the login's own. Raises :class:`SetupError` naming what is wrong."""
        self.servers, self._login = split_servers(login)
        self.patience = patience
        self._name = name
        self._must_encrypt = any(server.startswith("tls://") for server in self.servers)
        self._options = self._login.credentials
        # Files are read here, so that one that cannot be used is told at once.
        self._context = context or (self._login.tls if self._login.has_tls_files else None)
        self._nats: _Nats | None = None
        self._lock = asyncio.Lock()
        self._up = asyncio.Event()
        """Set while there is a connection, and once it is closed."""
        self._given_up: asyncio.Future[None] | None = None
        """Ends the attempt to make a new connection that is under way."""
        self._asking: set[asyncio.Future[Msg]] = set()
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._error: Exception | None = None
        self._told_trouble = False
        """Whether the log has what keeps requests waiting now."""
        self._closed = False

    @property
    def shown(self) -> str:
        """The servers, without a login."""
        return ",".join(self.servers)

    @property
    def max_payload(self) -> int:
        """Bytes that the server takes in one request; 0 before the first connection."""
        return self._nats.max_payload if self._nats is not None else 0

    async def open(self) -> None:
        """Connect; raises :class:`LoginRefusedError`, or :class:`UnreachableError` once patience is over."""
        await self._connect(time.monotonic() + self.patience)

    async def close(self) -> None:
        """Disconnect; what is asked afterwards fails."""
        self._closed = True
        self._up.set()
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(None)
        if self._nats is not None:
            await self._nats.close()

    async def request(
        self,
        verb: str,
        body: bytes | Mapping[str, Any] = b"",
        *,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
        repeatable: bool = True,
        patience: float | None = None,
        done_error: type[MediatorError] | None = None,
    ) -> Reply:
        """Ask, and return the reply. ``wait``: seconds for which the service itself may wait.

        For ``patience`` seconds (the connection's by default) the request is tried again, with growing pauses, when
        nobody is there to answer it, and when the service says that a retry helps, unless a quota is reached. One that
        got no answer, or whose commit the service is not sure of, may have been carried out: it is tried again only if
        it is ``repeatable``. The log says at once what is waited for. ``done_error``: what the service says when it is
        asked for what it has done already; it is a success, whose reply is empty, of a request that was tried again
        because it may have been carried out.

        Raises the error of :mod:`mediator.errors` that the service sent, :class:`UnreachableError` when nothing was
        asked, :class:`NoReplyError` when no answer came in time, and :class:`UncertainError` as the service sent it.
        """
        data = body if isinstance(body, bytes) else json.dumps(dict(body), ensure_ascii=False).encode()
        end = time.monotonic() + (self.patience if patience is None else patience)
        pause = FIRST_PAUSE
        unsure = False
        while True:
            try:
                # One that waits for mail takes no slot: another may have to send it.
                async with nullcontext() if wait else self._slots:
                    return await self._ask(verb, data, headers, ANSWER_SECONDS + wait, end)
            except MediatorError as error:
                left = end - time.monotonic()
                if unsure and done_error is not None and isinstance(error, done_error):
                    return Reply()
                lost = isinstance(error, NoReplyError | UncertainError)
                if left <= 0 or (lost and not repeatable) or not error.retry or isinstance(error, LASTING):
                    raise
                unsure = unsure or lost
                self._tell_trouble(error, left)
                await asyncio.sleep(min(pause * random.uniform(0.5, 1), left))
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _ask(
        self, verb: str, data: bytes, headers: Mapping[str, str] | None, seconds: float, end: float
    ) -> Reply:
        nats = await self._connect(end)
        self._error = None
        asking = asyncio.ensure_future(
            nats.request(PREFIX + verb, data, timeout=seconds, headers=dict(headers) if headers else None)
        )
        self._asking.add(asking)
        try:
            # Not awaited by itself: in Python 3.11, wait_for inside may swallow the cancellation of this task.
            await asyncio.wait((asking,))
            if asking.cancelled():
                raise NoReplyError(f"the connection to {self.shown} broke before an answer came")
            message = asking.result()
        except NoRespondersError:
            raise UnreachableError(f"no mediator answers on {self.shown}") from None
        except MaxPayloadError:
            most = f"{len(data)} bytes, this NATS server takes at most {nats.max_payload}"
            raise MessageTooLargeError.reported(f"payload: message_too_large, {most}") from None
        except TimeoutError:
            # The server reports a missing permission beside the request.
            why = "" if self._error is None else f": {_plain(self._error)}"
            raise NoReplyError(f"no answer from {self.shown} within {seconds:g} s{why}") from None
        except (ConnectionClosedError, OutboundBufferLimitError) as error:
            raise UnreachableError(f"{self.shown}: {_plain(error)}") from None
        except (NatsError, OSError) as error:
            raise NoReplyError(f"{self.shown}: {_plain(error)}") from None
        finally:
            self._asking.discard(asking)
            asking.cancel()
        try:
            fields = Reply(json.loads(message.data))
            text = str(fields.get("error") or "")
        except (ValueError, TypeError):
            raise NoReplyError(f"the reply from {self.shown} is not a mediator's") from None
        if text:
            raise error_of_reply(text, fields)
        fields.raw = message.data
        self._told_trouble = False
        return fields

    def _tell_trouble(self, error: MediatorError, left: float) -> None:
        """Say once in the log what keeps requests waiting; ``left``: seconds for which they are tried again."""
        if not self._told_trouble:
            self._told_trouble = True
            span = f" for {left:.0f} s" if 1 <= left < LONGEST_TOLD else ""
            log.warning("%s; trying again%s", error, span)

    async def _connect(self, end: float) -> _Nats:
        """Return the connection once it is there; raises as :meth:`open`."""
        # Another request, of more patience, may hold it while it connects.
        await self._wait_until(end, self._lock.acquire())
        try:
            if self._closed:
                raise self._unreachable(None)
            if self._nats is None or self._nats.is_closed:
                # Also after the server ended it for good, as when a user is removed.
                self._nats = await self._new(end)
            nats = self._nats
        finally:
            self._lock.release()
        if not self._up.is_set():
            await self._wait_until(end, self._up.wait())
            if self._closed:
                raise self._unreachable(None)
        return nats

    async def _wait_until(self, end: float, waiting: Coroutine[Any, Any, object]) -> None:
        """Wait for somebody who connects; raises as :meth:`open`."""
        try:
            async with asyncio.timeout(max(end - time.monotonic(), 0)):
                await waiting
        except TimeoutError:
            raise self._unreachable(self._error) from None

    async def _new(self, end: float) -> _Nats:
        """Connect for the first time, or after the server ended the connection; raises as :meth:`open`."""
        nats = _Nats(self._context)
        given_up = self._given_up = asyncio.get_running_loop().create_future()
        failures = 0

        def check() -> None:
            if self._must_encrypt and not nats.encrypted:
                raise _UnencryptedError

        async def on_error(error: Exception) -> None:
            nonlocal failures
            if given_up.done():
                # What comes while it is given up is not the reason.
                return
            nats.encrypted = False
            self._error = error
            failures += 1
            # A server that refuses a login may reset the connection before the client has read why.
            attempts = RESETS if isinstance(error, ConnectionResetError | BrokenPipeError) else 1
            out_of_time = failures >= attempts * len(self.servers) and time.monotonic() >= end
            if out_of_time or not _passes(error):
                given_up.set_result(None)
            elif not self._up.is_set():
                self._tell_trouble(self._unreachable(error), end - time.monotonic())

        async def on_disconnect() -> None:
            self._up.clear()
            # Their answers went to the connection that is gone.
            asking, self._asking = self._asking, set()
            for request in asking:
                request.cancel()

        async def on_connect() -> None:
            check()
            self._told_trouble = False
            self._up.set()

        def next_server(servers: Sequence[Server], info: object) -> tuple[Server, float]:
            nats.encrypted = False
            tries = min(server.reconnects for server in servers)
            chosen = random.choice([server for server in servers if server.reconnects == tries])
            return chosen, min(FIRST_PAUSE * 2 ** min(tries, 10), LONGEST_PAUSE) * random.uniform(0.5, 1)

        def secret(text: str | None) -> Callable[[], str] | None:
            def show() -> str:
                check()
                return str(text)

            return None if text is None else show

        secrets = {name: secret(self._options[name]) for name in ("user", "password", "token")}

        async def connect() -> None:
            await nats.connect(
                list(self.servers),
                name=self._name,
                connect_timeout=CONNECT_SECONDS,  # type: ignore[arg-type]  # parts of a second do
                reconnect_time_wait=0.2,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                reconnect_to_server_handler=next_server,
                ping_interval=PING_SECONDS,
                max_outstanding_pings=2,
                error_cb=on_error,
                disconnected_cb=on_disconnect,
                reconnected_cb=on_connect,
                **{**self._options, **secrets},
            )
            await on_connect()

        connecting = asyncio.ensure_future(connect())
        try:
            await asyncio.wait((connecting, given_up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not connecting.done():
                connecting.cancel()
                await asyncio.wait((connecting,))
        error = self._error if connecting.cancelled() else connecting.exception()
        if error is None and not self._closed and not connecting.cancelled():
            return nats
        await nats.close()
        raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException | None) -> MediatorError:
        """Return what says why there is no connection; ``error`` is what the last attempt met."""
        if self._closed:
            return BadRequestError("client", "it is closed, or was never opened")
        text = f"cannot connect to {self.shown}: {_why(error, self._login)}"
        return LoginRefusedError(text) if _is_refusal(error) else UnreachableError(text)


def _is_refusal(error: BaseException | None) -> bool:
    text = str(error).lower()
    return "authorization violation" in text or "authentication" in text


def _passes(error: BaseException) -> bool:
    """Whether a failure to connect may be over by itself."""
    return not (_is_refusal(error) or isinstance(error, ssl.SSLError | _UnencryptedError))


_REFUSED = {
    None: "it asks for a login",
    "user": "user or password is wrong",
    "token": "the token is wrong",
    "nkey": "it does not know this nkey",
    "creds": "it does not accept these credentials",
}
"""What to say when a server refuses a login, by its kind."""


def _why(error: BaseException | None, login: Login) -> str:
    """Explain why there is no connection."""
    if _is_refusal(error):
        return _REFUSED[login.kind]
    match error:
        case ssl.SSLCertVerificationError():
            reason = error.verify_message.rstrip(".")
            return f"its certificate is not trusted ({reason})"
        case ssl.SSLError():
            return f"TLS failed ({error.reason or error})"
        case ConnectionRefusedError():
            return "nothing listens there"
        case socket.gaierror():
            return "no such host"
        case TimeoutError() | None:
            return f"no NATS server answers there within {CONNECT_SECONDS:g} s"
    if "expecting INFO" in str(error) or "json parse" in str(error):
        return "it is not a NATS server"
    return _plain(error)


def _plain(error: BaseException) -> str:
    return str(error).removeprefix("nats: ") or type(error).__name__
