"""Starts `mediator` by fork from a process that has imported it, which saves most of the CPU time of a start.

Each process of tests has one such server, with one thread. A fork gets arguments, environment, folder and log as a
program would, and ends as one: it may be killed, and is killed when the tests end. It differs in three ways: its
parent is the server, its command line in ``/proc`` is the server's, and all forks share their seed of hashes.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import mediator.system.leash

LEASH = [sys.executable, "-I", "-S", mediator.system.leash.__file__]
"""Runs a program that ends with the process whose id comes next."""
IMPORTED = ("mediator.app", "uvloop", "pickup.door", "pickup.operate.console", "registry.service")
"""What `mediator serve` imports with its default settings, and with ``registry.semantic`` off."""
_ROOT = Path(__file__).parents[2]
_OWN = ("MEDIATOR_", "PYTEST_", "PYSPARK_", "SPARK_")
"""How the names of variables begin that a fork may have to itself; others may be read where libraries are imported.

Spark's are set in processes of tests that use it; the service never loads it."""
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ForkedProcess:
    """A process that the server forked, with what tests use of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, pidfd: int, status: socket.socket) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status = status

    def __del__(self) -> None:
        os.close(self._pidfd)
        self._status.close()

    @property
    def returncode(self) -> int | None:
        """The exit code; negative: the signal that ended it; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raises :class:`subprocess.TimeoutExpired`."""
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("mediator", timeout or 0)
        # Left in the socket for who asks next, perhaps on another thread.
        ended = self._status.recv(16, socket.MSG_PEEK)
        assert ended, "the fork server is gone, and its forks with it"
        return int(ended)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        # It may have ended since, and not be told yet.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def can_fork(environment: dict[str, str]) -> bool:
    """Whether a fork with these variables is as good as a program."""
    shared = {name: value for name, value in environment.items() if not name.startswith(_OWN)}
    return shared == _ENVIRONMENT


def fork(arguments: list[str], output: BinaryIO, folder: Path, environment: dict[str, str]) -> ForkedProcess:
    """Start `mediator` with arguments in a folder; what it says goes to ``output``."""
    request = json.dumps([arguments, str(folder), environment]).encode()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(_server(), [request], [output.fileno(), theirs.fileno()])
    pid, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
    assert pid, "the fork server is gone"
    return ForkedProcess(int(pid), descriptors[0], ours)


@functools.cache
def _server() -> socket.socket:
    """Start the server and return where it takes requests; it ends with this process at the latest."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [*LEASH, str(os.getpid()), sys.executable, "-m", __name__]
    with theirs:
        process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, cwd=_ROOT, env=_ENVIRONMENT)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve() -> list[str]:
    """Fork for each request, and tell how the forks end. Returns only in the forks, with the arguments."""
    server, prctl = os.getpid(), ctypes.CDLL(None).prctl
    requests = socket.socket(fileno=0)
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    _tell_end(key.fd, *key.data)
                    continue
                text, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 2)
                if not text:
                    os._exit(0)
                arguments, folder, environment = json.loads(text)
                assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
                if (pid := os.fork()) == 0:
                    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                    if os.getppid() != server:
                        os._exit(1)
                    selector.close()
                    requests.detach()
                    _set_up(descriptors[0], folder, environment)
                    return list(arguments)
                os.close(descriptors[0])
                pidfd, status = os.pidfd_open(pid), socket.socket(fileno=descriptors[1])
                # Who asked may have given up; the fork runs, and ends with the tests.
                with contextlib.suppress(OSError):
                    socket.send_fds(status, [str(pid).encode()], [pidfd])
                selector.register(pidfd, selectors.EVENT_READ, (pid, status))


def _tell_end(pidfd: int, pid: int, status: socket.socket) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(pidfd)
    # Nobody may want to know any more.
    with status, contextlib.suppress(BrokenPipeError):
        status.send(str(code).encode())


def _set_up(output: int, folder: str, environment: dict[str, str]) -> None:
    """Make this fork what a program is at its start."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(folder)
    sys.path[0] = folder
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    from mediator.cli import build_app
    from mediator.parts import installed_settings

    # OpenBLAS would start threads.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    # Both are remembered, and depend on nothing but what is installed.
    build_app()
    installed_settings()
    gc.collect()
    gc.freeze()
    sys.argv[1:] = _serve()
    runpy.run_module("mediator", run_name="__main__", alter_sys=True)
