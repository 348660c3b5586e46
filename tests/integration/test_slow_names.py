"""Names whose look-up hangs, as a hostile name server has it: they hold up neither the service nor its end."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mediator.errors import UnreachableError
from mediator.http import resolver
from mediator.http.guard import Guard
from tests.harness.app import app
from tests.harness.waiting import until
from tests.integration.test_admin_api import OPERATORS, Admin
from tests.integration.test_copies import RULES, send
from tests.integration.test_guard import LOOPBACK, guarding, hello, serving

SOON = 0.2
"""Seconds of a call whose name hangs."""
PATIENCE = 30.0
HANGS = 60.0
"""Seconds after which a name is found at the latest, so that what waits for it fails a test and does not block it."""
FEW_THREADS = 2
SLOW, UNKNOWN = ".slow.example", "unknown.example"


class Names:
    """The system's resolver, in which some names hang until they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.asked: list[str] = []
        self._system = socket.getaddrinfo

    def look_up(self, host: Any, *args: Any, **more: Any) -> Any:
        if isinstance(host, str) and host.endswith(".example"):
            self.asked.append(host)
            if host.endswith(SLOW):
                self.released.wait(HANGS)
                host = "127.0.0.1"
            else:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._system(host, *args, **more)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made.look_up)
    try:
        yield made
    finally:
        made.released.set()


async def fail(guard: Guard, host: str) -> str:
    """Call a host that cannot be reached; return why."""
    with pytest.raises(UnreachableError) as raised:
        await guard.get(f"http://{host}/", 10, SOON)
    return str(raised.value)


@pytest.mark.rule("C8", "D10")
async def test_names_that_hang_hold_up_neither_requests_nor_the_end(tmp_path: Path, names: Names) -> None:
    # As on a small machine.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(FEW_THREADS))
    async with app(tmp_path, operators=OPERATORS) as service:
        admin = Admin(service)
        await service.done("MAILBOX.CREATE", {"name": "box"})
        hosts = {f"h{number}{SLOW}" for number in range(2 * FEW_THREADS)}
        for host in hosts:
            await admin.done("POST", RULES, {"name": host[:2], "to_url": f"http://{host}/"})
        await send(service, "MSG.SEND.box", b"x")
        await until(lambda: set(names.asked) == hosts)
        async with asyncio.timeout(PATIENCE):
            assert (await admin.call("GET", "/doctor")).status == 200
            await asyncio.to_thread(bool)
        stopping = time.monotonic()
    assert time.monotonic() - stopping < PATIENCE
    assert not names.released.is_set()


@pytest.mark.rule("C8", "D10")
async def test_a_name_that_hangs_takes_one_thread_however_often_tried(names: Names) -> None:
    async with guarding() as guard:
        for _ in range(3):
            assert await fail(guard, f"one{SLOW}") == f"no answer within {SOON:g} seconds"
        assert names.asked == [f"one{SLOW}"]


@pytest.mark.rule("C8", "D10")
async def test_names_are_looked_up_so_many_at_a_time(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "MAX_LOOKUPS", 2)
    async with guarding() as guard, serving(hello) as server:
        hosts = [f"h{number}{SLOW}" for number in range(4)]
        await asyncio.gather(*(fail(guard, host) for host in hosts))
        assert names.asked == hosts[:2]
        # These have their turn when the first two are found, and those who gave up are not looked up.
        later = [asyncio.create_task(guard.get(f"http://x{SLOW}:{server.port}/", 10, PATIENCE)) for _ in range(3)]
        await asyncio.sleep(0)
        names.released.set()
        assert await asyncio.gather(*later) == [b"hello"] * 3
        assert set(names.asked) == {*hosts[:2], f"x{SLOW}"}


@pytest.mark.rule("D12")
async def test_a_name_that_is_not_known_is_no_connection(names: Names) -> None:
    async with guarding() as guard:
        assert await asyncio.gather(fail(guard, UNKNOWN), fail(guard, UNKNOWN)) == ["no connection"] * 2
        assert await fail(guard, "a" * 64 + ".example") in {"no connection", "no proper answer"}


async def test_the_system_is_asked_for_names() -> None:
    async with serving(hello) as server, guarding(LOOPBACK) as guard:
        assert await guard.get(f"http://localhost:{server.port}/", 10, PATIENCE) == b"hello"


HANGING = """
import asyncio, socket, threading
from mediator.errors import UnreachableError
from mediator.http.guard import Guard

async def main():
    try:
        await Guard().get("http://hangs.example/", 10, 0.1)
    except UnreachableError as error:
        print(error)

socket.getaddrinfo = lambda *args, **more: threading.Event().wait()
asyncio.run(main())
"""


@pytest.mark.rule("C8", "D10")
def test_a_process_ends_while_a_name_is_looked_up() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "no answer within 0.1 seconds\n"
