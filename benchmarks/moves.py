"""Counts what the service runs through for one request: its files, its functions, calls, and moves between files.

`python -m benchmarks.moves [REQUEST …] [--rounds N] [--tree] [--json]`

The service is the command `mediator serve` with default settings (but no embedding model) and an empty data directory.
It runs in a process of its own under Python's profiler; the client is this process and is not counted. Each request is
first made a few times to warm caches and connections, then in rounds that are recorded. A round starts right before the
request and ends ``SETTLE_SECONDS`` after its answer, so work that follows the answer counts as well.

Recorded are calls, in every thread of the service, of Python functions whose source is in one of the ``PACKAGES``. Each
time a coroutine or generator resumes counts as a call. A comprehension belongs to the function that contains it.

- *functions*: distinct functions called; *files*: distinct files they are in.
- *calls*: calls of functions; *small*: those of functions whose body, docstring aside, is one statement.
- *moves*: calls whose nearest calling function of ours is in another file. Returns do not count, and neither do calls
  that the event loop, a thread or a library makes with no function of ours in between.

Background jobs can only add calls, so the round with the fewest calls is reported. The line ``idle`` reports rounds
without a request. ``--tree`` prints the calls of the reported round, indented, with the file where it changes.
"""

import argparse
import ast
import asyncio
import json
import os
import runpy
import sys
import tempfile
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import nats
import orjson
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from benchmarks.servers import READY_SECONDS, free_port
from pickup.client import Grant, Holder, Sender

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mediator", "pickup", "registry", "pipeline")
INLINE = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
NAMES = ("idle", "SEND", "FETCH", "ACK", "forward", "delivery-request", "SUB", "REGISTER", "DISCOVER")
API = "$mq9.AI."
WARM = 5
ROUNDS = 15
SETTLE_SECONDS = 0.1
STORED = 3
"""Messages that a FETCH, a delivery and a replay hand out, and agents that a DISCOVER finds."""
BODY = b"x" * 256
NOTE = "https://didcomm.org/basicmessage/2.0/message"
CARD = {
    "description": "Turns invoices into ledger entries",
    "skills": [{"id": "book", "name": "Bookkeeping", "description": "Books invoices", "tags": ["finance"]}],
}

Call = tuple[int, str, str, str | None, int]
"""Number of our functions below it on the stack, file, function, file of the nearest caller of ours, first line."""
Request = Callable[[], Awaitable[object]]


# In the process of the service.


class CallRecorder:
    """Records calls of our functions while it is switched on."""

    def __init__(self) -> None:
        self._calls: list[Call] | None = None
        self._under_way: set[FrameType] = set()
        self._files: dict[CodeType, str | None] = {}

    def switch(self) -> list[Call] | None:
        """Switch on and return None, or switch off and return the calls since."""
        calls, self._calls = self._calls, None
        if calls is None:
            self._under_way = {frame for top in sys._current_frames().values() for frame in _stack(top)}
            self._calls = []
        return calls

    def __call__(self, frame: FrameType, event: str, _value: object) -> None:
        """Handle a profiler event of any thread (``sys.setprofile``)."""
        calls = self._calls
        if calls is None or event != "call":
            return
        file = self._file(frame.f_code)
        if file is None or frame.f_code.co_name in INLINE:
            return
        callers = [
            found
            for caller in _stack(frame.f_back)
            if caller not in self._under_way and caller.f_code.co_name not in INLINE
            if (found := self._file(caller.f_code))
        ]
        code = frame.f_code
        calls.append((len(callers), file, code.co_qualname, callers[0] if callers else None, code.co_firstlineno))

    def _file(self, code: CodeType) -> str | None:
        """Return the path of the source file if it is ours, else None."""
        try:
            return self._files[code]
        except KeyError:
            path = Path(code.co_filename)
            ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
            return self._files.setdefault(code, str(path.relative_to(ROOT)) if ours else None)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def serve(arguments: list[str]) -> None:
    """Run `mediator serve` under the profiler; each line on standard input switches the recorder on or off.

    The answer on standard output is a line of JSON: the recorded calls, or ``null`` when it was switched on.
    """
    recorder = CallRecorder()

    def listen() -> None:
        for _ in sys.stdin:
            print(json.dumps(recorder.switch()), flush=True)

    threading.Thread(target=listen, daemon=True).start()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    sys.argv = ["mediator", "serve", *arguments]
    runpy.run_module("mediator", run_name="__main__")


# In the process of the client.


@dataclass(frozen=True, slots=True)
class Figures:
    """What the service runs through for one request."""

    files: int
    functions: int
    moves: int
    calls: int
    small: int

    @classmethod
    def of(cls, calls: Sequence[Call]) -> "Figures":
        """Count these calls."""
        functions = {(file, function) for _, file, function, _, _ in calls}
        moves = sum(caller not in (None, file) for _, file, _, caller, _ in calls)
        small = sum(line in small_functions(file) for _, file, _, _, line in calls)
        return cls(len({file for file, _ in functions}), len(functions), moves, len(calls), small)


@cache
def small_functions(file: str) -> frozenset[int]:
    """Return the first lines, decorators included, of the functions in a file that have one statement."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        match node:
            case ast.Lambda():
                found.add(node.lineno)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                body = node.body[ast.get_docstring(node) is not None :]
                if sum(isinstance(inner, ast.stmt) for each in body for inner in ast.walk(each)) <= 1:
                    found.add(min(each.lineno for each in (node, *node.decorator_list)))
    return frozenset(found)


class ProfiledService:
    """The service in a process of its own, which records on demand."""

    def __init__(self, process: asyncio.subprocess.Process, data_dir: Path, nats_port: int, http_port: int) -> None:
        self.data_dir = data_dir
        self.nats_url = f"nats://127.0.0.1:{nats_port}"
        self.http_url = f"http://127.0.0.1:{http_port}"
        self._process = process

    @classmethod
    @asynccontextmanager
    async def started(cls, folder: Path) -> AsyncIterator["ProfiledService"]:
        """Run the service inside this block."""
        nats_port, http_port, data_dir = free_port(), free_port(), folder / "data"
        options = ["--data-dir", str(data_dir), "--nats", f"127.0.0.1:{nats_port}", "--http", f"127.0.0.1:{http_port}"]
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.moves", "--serve", *options),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={"MEDIATOR_REGISTRY__SEMANTIC": "false", **os.environ},
                limit=1 << 26,
            )
        try:
            service = cls(process, data_dir, nats_port, http_port)
            await service._ready(folder / "log")
            yield service
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

    async def _ready(self, log: Path) -> None:
        async with asyncio.timeout(READY_SECONDS):
            while self._process.returncode is None:
                try:
                    await asyncio.to_thread(urllib.request.urlopen, f"{self.http_url}/readyz", timeout=5)
                    return
                except OSError:
                    await asyncio.sleep(0.05)
        raise RuntimeError(f"the service did not start: {_end_of(log)}")

    async def record(self, request: Request) -> list[Call]:
        """Return the calls of one request."""
        await self._switch()
        await request()
        await asyncio.sleep(SETTLE_SECONDS)
        return [tuple(call) for call in json.loads(await self._switch())]

    async def _switch(self) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return await self._process.stdout.readline()

    async def invitation(self) -> str:
        """Return the link of an invitation for DIDComm v2."""
        command = (sys.executable, "-m", "mediator", "invite", "--v2", "--json", "--data-dir", str(self.data_dir))
        made = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await made.communicate()
        return str(json.loads(output)["v2_url"])


def _end_of(log: Path) -> str:
    return log.read_text()[-2000:]


class Requests:
    """Makes each kind of request, one at a time."""

    def __init__(self, client: Client, holder: Holder, sender: Sender) -> None:
        self._client, self._holder, self._sender = client, holder, sender
        self._grant = Grant("", ())
        self._did = ""
        self._last = 0
        self._subscription: Subscription | None = None
        self._numbers = iter(range(1 << 30))

    async def prepare(self) -> None:
        """Make the mailboxes, the mail and the agents that the requests need."""
        for name in ("sent", "fetched", "acked", "pushed", "agent"):
            await self._ask("MAILBOX.CREATE", {"name": name})
        for name in ("fetched", "pushed"):
            for _ in range(STORED):
                await self._ask(f"MSG.SEND.{name}", BODY)
        self._grant = await self._holder.mediate()
        self._did = await self._holder.add_key()
        for _ in range(STORED):
            await self.forward()
            await self.register()

    async def _ask(self, verb: str, body: Any) -> Any:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        answer = orjson.loads((await self._client.request(API + verb, data, timeout=10)).data)
        if answer["error"]:
            raise RuntimeError(f"{verb}: {answer['error']}")
        return answer

    async def _fetch(self, name: str) -> list[Any]:
        body = {"group_name": "readers", "deliver": "earliest", "config": {"num_msgs": STORED, "max_wait_ms": 0}}
        return list((await self._ask(f"MSG.FETCH.{name}", body))["messages"])

    @property
    def table(self) -> dict[str, tuple[Request, Request]]:
        """Map each name to what prepares a round, which is not recorded, and the request."""
        nothing = self._nothing
        steps = (
            (nothing, nothing),
            (nothing, self.send),
            (nothing, self.fetch),
            (self._deliver, self.ack),
            (nothing, self.forward),
            (nothing, self.delivery_request),
            (self._unsubscribe, self.subscribe),
            (nothing, self.register),
            (nothing, self.discover),
        )
        return dict(zip(NAMES, steps, strict=True))

    async def _nothing(self) -> None:
        pass

    async def _deliver(self) -> None:
        await self._ask("MSG.SEND.acked", BODY)
        self._last = (await self._fetch("acked"))[-1]["msg_id"]

    async def _unsubscribe(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def send(self) -> None:
        """SEND 256 bytes."""
        await self._ask("MSG.SEND.sent", BODY)

    async def fetch(self) -> None:
        """FETCH for a group."""
        assert len(await self._fetch("fetched")) == STORED

    async def ack(self) -> None:
        """ACK what the group fetched."""
        await self._ask("MSG.ACK.acked", {"group_name": "readers", "mail_address": "acked", "msg_id": self._last})

    async def forward(self) -> None:
        """Post a DIDComm v2 forward over HTTP."""
        message = {"id": f"note-{next(self._numbers)}", "type": NOTE, "body": {"content": "x" * 256}}
        await self._sender.send_v2(self._did, self._grant.routing[0], self._grant.endpoint, message)

    async def delivery_request(self) -> None:
        """Ask for waiting mail with DIDComm v2 over HTTP."""
        assert len(await self._holder.fetch(limit=STORED)) == STORED

    async def subscribe(self) -> None:
        """Subscribe to a mailbox with mail, by a subject of the second edition (E6)."""
        self._subscription = await self._client.subscribe(f"{API}MAILBOX.MSG.pushed.*")
        for _ in range(STORED):
            await self._subscription.next_msg(timeout=10)

    async def register(self) -> None:
        """REGISTER a new agent."""
        name = f"agent.{next(self._numbers)}"
        await self._ask("AGENT.REGISTER", {**CARD, "name": name, "mailbox": f"mq9://broker/{name}"})

    async def discover(self) -> None:
        """DISCOVER by keywords."""
        found = await self._ask("AGENT.DISCOVER", {"text": "invoices for the ledger", "limit": STORED})
        assert len(found["agents"]) == STORED


async def measure(names: Sequence[str], rounds: int) -> dict[str, list[Call]]:
    """Return for each request the calls of the round with the fewest."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mediator-moves-")))
        service = await stack.enter_async_context(ProfiledService.started(folder))
        client = await stack.enter_async_context(await nats.connect(service.nats_url))
        holder = await stack.enter_async_context(await Holder.connect(await service.invitation()))
        requests = Requests(client, holder, await stack.enter_async_context(Sender()))
        await requests.prepare()
        fewest = {}
        for name in names:
            prepare, request = requests.table[name]
            for _ in range(WARM):
                await prepare()
                await request()
            seen = []
            for _ in range(rounds):
                await prepare()
                await asyncio.sleep(SETTLE_SECONDS)
                seen.append(await service.record(request))
            fewest[name] = min(seen, key=len)
        return fewest


def lines(calls: Sequence[Call]) -> Iterator[str]:
    """Print calls as a tree: each below its caller, indented further."""
    for depth, file, function, caller, _ in calls:
        yield "  " * depth + (function if file == caller else f"{file}: {function}")


def main() -> None:
    """Measure and print a table, or JSON."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moves",
        description="Count files, functions, calls and moves between files for one request.",
    )
    parser.add_argument("requests", nargs="*", metavar="REQUEST", help=f"any of {', '.join(NAMES)}; all without")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="recorded rounds; the one with the fewest calls is reported"
    )
    parser.add_argument("--tree", action="store_true", help="print the calls as a tree, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if unknown := set(options.requests) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(NAMES)}")
    seen = asyncio.run(measure([name for name in NAMES if name in (options.requests or NAMES)], options.rounds))
    figures = {name: Figures.of(calls) for name, calls in seen.items()}
    if options.json:
        print(json.dumps({name: asdict(each) for name, each in figures.items()}, indent=2))
        return
    if options.tree:
        for name, calls in seen.items():
            print(name, *lines(calls), sep="\n", end="\n\n")
    print("| request | files | functions | moves | calls | small |\n|---|---|---|---|---|---|")
    for name, each in figures.items():
        print(f"| {name} | {each.files} | {each.functions} | {each.moves} | {each.calls} | {each.small} |")


if __name__ == "__main__":
    main()
