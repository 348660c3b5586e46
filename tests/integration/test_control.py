"""The control socket: who may ask, what is answered, and what happens to requests that are too much."""

import asyncio
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from mediator.errors import NoSuchMailboxError, SetupError, UnavailableError
from mediator.operate import control
from mediator.operate.control import (
    MAX_CONNECTIONS,
    SOCKET_FILE,
    ControlServer,
    send_command,
)
from mediator.operate.operations import MAX_LONG_REQUEST, MAX_REQUEST, Command, Operation, Operations, Right


def operation(name: str, run: Command, **options: Any) -> Operation:
    return Operation(name, run, Right.READ, "", {}, **options)


def server_on(data_dir: Path, *operations: Operation) -> ControlServer:
    registry = Operations()
    registry.add(*operations)
    return ControlServer(data_dir, registry)


@asynccontextmanager
async def serving(data_dir: Path, *further: Operation) -> AsyncIterator[ControlServer]:
    async def echo(request: dict[str, Any]) -> dict[str, Any]:
        return {"got": request}

    async def refuse(_request: dict[str, Any]) -> dict[str, Any]:
        raise NoSuchMailboxError("task")

    async def fail(_request: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("a secret of ours")

    async def hang(_request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    commands = {"echo": echo, "refuse": refuse, "fail": fail, "wait": hang}
    usual = [operation(name, command) for name, command in commands.items()]
    server = server_on(data_dir, *usual, operation("hang", hang, within=0.05), *further)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def raw(data_dir: Path, *lines: bytes) -> list[dict[str, Any]]:
    """Send lines on one connection and return all answers until the server closes it, or to each line."""
    reader, writer = await asyncio.open_unix_connection(str(data_dir / SOCKET_FILE))
    try:
        async with asyncio.timeout(30):
            writer.writelines(lines)
            writer.write_eof()
            return [orjson.loads(line) for line in (await reader.read()).splitlines()]
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_command_is_answered_with_its_fields(tmp_path: Path) -> None:
    async with serving(tmp_path):
        answer = await send_command(tmp_path, "echo", number=1, text="a\nb")
    assert answer == {"error": "", "got": {"command": "echo", "number": 1, "text": "a\nb"}}


async def test_socket_is_private_and_removed_at_stop(tmp_path: Path) -> None:
    async with serving(tmp_path):
        assert stat.S_IMODE((tmp_path / SOCKET_FILE).stat().st_mode) == 0o600
    assert not (tmp_path / SOCKET_FILE).exists()


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("refuse", "mailbox task does not exist"),
        ("fail", "internal error"),
        ("hang", "hang: no answer within 0.05 s"),
        ("unknown", "command: expected one of echo, fail, hang, refuse, wait"),
    ],
)
async def test_what_goes_wrong_is_said(tmp_path: Path, command: str, error: str) -> None:
    async with serving(tmp_path):
        assert await send_command(tmp_path, command) == {"error": error}


async def test_one_connection_may_ask_several_times(tmp_path: Path) -> None:
    lines = [b'{"command": "echo", "n": %d}\n' % number for number in range(3)]
    async with serving(tmp_path):
        answers = await raw(tmp_path, *lines)
    assert [answer["got"]["n"] for answer in answers] == [0, 1, 2]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"status\n", "request: expected one line of JSON"),
        (b"\xff\n", "request: expected one line of JSON"),
        (b"[1]\n", "request: expected a JSON object"),
        (b"{}\n", "command: expected one of echo, fail, hang, refuse, wait"),
        (b'{"command": ["echo"]}\n', "command: expected one of echo, fail, hang, refuse, wait"),
    ],
)
async def test_what_is_no_request_is_refused_and_the_next_is_heard(tmp_path: Path, line: bytes, error: str) -> None:
    async with serving(tmp_path):
        first, second = await raw(tmp_path, line, b'{"command": "echo"}\n')
    assert first == {"error": error}
    assert second["error"] == ""


@pytest.mark.parametrize("size", [MAX_LONG_REQUEST + 1, 3 * MAX_LONG_REQUEST])
async def test_an_oversize_request_is_refused_and_ends_the_connection(tmp_path: Path, size: int) -> None:
    line = b'{"command": "echo", "x": "' + b"x" * size + b'"}\n'
    async with serving(tmp_path):
        assert await raw(tmp_path, line, b'{"command": "echo"}\n') == [
            {"error": f"request: longer than {MAX_LONG_REQUEST} bytes"}
        ]
        assert (await send_command(tmp_path, "echo"))["error"] == ""


async def test_only_a_command_that_says_so_is_asked_at_length(tmp_path: Path) -> None:
    async def swallow(_request: dict[str, Any]) -> dict[str, Any]:
        return {}

    async with serving(tmp_path, operation("swallow", swallow, longest=2 * MAX_REQUEST)):
        long = b'"x": "%b"}\n' % (b"x" * MAX_REQUEST)
        answers = await raw(
            tmp_path,
            b'{"command": "echo", ' + long,
            b'{"command": "swallow", ' + long,
            b'{"command": "swallow", "y": "%b", ' % (b"y" * MAX_REQUEST) + long,
            b'{"command": "echo"}\n',
        )
    assert [answer["error"] for answer in answers] == [
        f"request: longer than {MAX_REQUEST} bytes",
        "",
        f"request: longer than {2 * MAX_REQUEST} bytes",
        "",
    ]


async def test_half_a_request_is_not_answered(tmp_path: Path) -> None:
    async with serving(tmp_path):
        assert await raw(tmp_path, b'{"command": "echo"}') == []


async def test_a_silent_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "IDLE_SECONDS", 0.05)
    async with serving(tmp_path), asyncio.timeout(30):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET_FILE))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_more_connections_than_the_bound_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path), asyncio.timeout(30):
        held = []
        for _ in range(MAX_CONNECTIONS):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET_FILE))
            writer.write(b'{"command": "echo"}\n')
            assert await reader.readline()
            held.append(writer)
        assert (await send_command(tmp_path, "echo"))["error"] == f"busy: {MAX_CONNECTIONS} connections are open"
        for writer in held:
            writer.close()
            await writer.wait_closed()


async def test_no_service_is_said_plainly(tmp_path: Path) -> None:
    for data_dir in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SetupError, match="no service runs on"):
            await send_command(data_dir, "status")


async def test_a_service_that_does_not_answer_in_time(tmp_path: Path) -> None:
    async with serving(tmp_path):
        with pytest.raises(UnavailableError, match=r"did not answer within 0\.05 s"):
            await send_command(tmp_path, "wait", within=0.05)


async def test_a_service_that_stops_meanwhile(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def begin(_request: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        await asyncio.Event().wait()
        return {}

    async with serving(tmp_path, operation("begin", begin)) as server:
        asking = asyncio.create_task(send_command(tmp_path, "begin"))
        await asyncio.wait_for(begun.wait(), 30)
        await server.stop()
        with pytest.raises(UnavailableError, match="stopped before it answered"):
            await asking


async def test_the_socket_of_a_dead_service_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / SOCKET_FILE))
    with pytest.raises(SetupError, match="no service runs on"):
        await send_command(tmp_path, "echo")
    async with serving(tmp_path):
        assert (await send_command(tmp_path, "echo"))["error"] == ""


async def test_a_living_service_keeps_its_socket(tmp_path: Path) -> None:
    async with serving(tmp_path):
        with pytest.raises(SetupError, match="another service answers"):
            await server_on(tmp_path).start()
        assert (await send_command(tmp_path, "echo"))["error"] == ""


async def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / SOCKET_FILE).write_text("mine")
    with pytest.raises(SetupError, match="cannot listen"):
        await server_on(tmp_path).start()
    assert (tmp_path / SOCKET_FILE).read_text() == "mine"


async def test_a_path_may_be_longer_than_a_socket_address(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    async with serving(deep):
        assert (await send_command(deep, "echo"))["error"] == ""
        with pytest.raises(SetupError, match="another service answers"):
            await server_on(deep).start()
    assert not (deep / SOCKET_FILE).exists()
