"""Wallets on Credo and on the Identus SDK: a Node process that holds some of them, spoken to over stdin and stdout."""

import asyncio
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aries_askar
import orjson

from tests.harness.didcomm_service import Door, missing
from tests.harness.service import ENDS_WITHIN
from tests.harness.waiting import until

FOLDER = Path(__file__).parent
INSTALLED = "node_modules/.installed"
"""Made by `make peers` in the folder of each library."""
STEP_WITHIN = 60.0
EMPTIED_WITHIN = 30.0
LOG_TAIL = 40


class Wallet:
    """One wallet; what came stays known here when its process is killed."""

    def __init__(self, process: "WalletProcess", name: str, options: dict[str, Any]) -> None:
        self.name = name
        self._process = process
        self._options = options
        self.received: list[str] = []
        """Texts of the basic messages that were shown."""
        self.connections: dict[str, str] = {}
        """Over which connection each text came, or from which DID."""

    async def open(self) -> Any:
        """Make the wallet, or open its storage again; it is connected to the mediator then."""
        return await self._do("open", folder=str(self._process.folder), **self._options)

    async def invite(self) -> str:
        """Make an invitation for one other wallet, which leads through the mediator."""
        return str(await self._do("invite"))

    async def accept(self, invitation: str) -> str:
        """Connect to another wallet and return the connection's id."""
        return str(await self._do("accept", invitation=invitation))

    async def write(self, to: str, texts: Iterable[str]) -> None:
        """Send basic messages, one after the other, over a connection or to a DID."""
        await self._do("write", to=to, texts=list(texts))

    async def shows(self, texts: Iterable[str], within: float = STEP_WITHIN) -> None:
        """Wait until all of these were shown; those that came before or twice do no harm."""
        wanted = set(texts)
        try:
            async with asyncio.timeout(within):
                while not wanted <= set(self.received):
                    await self._process.heard()
        except TimeoutError:
            lost = sorted(wanted.difference(self.received))
            raise AssertionError(f"{self.name} lacks {lost}\n{self._process.tail()}") from None

    def repeated(self, texts: Iterable[str]) -> dict[str, int]:
        """Return which of these were shown more than once, and how often."""
        counted = Counter(self.received)
        return {text: counted[text] for text in texts if counted[text] > 1}

    async def _do(self, command: str, **fields: Any) -> Any:
        return await self._process.do(command, wallet=self.name, **fields)


class WalletProcess:
    """A Node process, which can be killed and started again; its wallets are stored in a folder."""

    def __init__(self, library: str, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._library = library
        self._log = folder / "wallets.log"
        self._wallets: dict[str, Wallet] = {}
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._came = asyncio.Condition()

    @classmethod
    async def running(cls, library: str, folder: Path, stack: AsyncExitStack) -> "WalletProcess":
        """Start a process that ends with the test; where the library is not installed the test is skipped.

        ``library`` is the folder in which it is installed: "credo/0.5".
        """
        if not (FOLDER / library / INSTALLED).exists():
            missing(f"{library} is not there: `make peers` installs it")
        process = cls(library, folder)
        await process.start()
        stack.push_async_callback(process.kill)
        return process

    async def start(self) -> None:
        """Start the process; its wallets have to be opened."""
        node = shutil.which("node")
        assert node is not None
        # Credo's storage comes without its native library; the Python package has the same.
        environment = {**os.environ, "LIB_ASKAR_PATH": str(Path(aries_askar.__file__).parent)}
        kind, _, edition = self._library.partition("/")
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                node, str(FOLDER / kind / "wallet.mjs"), edition,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, env=environment,
            )  # fmt: skip
        self._reading = asyncio.create_task(self._read(self._process))

    async def kill(self) -> None:
        """End the process with SIGKILL, if it runs."""
        if self._process.returncode is None:
            self._process.kill()
        async with asyncio.timeout(ENDS_WITHIN):
            await self._process.wait()
            await self._reading

    def wallet(self, name: str, **options: Any) -> Wallet:
        """Name a wallet that is kept here, with what it is opened with; it has to be opened."""
        self._wallets[name] = Wallet(self, name, options)
        return self._wallets[name]

    async def do(self, command: str, **fields: Any) -> Any:
        """Have the process do something, and return what it answers."""
        assert self._process.stdin is not None
        id = next(self._ids)
        answer = self._answers[id] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(orjson.dumps({"id": id, "command": command, **fields}) + b"\n")
        try:
            return await asyncio.wait_for(answer, STEP_WITHIN)
        except TimeoutError:
            raise AssertionError(f"no answer to {command} {fields}\n{self.tail()}") from None

    async def heard(self) -> None:
        """Wait until a wallet was shown something."""
        async with self._came:
            await self._came.wait()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        while line := await process.stdout.readline():
            said = orjson.loads(line)
            if "wallet" in said:
                wallet = self._wallets[said["wallet"]]
                wallet.received.append(said["text"])
                wallet.connections[said["text"]] = said["connection"]
                async with self._came:
                    self._came.notify_all()
            elif not (answer := self._answers.pop(said["id"])).done():
                if "error" in said:
                    answer.set_exception(AssertionError(f"{said['error']}\n{self.tail()}"))
                else:
                    answer.set_result(said["value"])
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(AssertionError(f"the process has ended\n{self.tail()}"))
        self._answers.clear()

    def tail(self) -> str:
        """Return the last lines of what the process warned of."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL:])


async def emptied(door: Door) -> None:
    """Wait until the mediator keeps nothing any more."""

    async def is_empty() -> bool:
        said = await door.command("connections", "list", "--json", "--data-dir", str(door.service.data_dir))
        return not any(row["messages"] for row in json.loads(said)["connections"])

    await until(is_empty, EMPTIED_WITHIN, "what was picked up is removed")
