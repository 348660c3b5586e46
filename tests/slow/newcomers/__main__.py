"""Plays the newcomers README is written for, each on a clean machine: ``python -m tests.slow.newcomers [NAME…]``.

A machine is a copy of the checkout, a new HOME, no configuration of pip, and no programs but Python, make and what any
Linux has. A newcomer runs the commands under their heading as printed, after those before all headings, until the first
success. Prints each step with its seconds; ends with 1 when somebody did not get there.
"""

import argparse
import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.harness.pages import ROOT, RUN, Block, parse, ready, until
from tests.harness.trust import trusted
from tests.slow.newcomers import network

README = ROOT / "README.md"
SECTION = "## One minute"
SERVE = re.compile(r"^(make|\.venv/bin/mediator) serve\b", re.MULTILINE)
READY = "GET /readyz: 200"
INSTALL_WITHIN = 600.0
LARGEST_MB = 600
"""What ``make serve`` may install."""
TOOLS = (
    "awk basename cat chmod cp cut date dirname echo env expr find grep head id ln ls make mkdir mktemp mv printf "
    "readlink rm sed sh sleep sort tail tee test touch tr true uname wc xargs"
)
"""The programs of a clean machine, beside Python."""
OTHER_TOOLS = ("nats ", "curl ", "npm ", "node ")
"""Blocks that begin so are for readers who have these tools."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Somebody README is for."""

    heading: str
    """A word of the heading under which their commands stand."""
    success: str
    """What is printed when they have got there."""


NEWCOMERS = {
    "agent": Newcomer("Agents on NATS", "translate this"),
    "wallet": Newcomer("Wallets", "picked up"),
    "langchain": Newcomer("LangChain", "send_mail"),
    "operator": Newcomer("Operators", "ready"),
    "contributor": Newcomer("Contributing", " passed"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """A block that was run."""

    command: str
    seconds: float
    printed: str


class Machine:
    """A clean machine, in a folder."""

    def __init__(self, folder: Path, proxy: str) -> None:
        self.folder = folder
        self.checkout = folder / "agent-mediator"
        self.environment = {
            "PATH": str(folder / "bin"),
            "PIP_CONFIG_FILE": "/dev/null",
            **trusted(),
        }
        if proxy:
            self.environment["https_proxy"] = proxy
        self._service: subprocess.Popen[bytes] | None = None
        self._copy_checkout()
        self._link_tools()

    @contextmanager
    def used_by(self, name: str) -> Iterator[None]:
        """Let somebody sit down at it: what was installed is there, what others did is not."""
        home = self.folder / name
        home.mkdir()
        self.environment["HOME"] = str(home)
        shutil.rmtree(self.checkout / "mediator-data", ignore_errors=True)
        try:
            yield
        finally:
            self._stop()

    def run(self, block: Block) -> Step:
        """Run a block as it is printed; one that is a file is saved."""
        command = block.text.strip()
        if block.file:
            (self.checkout / block.file).write_text(block.text)
            return Step(f"(save {block.file})", 0.0, "")
        if block.language == "console":
            command = command.partition("\n")[0].removeprefix("$ ")
        begin = time.monotonic()
        if SERVE.search(command):
            printed = self._serve(command)
        else:
            program = [".venv/bin/python"] if block.language == "python" else ["sh", "-e"]
            done = subprocess.run(
                [*program, "-c", command], cwd=self.checkout, env=self.environment, capture_output=True, text=True,
                timeout=INSTALL_WITHIN, check=False,
            )  # fmt: skip
            printed = done.stdout
            if done.returncode != 0:
                raise SystemExit(f"failed with {done.returncode}:\n{command}\n{done.stdout}{done.stderr}")
        return Step(command, time.monotonic() - begin, printed)

    def installed_mb(self) -> float:
        """Return the size of what was installed, in MB."""
        files = (Path(folder, name) for folder, _, names in os.walk(self.checkout / ".venv") for name in names)
        return sum(file.lstat().st_size for file in files) / 1e6

    def _serve(self, command: str) -> str:
        """Run what ends with serving, in a terminal of its own; the service of before ends."""
        self._stop()
        log = self.folder / "service.log"
        with log.open("wb") as output:
            self._service = subprocess.Popen(
                ["sh", "-e", "-c", command], cwd=self.checkout, env=self.environment, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

        def is_ready() -> bool:
            assert self._service is not None
            if self._service.poll() is not None:
                raise SystemExit(f"{command} ended:\n{log.read_text()}")
            return ready()

        until(is_ready, "the service is ready", INSTALL_WITHIN)
        return READY

    def _stop(self) -> None:
        """End the service as Ctrl-C does."""
        if self._service is not None:
            os.killpg(self._service.pid, signal.SIGINT)
            self._service.wait(60)
            self._service = None

    def _copy_checkout(self) -> None:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.checkout / name)

    def _link_tools(self) -> None:
        folder = self.folder / "bin"
        folder.mkdir()
        for name in TOOLS.split():
            if found := shutil.which(name):
                (folder / name).symlink_to(found)
        python = folder / "python3"
        # A link would have it look for its library beside the link.
        python.write_text(f'#!/bin/sh\nexec "{Path(sys.base_prefix) / "bin" / "python3"}" "$@"\n')
        python.chmod(0o755)


def blocks_for(heading: str) -> list[list[Block]]:
    """Return the blocks under a heading, and those before them that are for all whose headings stand in the section."""
    text = README.read_text(encoding="utf-8")
    own = re.search(rf"^##+ [^\n]*{heading}.*?(?=^##|\Z)", text, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    if own is None:
        raise SystemExit(f"README has no heading with {heading!r}")
    section = re.search(rf"^{SECTION}.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    inside = section is not None and own[0] in section[0]
    common = re.split(r"^###", section[0], maxsplit=1, flags=re.MULTILINE)[0] if section and inside else ""
    return [
        [block for block in parse(part) if block.language in RUN and not block.text.startswith(OTHER_TOOLS)]
        for part in (common, own[0])
    ]


def play(machine: Machine, name: str) -> list[Step]:
    """Have a newcomer run block after block until the first success; return the steps."""
    newcomer = NEWCOMERS[name]
    common, own = blocks_for(newcomer.heading)
    with machine.used_by(name):
        steps = [machine.run(block) for block in common]
        for block in own:
            steps.append(machine.run(block))
            if newcomer.success in steps[-1].printed:
                return steps
    printed = "\n".join(step.printed for step in steps)
    raise SystemExit(f"{name}: {newcomer.success!r} was not printed by README's commands:\n{printed}")


def play_all(names: Sequence[str], proxy: str) -> None:
    """Play newcomers on one machine, each after what the one before has left installed."""
    with tempfile.TemporaryDirectory(prefix="newcomers-") as folder:
        machine = Machine(Path(folder), proxy)
        begin_mb = 0.0
        for name in names:
            steps = play(machine, name)
            print(f"\n{name}: first success after {sum(step.seconds for step in steps):.0f} s, {len(steps)} steps")
            for step in steps:
                first, *more = step.command.splitlines()
                print(f"  {step.seconds:6.1f} s  {first}{f' (and {len(more)} lines)' if more else ''}", flush=True)
            if not begin_mb:
                begin_mb = machine.installed_mb()
                print(f"            that has installed {begin_mb:.0f} MB")
                if begin_mb > LARGEST_MB:
                    raise SystemExit(f"more than {LARGEST_MB} MB")


def main() -> None:
    """Play them in a network of their own where that may be had, and otherwise on this machine's ports."""
    parser = argparse.ArgumentParser(prog="python -m tests.slow.newcomers", description="Play README's newcomers.")
    parser.add_argument("names", nargs="*", choices=[*NEWCOMERS, []], metavar="NAME", help=", ".join(NEWCOMERS))
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is None and network.available():
        command = [sys.executable, "-m", "tests.slow.newcomers", *given.names, "--inside"]
        sys.exit(asyncio.run(network.run_inside(command)))
    proxy = "" if given.inside is None else network.enter(given.inside)
    play_all(given.names or [*NEWCOMERS], proxy)


if __name__ == "__main__":
    main()
