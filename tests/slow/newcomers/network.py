"""A network of its own for a program: every port is free in it, and an HTTPS proxy is the way out to the Internet."""

import asyncio
import socket
import subprocess
from asyncio import StreamReader, StreamWriter

from tests.harness.pages import raise_loopback

UNSHARE = ["unshare", "--map-root-user", "--net"]
PROXY = ("127.0.0.1", 3128)
CHUNK = 1 << 16


def available() -> bool:
    """Whether this machine lets us make one."""
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


async def run_inside(command: list[str]) -> int:
    """Run a program in a network of its own, and return its exit code.

    The program gets one argument more, for :func:`enter`.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            inherited = theirs.fileno()
            process = await asyncio.create_subprocess_exec(*UNSHARE, *command, str(inherited), pass_fds=[inherited])
        # A socket stays in the network in which it was made: we serve one in theirs, and call from ours.
        _, files, *_ = await asyncio.to_thread(socket.recv_fds, ours, 1, 1)
    if not files:
        return await process.wait()
    async with await asyncio.start_server(_tunnel, sock=socket.socket(fileno=files[0])):
        return await process.wait()


def enter(inherited: int) -> str:
    """Set up the network, inside of it; return the URL of the proxy."""
    raise_loopback()
    with socket.socket(fileno=inherited) as outside, socket.create_server(PROXY) as listener:
        socket.send_fds(outside, [b"!"], [listener.fileno()])
    return f"http://{PROXY[0]}:{PROXY[1]}"


async def _tunnel(reader: StreamReader, writer: StreamWriter) -> None:
    """Answer one CONNECT."""
    try:
        verb, target, *_ = (await reader.readuntil(b"\r\n\r\n")).decode().split()
        host, _, port = target.rpartition(":")
        if verb != "CONNECT":
            raise OSError(f"{verb} is not CONNECT")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        writer.write(f"HTTP/1.1 502 {error}\r\n\r\n".encode())
        writer.close()
        return
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))


async def _pump(reader: StreamReader, writer: StreamWriter) -> None:
    """Pass on bytes until either side ends."""
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()
