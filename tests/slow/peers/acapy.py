"""ACA-Py, run as its users run it: a process of its own with an admin API, and a webhook that says what it received."""

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.harness.didcomm_service import missing
from tests.harness.service import ENDS_WITHIN, Services, free_port, spawn
from tests.harness.waiting import until

PROGRAM = Path(__file__).parents[3] / ".venv-acapy" / "bin" / "aca-py"
"""Made by `make peers`: its pins and ours exclude each other."""
STEP_WITHIN = 60.0


class Agent:
    """One agent, which can be stopped and started again on the same wallet and ports."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        """``options`` are more of its command line."""
        self.name = name
        self.port = free_port()
        self._options = options
        self.log = folder / f"{name}.log"
        self._folder = folder
        self._admin = f"http://127.0.0.1:{free_port()}"
        self._hooks = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.received: list[str] = []
        """Texts of the basic messages that came."""

    @classmethod
    async def running(cls, name: str, services: Services, stack: AsyncExitStack, *options: str) -> "Agent":
        """Start an agent that ends with the test; without the program the test is skipped."""
        if not PROGRAM.exists():
            missing("ACA-Py is not there: `make peers` installs it")
        agent = cls(name, services.folder, *options)
        agent.session = await stack.enter_async_context(aiohttp.ClientSession())
        await agent.listen(stack)
        stack.callback(agent.discard)
        await agent.start()
        return agent

    async def listen(self, stack: AsyncExitStack) -> None:
        async def hook(request: web.Request) -> web.Response:
            if request.match_info["topic"] == "basicmessages":
                self.received.append((await request.json())["content"])
            return web.Response()

        app = web.Application()
        app.router.add_post("/topic/{topic}/", hook)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", self._hooks).start()

    async def start(self) -> None:
        """Start the process and wait until its admin API answers."""
        command = [
            str(PROGRAM), "start", "--no-ledger", "--label", self.name,
            "--wallet-type", "askar", "--wallet-name", self.name, "--wallet-key", "key", "--auto-provision",
            "--inbound-transport", "http", "127.0.0.1", str(self.port), "--outbound-transport", "http",
            "--endpoint", f"http://127.0.0.1:{self.port}",
            "--admin", "127.0.0.1", self._admin.rpartition(":")[2], "--admin-insecure-mode",
            "--webhook-url", f"http://127.0.0.1:{self._hooks}",
            "--auto-accept-invites", "--auto-accept-requests", "--auto-ping-connection", "--log-level", "warning",
            *self._options,
        ]  # fmt: skip
        # Its wallet lies in the home directory.
        self._process = spawn(command, self.log, {**os.environ, "HOME": str(self._folder)})
        await until(self._answers, STEP_WITHIN * 2, f"{self.name} is ready, see {self.log}")

    async def _answers(self) -> bool:
        assert self._process.poll() is None, f"{self.name} ended: {self.log.read_text()[-2000:]}"
        try:
            return bool(await self.call("GET", "/status/ready"))
        except aiohttp.ClientError:
            return False

    async def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        await asyncio.to_thread(self._process.wait, ENDS_WITHIN)

    def discard(self) -> None:
        """End the process at once, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    async def call(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        """Use the admin API."""
        async with self.session.request(method, self._admin + path, json=body, params=query) as answer:
            said = await answer.text()
            answer.raise_for_status()
            return json.loads(said)

    async def state(self, path: str, *states: str) -> Any:
        """Wait until a record is in one of these states, and return it."""

        async def reached() -> Any:
            record = await self.call("GET", path)
            record = record.get("result", record)
            assert record["state"] not in ("abandoned", "denied", "error"), record
            return record if record["state"] in states else None

        return await until(reached, STEP_WITHIN, f"{self.name}: {path} is {' or '.join(states)}")

    # What the tests have it do.

    async def accept(self, invitation: Any) -> str:
        """Connect by an out-of-band invitation, and return the connection's id."""
        record = await self.call("POST", "/out-of-band/receive-invitation", invitation, use_existing_connection="false")
        await self.connected(record["connection_id"])
        return str(record["connection_id"])

    async def connected(self, connection: str) -> None:
        """Wait until a connection is made."""
        await self.state(f"/connections/{connection}", "active", "completed")

    async def mediated(self, connection: str) -> str:
        """Ask for mediation and wait for the grant; return its id."""
        asked = await self.call("POST", f"/mediation/request/{connection}", {})
        record = await self.state(f"/mediation/requests/{asked['mediation_id']}", "granted")
        return str(record["mediation_id"])

    async def invite(self, mediation: str) -> Any:
        """Make an invitation that leads through a mediator; its key is registered there."""
        made = await self.call(
            "POST", "/out-of-band/create-invitation",
            {"handshake_protocols": ["https://didcomm.org/connections/1.0"], "mediation_id": mediation},
            auto_accept="true",
        )  # fmt: skip
        return made["invitation"]

    async def keylist(self, connection: str) -> list[str]:
        """Return the keys it believes to have registered."""
        found = await self.call("GET", "/mediation/keylists", conn_id=connection, role="client")
        return [item["recipient_key"] for item in found["results"]]

    async def write(self, connection: str, text: str) -> None:
        """Send a basic message."""
        await self.call("POST", f"/connections/{connection}/send-message", {"content": text})

    async def has(self, texts: Iterable[str], within: float = STEP_WITHIN) -> None:
        """Wait until these basic messages have come; those that came before or twice do no harm."""
        wanted = Counter(texts)
        await until(_covering(wanted, self.received), within, f"{self.name} gets {dict(wanted)}, has {self.received}")


def _covering(wanted: Counter[str], received: list[str]) -> Callable[[], bool]:
    return lambda: wanted <= Counter(received)
