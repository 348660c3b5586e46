"""An audit's attacks on availability, each against real servers: what one client does must not stop the others."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from mediator.nats.client import Request
from mediator.nats.connection import connect
from tests.integration.door import PATIENCE, serving, until

# A nats-server that stalls.


@pytest.mark.rule("A8")
async def test_a_pong_that_comes_after_its_flush_gave_up_does_not_end_the_reading(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.create()
        assert service.server.pid is not None
        os.kill(service.server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(service.connection.settle(5), 0.05)
        finally:
            os.kill(service.server.pid, signal.SIGCONT)
        assert await service.ask("MSG.SEND.task", b"x", seconds=PATIENCE) == {"error": "", "msg_id": 0}
        assert service.lost == 0, "the same connection goes on"


async def test_what_ends_the_reading_ends_the_connection_which_is_made_anew() -> None:
    """Whatever error comes up while a line is read, the client never stays connected and deaf."""
    connections = 0

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        first = connections == 1
        writer.write(b'INFO {"max_payload":1048576,"headers":true}\r\n')
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
                if line.startswith(b"SUB"):
                    writer.write(b"INFO {nonsense\r\n" if first else b"MSG a 1 2\r\nhi\r\n")
        writer.close()

    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    connection = await connect([f"nats://127.0.0.1:{port}"], "test")
    heard: list[Request] = []
    try:
        await connection.subscribe("a", "", heard.append)
        await until(lambda: heard, 5)
        assert (heard[0].data, connections) == (b"hi", 2)
    finally:
        await connection.close()
        listening.close()
