"""The control socket: commands on the same machine ask for operations of a running service, a line of JSON each way.

``{"command": "status"}`` is answered ``{"error": "", …}``. Only the owner of the file may open the socket, and has all
rights.
"""

import asyncio
import os
import pwd
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from mediator.errors import BadRequestError, MediatorError, SetupError, UnavailableError
from mediator.operate.operations import MAX_LONG_REQUEST, MAX_REQUEST, Actor, Operations, Right
from mediator.system.private_files import OTHERS, make_folder

SOCKET_FILE = "control.sock"
MAX_ANSWER = 1024 * 1024
MAX_CONNECTIONS = 16
IDLE_SECONDS = 10.0
"""A connection that sends no complete request, or reads no answer, for this long is closed."""
ANSWER_SECONDS = 30.0
_PEER = struct.Struct("3i")
"""Process, user and group of a peer, as the kernel gives them."""
_MAX_PATH = 100
"""Bytes of a path that fit into a socket address on every platform."""


class ControlServer:
    """Serves operations on the control socket of a data directory."""

    def __init__(self, data_dir: Path, operations: Operations) -> None:
        self._path = data_dir / SOCKET_FILE
        self._operations = operations
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._serving: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Listen; :class:`SetupError` when another service does so here, or the socket cannot be made."""
        make_folder(self._path.parent)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(self._path) as address:
                _clear(self._path, address)
                # The socket's mode comes from the umask alone; files other threads make now become private too.
                before = os.umask(OTHERS)
                try:
                    listener.bind(address)
                finally:
                    os.umask(before)
            self._path.chmod(0o600)
            self._inode = self._path.stat().st_ino
            listener.setblocking(False)
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_LONG_REQUEST)
        except OSError as error:
            listener.close()
            raise SetupError(f"data_dir: cannot listen on {SOCKET_FILE}: {error.strerror or error}") from error
        except BaseException:
            listener.close()
            raise

    async def stop(self) -> None:
        """Stop serving, and remove the socket."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await server.wait_closed()
        # Another service may have replaced the socket; one that cannot be removed is replaced at the next start.
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        full = len(self._serving) >= MAX_CONNECTIONS
        self._serving.add(task)
        try:
            if full:
                await _send(writer, {"error": f"busy: {MAX_CONNECTIONS} connections are open"})
                return
            while await self._serve_one(reader, writer):
                pass
        except (OSError, TimeoutError, asyncio.CancelledError):
            # Only stop() cancels, and asyncio of Python 3.11 logs a cancelled handler as an error.
            pass
        finally:
            self._serving.discard(task)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False if the connection is done."""
        try:
            line = await asyncio.wait_for(reader.readline(), IDLE_SECONDS)
        except ValueError:
            await _send(writer, {"error": f"request: longer than {MAX_LONG_REQUEST} bytes"})
            writer.write_eof()
            # Closing with unread bytes would reset the connection, and the client might lose the answer.
            await asyncio.wait_for(_discard(reader), IDLE_SECONDS)
            return False
        if not line.endswith(b"\n"):
            return False
        await _send(writer, await self._answer(line, _actor(writer)))
        return True

    async def _answer(self, line: bytes, actor: Actor) -> dict[str, Any]:
        try:
            request = _parse(line)
            operation = self._operations.get(request.get("command"))
            if len(line) > operation.longest:
                raise BadRequestError("request", f"longer than {operation.longest} bytes")
            return {"error": ""} | await self._operations.run(actor, operation.name, request)
        except MediatorError as error:
            return {"error": str(error)}
        except TimeoutError:
            return {"error": f"{request['command']}: no answer within {operation.within:g} s"}
        except Exception:
            # Commands import this module to ask a service: they do without what only the service needs.
            import structlog

            structlog.get_logger("control").exception("command failed")
            return {"error": "internal error"}


async def send_command(
    data_dir: Path, command: str, *, within: float = ANSWER_SECONDS, **fields: Any
) -> dict[str, Any]:
    """Send a command to the service on a data directory and return its answer; ``error`` is empty on success.

    Raises :class:`SetupError` when no service listens, :class:`UnavailableError` when it does not answer ``within``
    seconds or stops meanwhile.
    """
    try:
        async with asyncio.timeout(within):
            return await _ask(data_dir, {"command": command} | fields)
    except TimeoutError:
        raise UnavailableError(f"the service did not answer within {within:g} s") from None


async def _ask(data_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    try:
        with _short(data_dir / SOCKET_FILE) as address:
            reader, writer = await asyncio.open_unix_connection(address, limit=MAX_ANSWER)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        raise SetupError(f"no service runs on {data_dir}") from None
    except OSError as error:
        raise SetupError(f"cannot reach the service on {data_dir}: {error.strerror or error}") from error
    try:
        with suppress(OSError):
            await _send(writer, request)
        answer = orjson.loads(await reader.readline())
    except (OSError, ValueError) as error:
        raise UnavailableError("the service stopped before it answered") from error
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    if not isinstance(answer, dict) or not isinstance(answer.get("error"), str):
        raise UnavailableError("the service sent an invalid answer")
    return answer


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(orjson.dumps(message) + b"\n")
    async with asyncio.timeout(IDLE_SECONDS):
        await writer.drain()


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(MAX_REQUEST):
        pass


def _actor(writer: asyncio.StreamWriter) -> Actor:
    """Return the user of this machine that asks."""
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    uid = _PEER.unpack(credentials)[1]
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return Actor(name, frozenset(Right), "socket")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = orjson.loads(line)
    except ValueError:
        raise BadRequestError("request", "expected one line of JSON") from None
    if not isinstance(request, dict):
        raise BadRequestError("request", "expected a JSON object")
    return request


def _clear(path: Path, address: str) -> None:
    """Remove the socket of a dead service."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.setblocking(False)
            probe.connect(address)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise SetupError(f"data_dir: another service answers on {path.name} in this directory")


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Return a path to the socket that is short enough for an address, however deep its directory is."""
    if len(os.fsencode(path)) <= _MAX_PATH:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
