"""Starts the processes under test: our service, as a user would, and nats-server with JetStream."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mediator.nats.server import find_binary
from mediator.store.opening import database_path
from mediator.system import leash
from mediator.system.usage import descendants, resident_mb
from registry.embedding.models import DEFAULT_MODEL, missing_extra

READY_SECONDS = 60.0
ENCODER = b"registry.embedding"
"""Found in the command line of a process that holds a model."""


class ServerProcess:
    """A process with a NATS port."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self.process = process
        self.url = url

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def resident_mb(self) -> float:
        """Resident memory of the process without its children, in MB."""
        return resident_mb(self.pid)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class ServiceProcess(ServerProcess):
    """`python -m mediator serve` with its managed nats-server."""

    def __init__(
        self,
        data_dir: Path,
        *,
        nats_url: str | None = None,
        semantic: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start with default settings and return when it is idle; ``ready_seconds`` is how long `/readyz` took.

        With ``nats_url`` it uses that server instead of its own. Where search by meaning is installed, the model is
        loaded before this returns, except without ``semantic``. ``env`` holds further environment variables.
        """
        embeds = semantic and not missing_extra(DEFAULT_MODEL)
        nats, http = free_port(), free_port()
        self.http_url = f"http://127.0.0.1:{http}"
        started = time.monotonic()
        command = [sys.executable, "-m", "mediator", "serve", "--data-dir", str(data_dir)]
        command += ["--nats-url", nats_url] if nats_url else ["--nats", f"127.0.0.1:{nats}"]
        command += ["--http", f"127.0.0.1:{http}"]
        self._log = data_dir.with_name(data_dir.name + ".log")
        with self._log.open("ab") as log:
            chosen = {} if semantic else {"MEDIATOR_REGISTRY__SEMANTIC": "false"}
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **chosen, **(env or {})})
        super().__init__(process, nats_url or f"nats://127.0.0.1:{nats}")
        try:
            self._wait(started + READY_SECONDS)
            self.ready_seconds = time.monotonic() - started
            while embeds and not self.counter("mediator_registry_encoder_up "):
                self._check(started + READY_SECONDS)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _wait(self, end: float) -> None:
        while True:
            try:
                with urllib.request.urlopen(f"{self.http_url}/readyz", timeout=5):
                    return
            except OSError:
                self._check(end)

    def _check(self, end: float) -> None:
        if self.process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the service did not start: {self._log.read_text()[-2000:]}")
        time.sleep(0.01)

    @property
    def children_mb(self) -> float:
        """Resident memory of the managed nats-server, in MB."""
        return sum(resident_mb(child) for child in descendants(self.pid) if ENCODER not in _command(child))

    @property
    def encoder_mb(self) -> float:
        """Resident memory of the process that holds the model, in MB; 0 without one."""
        return sum(resident_mb(child) for child in descendants(self.pid) if ENCODER in _command(child))

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def counter(self, series: str) -> float:
        """Return the sum of all samples in /metrics that begin with ``series``."""
        with urllib.request.urlopen(f"{self.http_url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))


class JetStreamServer(ServerProcess):
    """nats-server with JetStream on files."""

    def __init__(self, folder: Path, *, sync_always: bool = False) -> None:
        """``sync_always``: fsync before each acknowledgement; the default is every two minutes."""
        folder.mkdir(parents=True)
        port = free_port()
        sync = ", sync_interval: always" if sync_always else ""
        config = folder / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{port}"\nmax_payload: 8MB\njetstream {{ store_dir: "{folder / "store"}"{sync} }}\n'
        )
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([str(find_binary()), "-c", str(config)], stdout=log, stderr=log)
        super().__init__(process, f"nats://127.0.0.1:{port}")
        _wait_for_port(process, port, folder / "log")


class BareServer(ServerProcess):
    """What stores and answers a SEND and does nothing else; see :mod:`benchmarks.bare_send`."""

    def __init__(self, data_dir: Path) -> None:
        """Serve the mailboxes of a data directory."""
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.bare_send", str(database_path(data_dir)), str(port)]
        path = data_dir.with_name(data_dir.name + ".log")
        with path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        super().__init__(process, f"nats://127.0.0.1:{port}")
        _wait_for_port(process, port, path)


def _wait_for_port(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server did not start, see {log}")
        time.sleep(0.01)


@contextmanager
def running(*servers: ServerProcess) -> Iterator[None]:
    """Stop these servers at the end of the block."""
    try:
        yield
    finally:
        for server in servers:
            server.stop()


def low_priority(nice: int) -> list[str]:
    """Return the beginning of a command line that runs a program on one core, and not longer than this process."""
    return [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), "--low", str(nice)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
