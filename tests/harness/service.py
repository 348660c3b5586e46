"""Runs `mediator serve` in a process of its own, ready when its HTTP port says so, killed at will."""

import asyncio
import atexit
import contextlib
import functools
import http.client
import itertools
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mediator.http.callers import LOCAL_TOKEN
from mediator.nats.server import find_binary
from tests.harness.fork_server import LEASH, ForkedProcess, can_fork, fork
from tests.harness.waiting import until

READY_WITHIN = 40.0
ENDS_WITHIN = 20.0
LOOK_EVERY = 0.05
"""Seconds between two questions to a process that starts, which takes CPU from it."""
LOG_TAIL = 60
PORTS_OF_ONE = 500
OPTIONS = ("nats", "http", "database_url", "nats_url", "config")


def free_port() -> int:
    """Find a loopback port that nobody listens on, and that no other process of tests is given.

    It is outside the range from which the kernel takes ports for outgoing calls, and comes again only when all others
    of the process have been given out.
    """
    while True:
        port = next(_ports())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@functools.cache
def _ports() -> Iterator[int]:
    """Go round in a block of ports that this process has to itself: who holds its name holds the block."""
    blocks = list(range(10_000, 32_000, PORTS_OF_ONE))
    random.SystemRandom().shuffle(blocks)
    for block in blocks:
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0ports of tests {block}")
        except OSError:
            name.close()
        else:
            atexit.register(name.close)
            return itertools.cycle(range(block, block + PORTS_OF_ONE))
    raise AssertionError("as many processes of tests run as there are blocks of ports")


def listening(port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def spawn(command: list[str], log: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process at the latest; what it says is added to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [*LEASH, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            env=environment,
        )


class Service:
    """One `mediator serve` that can be started again and again on the same data and the same ports."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        """``options`` are those of the command line; ports that are not given are found.

        It loads no model unless ``semantic`` is given: few tests search by meaning, and loading takes seconds.
        """
        semantic = options.pop("semantic", False)
        assert set(options) <= {*OPTIONS, "data_dir"}, options
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = folder / f"{name}.log"
        self.data_dir = Path(options.pop("data_dir", folder / f"{name}-data"))
        self.nats_port = free_port()
        self.http_port = free_port()
        self.options = {"http": f"127.0.0.1:{self.http_port}", **options}
        if "nats_url" in options:
            self.nats_url = str(options["nats_url"])
        else:
            self.options.setdefault("nats", f"127.0.0.1:{self.nats_port}")
            self.nats_url = f"nats://127.0.0.1:{self.nats_port}"
        self.environment = {} if semantic else {"MEDIATOR_REGISTRY__SEMANTIC": "false"}
        self.forked = not semantic
        """Whether it may be a fork: a model needs threads and more imports."""
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def command(self) -> list[str]:
        """The command line."""
        command = [sys.executable, "-m", "mediator", "serve", "--data-dir", str(self.data_dir)]
        for name, value in self.options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        return command

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process; :meth:`ready` waits for it."""
        assert not self.alive, f"{self.name} runs already"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MEDIATOR_")}
        environment = {**inherited, "MEDIATOR_LOG_FORMAT": "json", **self.environment}
        program, arguments = self.command[:3], self.command[3:]
        if self.forked and program == [sys.executable, "-m", "mediator"] and can_fork(environment):
            with self.log.open("ab") as output:
                self.process = fork(arguments, output, self.log.parent, environment)
        else:
            self.process = spawn(self.command, self.log, environment)

    async def serve(self) -> None:
        """Start the process and wait until it is ready."""
        self.start()
        await self.ready()

    async def restart(self) -> None:
        """End the process with SIGKILL, and start it again."""
        await self.kill()
        await self.serve()

    async def ready(self, within: float = READY_WITHIN) -> None:
        """Wait until /readyz says 200."""

        async def is_ready() -> bool:
            assert self.alive, f"{self.name} ended with {self.process.poll()} before it was ready: {self.tail()}"
            return (await self.get("/readyz"))[0] == 200

        await until(is_ready, within, f"{self.name} is ready", LOOK_EVERY)

    async def get(self, path: str) -> tuple[int, str]:
        """Ask the HTTP port; status 0 when nobody answers."""
        return await asyncio.to_thread(self.get_blocking, path)

    def get_blocking(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=ENDS_WITHIN)
        try:
            secret = self.data_dir / LOCAL_TOKEN
            headers = {"Authorization": f"Bearer {secret.read_text().strip()}"} if secret.exists() else {}
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()

    async def unready(self, within: float = READY_WITHIN) -> str:
        """Wait until /readyz answers, and that with something else than 200; return what it says."""

        async def is_unready() -> str:
            status, said = await self.get("/readyz")
            return said if status not in (0, 200) else ""

        return str(await until(is_unready, within, f"{self.name} says that it is not ready"))

    async def kill(self) -> None:
        """End the process with SIGKILL, and wait until its ports are free."""
        self.process.kill()
        await self.ended()
        # The kernel ends the managed nats-server too, a moment later.
        if "nats_url" not in self.options:
            await until(lambda: not listening(self.nats_port), ENDS_WITHIN, f"{self.name}'s nats-server is gone")

    def terminate(self) -> None:
        """Ask the process to end; :meth:`ended` waits for it."""
        self.process.terminate()

    async def ended(self, within: float = ENDS_WITHIN) -> int:
        """Wait for the end of the process and return its exit code."""
        process = self.process
        try:
            return await asyncio.to_thread(process.wait, within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {within:g} s") from None

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return what the process logged, or only lines of one event."""
        lines = []
        for line in self.log.read_text(errors="replace").splitlines() if self.log.exists() else []:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict) and event in (None, said.get("event")):
                    lines.append(said)
        return lines

    def complaints(self) -> list[dict[str, Any]]:
        """Return the log lines that nobody should see while nothing was broken on purpose."""
        return [line for line in self.events() if line.get("level") in ("error", "critical")]

    def said(self) -> str:
        """Return all that the process wrote, in every life."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.said().splitlines()[-LOG_TAIL:])

    def discard(self) -> None:
        """End the process at once, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Services:
    """All processes of one test; none of them outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.forked = True
        """Whether services may be forks; tests of the program itself say no."""
        self.all: list[Service] = []
        self._others: list[tuple[str, Path, subprocess.Popen[bytes]]] = []

    def new(self, name: str = "service", **options: Any) -> Service:
        """Make a service without starting it."""
        service = Service(name, self.folder, **options)
        service.forked &= self.forked
        self.all.append(service)
        return service

    async def running(self, name: str = "service", **options: Any) -> Service:
        """Make a service and wait until it is ready."""
        service = self.new(name, **options)
        await service.serve()
        return service

    async def nats_server(self, *options: str) -> str:
        """Start a nats-server that is nobody's child but the test's, and return its URL."""
        port = free_port()
        log = self.folder / "nats-server.log"
        process = spawn([str(find_binary()), "-a", "127.0.0.1", "-p", str(port), *options], log)
        self._others.append(("nats-server", log, process))
        await until(lambda: listening(port), READY_WITHIN, "nats-server listens")
        return f"nats://127.0.0.1:{port}"

    def close(self) -> None:
        """End everything."""
        for service in self.all:
            service.discard()
        for _, _, process in self._others:
            process.kill()
            process.wait()

    def logs(self) -> Iterator[tuple[str, str]]:
        """Return each process's name and the end of its log."""
        for service in self.all:
            yield f"{service.name} ({service.log})", service.tail()
        for name, log, _ in self._others:
            yield f"{name} ({log})", "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
