"""Runs the blocks of a page in their order, as a reader would: ``python -m tests.harness.pages PAGE FOLDER``.

With ``served`` behind these, a service runs meanwhile. It is a process of its own so that it can be put into a network
namespace, where the ports that are printed are free. It prints what each block did, as JSON.

- ``sh`` is run by a shell. One that begins with ``mediator serve`` or ``make serve`` stays, and is waited for.
- ``console`` has commands behind ``$``, each with what it prints.
- A block whose first line is a comment with a file's name is that file.
- ``python`` is run otherwise; any other language is for reading. ``json`` behind ``sh`` is what that prints.

A comment ``<!-- run: … -->`` before a block says more: ``background``: it stays; ``until TEXT``: again and again until
it prints that; ``fails``; ``not: WHY``; ``as FILE``: it is that file; ``postgresql``: a server with the role and the
database ``mediator`` is started first.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVE = ("make serve", "mediator serve", ".venv/bin/mediator serve")
HTTP = "http://127.0.0.1:8080"
WITHIN = 120.0
PASSWORD = "change-me"
BLOCK = re.compile(r"(?:^<!-- run: (?P<how>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
FILE = re.compile(r"(?:#|//|<!--) (?P<name>[\w-][\w/-]*\.[a-z]+)\b")
RUN = ("sh", "python", "console")
NEAR = 0.03
"""How far a score may be from the one that is printed: processors differ in how they compute vectors."""
GENERATED = (
    (re.compile(r"\(\d+ ms\)"), "(MS)"),
    (re.compile(r"did:key:z6Mk\w+"), "DID"),
    (re.compile(r"[─ ]+"), " "),
)
SCORE = re.compile(r"\b[01]\.\d{3}\b")
PORTS = (4222, 5432, 8080)
NATS = """\
#!{python}
'''As much of the nats tool as pages use: nats request|pub SUBJECT [BODY] [-H NAME:VALUE]; prints the reply.'''
import argparse, asyncio, nats

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["request", "pub"])
parser.add_argument("subject")
parser.add_argument("body", nargs="?", default="")
parser.add_argument("-H", dest="headers", action="append", default=[])
parser.add_argument("--raw", action="store_true")
parser.add_argument("-s", "--server", default="nats://127.0.0.1:4222")
given = parser.parse_intermixed_args()

async def main():
    client = await nats.connect(given.server)
    headers = dict(header.split(":", 1) for header in given.headers) or None
    if given.command == "pub":
        await client.publish(given.subject, given.body.encode(), headers=headers)
        await client.flush()
    else:
        print((await client.request(given.subject, given.body.encode(), timeout=10, headers=headers)).data.decode())
    await client.close()

asyncio.run(main())
"""


@dataclass(frozen=True)
class Block:
    """A block of a page, and what the comment before it says."""

    language: str
    text: str
    how: str = ""

    @property
    def file(self) -> str:
        """The file that it is, if it is one."""
        if self.how.startswith("as "):
            return self.how.removeprefix("as ")
        found = FILE.match(self.text)
        return found["name"] if found else ""

    @property
    def left_out(self) -> bool:
        """Whether a reader only reads it."""
        return self.how.startswith("not: ") or (self.language not in RUN and not self.file)


@dataclass
class Outcome:
    """What a block, or one command of it, did; ``expected`` is what the page shows of its output."""

    language: str
    text: str
    code: int = 0
    out: str = ""
    err: str = ""
    expected: str | None = None
    fails: bool = False

    def check(self) -> None:
        """Assert that it did what the page says."""
        assert (self.code != 0) == self.fails, self
        if self.fails:
            return
        assert "error:" not in self.err.lower(), self
        for found in re.findall(r'"error":\s*"([^"]+)"', self.out):
            raise AssertionError(f"{found}: {self}")
        if self.expected is None:
            return
        if self.language == "sh":
            assert_alike(json.loads(self.out), json.loads(self.expected), self)
        else:
            assert plain(self.out) == plain(self.expected), self
            scores = zip(SCORE.findall(self.out), SCORE.findall(self.expected), strict=True)
            assert all(abs(float(got) - float(wanted)) < NEAR for got, wanted in scores), self.out


def plain(text: str) -> list[str]:
    """Return the lines that say something, without what differs from run to run."""
    for pattern, instead in GENERATED:
        text = pattern.sub(instead, text)
    return [line.strip() for line in SCORE.sub("SCORE", text).splitlines() if line.strip()]


def assert_alike(got: Any, wanted: Any, where: object) -> None:
    """Assert that JSON is as printed, but for times and what the service makes up: the page has … in its place."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        assert {*got} == {*wanted}, where
        for name, value in wanted.items():
            if not name.endswith(("_time", "_at", "token", "ts", "send_address")):
                assert_alike(got[name], value, where)
    elif isinstance(wanted, list) and isinstance(got, list):
        assert len(got) == len(wanted), where
        for one, other in zip(got, wanted, strict=True):
            assert_alike(one, other, where)
    elif isinstance(wanted, str) and "…" in wanted:
        assert re.fullmatch(".*".join(map(re.escape, wanted.split("…"))), got), where
    else:
        assert got == wanted, where


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page."""
    return parse(page.read_text(encoding="utf-8"))


def parse(text: str) -> list[Block]:
    """Return the blocks of a text."""
    found = BLOCK.finditer(text)
    return [Block(block["language"], block["text"], block["how"] or "") for block in found]


def raise_loopback() -> None:
    """Turn on the loopback interface of a new network namespace; in any other it is on."""
    with socket.socket() as any_socket:
        flags = 0x8913, 0x8914  # SIOCGIFFLAGS, SIOCSIFFLAGS
        request = fcntl.ioctl(any_socket, flags[0], struct.pack("16sh14x", b"lo", 0))
        name, now = struct.unpack("16sh14x", request)
        if not now & 1:
            fcntl.ioctl(any_socket, flags[1], struct.pack("16sh14x", name, now | 1))


def until(condition: Callable[[], Any], what: str, within: float = WITHIN) -> None:
    """Ask again and again until the answer is true."""
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"not within {within:g} s: {what}")
        time.sleep(0.1)


def ready() -> bool:
    """Whether the service on the printed port says that it is ready."""
    try:
        with urllib.request.urlopen(f"{HTTP}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def says_ready(log: Path) -> bool:
    """Whether a service has written that it is ready."""
    return '"event":"ready"' in log.read_text() or " ready " in log.read_text()


def reads_sentences() -> bool:
    """Whether all agents are found by meaning: the model is loaded, and has read their cards."""
    with urllib.request.urlopen(f"{HTTP}/metrics", timeout=5) as answer:
        metrics = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    unread = [value for name, value in metrics.items() if name.startswith("mediator_registry_unembedded_agents")]
    return metrics.get("mediator_registry_encoder_up") == "1.0" and {*map(float, unread)} == {0.0}


def prepare(folder: Path) -> dict[str, str]:
    """Lay out a folder as the repository is after ``make``; return the environment of a new terminal."""
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "examples").symlink_to(ROOT / "examples")
    tools = folder / "tools"
    tools.mkdir()
    (tools / "nats").write_text(NATS.format(python=sys.executable))
    (tools / "nats").chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MEDIATOR_", "COLUMNS"))}
    (folder / "home").mkdir()
    return inherited | {
        "PATH": f"{tools}:{sys.prefix}/bin:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "PYTHONPATH": str(ROOT),
    }


def serve_command() -> str:
    """Return what ``make serve`` runs once everything is installed."""
    make = [str(shutil.which("make")), "--dry-run", "--no-print-directory", "serve"]
    # Under `make test` the outer one would tell it its own options.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].strip()


class Reader:
    """Does what a page says, in one folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._environment = prepare(folder)
        self._started = 0
        self._services: list[subprocess.Popen[bytes]] = []

    def run(self, block: Block) -> Iterator[Outcome]:
        """Run a block, and say what it did."""
        if block.how == "postgresql":
            self._start_postgresql()
        if block.file:
            path = self._folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.text.startswith(SERVE):
            log = self._start(block.text.replace("make serve", f"exec {serve_command()}"))
            until(lambda: says_ready(log), "the service is ready")
        elif block.how == "background":
            self._start(block.text)
        elif block.language == "console":
            for command in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                line, _, expected = command.partition("\n")
                if "discover" in line or '"semantic"' in line:
                    until(reads_sentences, "the model has read the cards")
                yield self._done(block, line, expected)
        elif block.how.startswith("until "):
            outcome = self._done(block, block.text)

            def printed() -> bool:
                nonlocal outcome
                outcome = self._done(block, block.text)
                return block.how.removeprefix("until ") in outcome.out

            until(printed, f"{block.text} prints {block.how}, last {outcome}")
            yield outcome
        else:
            yield self._done(block, block.text)

    def stop(self) -> None:
        """Stop what runs in the background, the newest first."""
        for process in reversed(self._services):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(WITHIN)

    def _start(self, shell: str) -> Path:
        self._started += 1
        log = self._folder / f"log{self._started}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["sh", "-e", "-c", shell], cwd=self._folder, env=self._environment, stdout=out, stderr=out,
                process_group=0,
            )  # fmt: skip
        self._services.append(process)
        return log

    def _done(self, block: Block, text: str, expected: str | None = None) -> Outcome:
        command = [sys.executable, "-c", text] if block.language == "python" else ["bash", "-e", "-c", text]
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=WITHIN,
            check=False,
        )  # fmt: skip
        fails = block.how == "fails"
        return Outcome(block.language, text, done.returncode, done.stdout, done.stderr, expected, fails)

    def _start_postgresql(self) -> None:
        from tests.harness.postgres import PrivateServer, programs_found

        programs = programs_found()
        assert programs is not None
        server = PrivateServer(programs, port=5432)
        self._stack.callback(server.stop)
        server.run(f"CREATE ROLE mediator LOGIN PASSWORD '{PASSWORD}'")
        server.run("CREATE DATABASE mediator OWNER mediator ENCODING 'UTF8' TEMPLATE template0")


def run_all(page: Path, folder: Path, *, served: bool) -> Iterator[Outcome]:
    """Run block after block, and yield what each printed; ``served``: beside a service that the page does not start."""
    with ExitStack() as stack:
        reader = Reader(folder, stack)
        stack.callback(reader.stop)
        if served:
            [*reader.run(Block("sh", "mediator serve"))]
        previous: Outcome | None = None
        for block in blocks(page):
            if block.language == "json" and not block.file and previous is not None and previous.expected is None:
                previous.expected = block.text
            if previous is not None:
                yield previous
                previous = None
            if block.left_out:
                continue
            for outcome in reader.run(block):
                if previous is not None:
                    yield previous
                previous = outcome
        if previous is not None:
            yield previous


def run_page(page: Path, folder: Path, *, served: bool = False, within: float = 280) -> list[Outcome]:
    """Run a page in a network of its own; skip the test where there is none and the ports are taken."""
    command = [*_alone(), sys.executable, "-m", __name__, str(page), str(folder), *(["served"] if served else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=within, check=False)
    logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("log*")))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    return [Outcome(**outcome) for outcome in json.loads(done.stdout)]


def _alone() -> list[str]:
    """Return what runs a command where the printed ports are free."""
    # PostgreSQL refuses to run as root, which everybody is in a namespace of users.
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if (
            shutil.which("unshare")
            and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
        ):
            return command
    import pytest

    from tests.harness.service import listening

    if any(map(listening, PORTS)):
        pytest.skip(f"somebody listens on {PORTS}, and there may be no network namespace")
    return []


if __name__ == "__main__":
    raise_loopback()
    outcomes = run_all(Path(sys.argv[1]), Path(sys.argv[2]), served="served" in sys.argv[3:])
    print(json.dumps([asdict(outcome) for outcome in outcomes]))
