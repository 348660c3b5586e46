"""Runs the blocks of a README in their order, as a reader would: ``python readme.py README FOLDER`` prints JSON.

It is a process of its own so that it can be put into a network namespace, where the ports that are printed are free.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVE = "make serve"
HTTP = "http://127.0.0.1:8080"
WITHIN = 60.0
BLOCK = re.compile(r"^```(sh|python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = {"make pipeline-demo": "takes minutes and a Java; test_pipeline.py runs what it starts"}
"""The first words of blocks that are left out, and why."""
NATS = """\
#!{python}
'''As much of the nats tool as the README uses: nats request SUBJECT [BODY] [-H NAME:VALUE]; prints the reply.'''
import argparse, asyncio, nats

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["request"])
parser.add_argument("subject")
parser.add_argument("body", nargs="?", default="")
parser.add_argument("-H", dest="headers", action="append", default=[])
given = parser.parse_args()

async def main():
    client = await nats.connect("nats://127.0.0.1:4222")
    headers = dict(header.split(":", 1) for header in given.headers)
    print((await client.request(given.subject, given.body.encode(), timeout=10, headers=headers or None)).data.decode())
    await client.close()

asyncio.run(main())
"""


def blocks(readme: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each block."""
    return [(block[1], block[2]) for block in BLOCK.finditer(readme.read_text(encoding="utf-8"))]


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
    """Whether the service says so."""
    try:
        with urllib.request.urlopen(f"{HTTP}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def reads_sentences() -> bool:
    """Whether all agents are found by meaning: the model is loaded, and has read their cards."""
    with urllib.request.urlopen(f"{HTTP}/metrics", timeout=5) as answer:
        metrics = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    unread = [value for name, value in metrics.items() if name.startswith("mediator_registry_unembedded_agents")]
    return metrics.get("mediator_registry_encoder_up") == "1.0" and {*map(float, unread)} == {0.0}


def prepare(folder: Path) -> dict[str, str]:
    """Lay out a folder as the repository is after ``make``; return the environment of a new terminal."""
    (folder / ".venv").symlink_to(sys.prefix)
    tools = folder / "tools"
    tools.mkdir()
    (tools / "nats").write_text(NATS.format(python=sys.executable))
    (tools / "nats").chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MEDIATOR_", "COLUMNS"))}
    return inherited | {"PATH": f"{tools}:{os.environ['PATH']}"}


def serve_command() -> str:
    """Return what ``make serve`` runs once everything is installed."""
    make = [str(shutil.which("make")), "--dry-run", "--no-print-directory", "serve"]
    # Under `make test` the outer one would tell it its own options.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].strip()


def run_all(readme: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Run block after block, and yield what each printed."""
    environment = prepare(folder)
    service: subprocess.Popen[bytes] | None = None
    try:
        for language, text in blocks(readme):
            if text.startswith(tuple(NOT_RUN)):
                continue
            if text.startswith(SERVE):
                with (folder / "log").open("wb") as log:
                    command = ["sh", "-c", f"exec {serve_command()}"]
                    service = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
                until(ready, "the service is ready")
                yield {"language": language, "text": text, "code": 0, "out": "", "err": ""}
                continue
            if language == "console":
                until(reads_sentences, "the model has read the cards")
            shell = text.partition("\n")[0].removeprefix("$ ") if language == "console" else text
            command = [sys.executable, "-c", text] if language == "python" else ["sh", "-e", "-c", shell]
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WITHIN, check=False
            )
            yield {"language": language, "text": text, "code": done.returncode, "out": done.stdout, "err": done.stderr}
    finally:
        if service is not None:
            service.terminate()
            service.wait(WITHIN)


if __name__ == "__main__":
    raise_loopback()
    print(json.dumps(list(run_all(Path(sys.argv[1]), Path(sys.argv[2])))))
