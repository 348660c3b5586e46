"""Mediators as their users run them, for the conformance suite.

``python -m tests.slow.peers.mediators ours|acapy|credo`` tries one at all levels and writes what came of it into
docs/conformance/, from which ``python docs/generate.py`` makes docs/conformance-results.md.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import aries_askar

from conformance import report
from conformance.didcomm import SUITE, DidcommSession, Target
from conformance.running import Result, run_checks
from mediator import __version__
from tests.harness.didcomm_service import Door, missing
from tests.harness.service import Services, free_port
from tests.slow.peers.acapy import Agent

CREDO = Path(__file__).parent / "credo" / "0.5"
RESULTS = Path(__file__).parents[3] / "docs" / "conformance"
SECONDS = 15.0
"""For each answer: Credo answers bad envelopes after ten."""

LOCAL = re.compile(r"(http|ws)://127\.0\.0\.1:\d+/?")

STARTED_WITHIN = 120.0

Mediator = Callable[[Services, AsyncExitStack], Awaitable[tuple[str, list[str]]]]
"""Starts a mediator, and returns its name with its version, and its invitations."""


async def acapy(services: Services, stack: AsyncExitStack) -> tuple[str, list[str]]:
    """ACA-Py without plugins, which grants mediation to everybody and keeps what it could not deliver."""
    # Of an endpoint that is named twice the last one counts, and transports add up: it has a WebSocket besides.
    http, socket = str(free_port()), str(free_port())
    transports = ("--inbound-transport", "http", "127.0.0.1", http, "--inbound-transport", "ws", "127.0.0.1", socket)
    endpoints = ("--endpoint", f"http://127.0.0.1:{http}", f"ws://127.0.0.1:{socket}", "--outbound-transport", "ws")
    kept = ("--open-mediation", "--enable-undelivered-queue")
    agent = await Agent.running("mediator", services, stack, *transports, *endpoints, *kept)
    made = await agent.call(
        "POST",
        "/out-of-band/create-invitation",
        {
            "handshake_protocols": [
                f"https://didcomm.org/{name}" for name in ("connections/1.0", "didexchange/1.0", "didexchange/1.1")
            ]
        },
        auto_accept="true",
        multi_use="true",
    )
    version = (await agent.call("GET", "/status"))["version"]
    return f"ACA-Py {version}", [made["invitation_url"]]


async def credo(services: Services, stack: AsyncExitStack) -> tuple[str, list[str]]:
    """Credo's mediator, with the queue in memory that it comes with."""
    if not (CREDO / "node_modules" / ".installed").exists():
        missing("Credo is not there: `make peers` installs it")
    node = shutil.which("node")
    assert node is not None
    environment = {**os.environ, "LIB_ASKAR_PATH": str(Path(aries_askar.__file__).parent)}
    command = [node, "mediator.mjs", str(services.folder), str(free_port()), str(free_port())]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=CREDO, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    stack.callback(lambda: process.kill() if process.returncode is None else None)
    assert process.stdout is not None
    invitation = (await asyncio.wait_for(process.stdout.readline(), STARTED_WITHIN)).decode().strip()
    version = json.loads((CREDO / "node_modules" / "@credo-ts" / "core" / "package.json").read_text())["version"]
    return f"Credo {version}", [invitation]


async def ours(services: Services, stack: AsyncExitStack) -> tuple[str, list[str]]:
    """This service, as it is by default."""
    invites = await (await Door.opened(services, stack)).invite()
    return f"this service {__version__}", [invites.v1, invites.v2]


MEDIATORS: dict[str, Mediator] = {"ours": ours, "acapy": acapy, "credo": credo}


async def tried(
    start: Mediator, folder: Path, *only: str, notify: Callable[[Result], None]
) -> tuple[str, list[Result]]:
    """Run the checks whose ids begin so, or all, against a mediator; return its name and what came of them.

    Each family of checks has a new one in ``folder``: after some dozens of clients, more after malformed envelopes,
    ACA-Py waits for a session of its wallet, and answers HTTP 504, whoever comes next.
    """
    checks = [check for check in SUITE if not only or check.id.startswith(only)]
    name, results = "", list[Result]()
    for family, of_family in groupby(checks, lambda check: check.id.split(".")[1]):
        services = Services(folder / family)
        services.folder.mkdir()
        try:
            async with AsyncExitStack() as stack:
                name, invitations = await start(services, stack)
                target = await Target.find(invitations, SECONDS)
                results += await run_checks(
                    of_family, lambda transcript, to=target: DidcommSession.open(to, transcript, SECONDS), notify
                )
        finally:
            services.close()
    return name, results


async def _main(which: str, *only: str) -> None:
    def show(result: Result) -> None:
        print(f"{result.outcome:<12}{result.check.id}  {result.detail}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        name, results = await tried(MEDIATORS[which], Path(folder), *only, notify=show)
    document: dict[str, Any] = report.as_json(results, name, datetime.now(UTC).date().isoformat())
    kept = ("id", "outcome", "detail")
    document["checks"] = [{field: check[field] for field in kept} for check in document["checks"]]
    for check in document["checks"]:
        check["detail"] = LOCAL.sub("the mediator", check["detail"])
    file = RESULTS / f"{which}.json"
    if only:
        # The others stay as they were.
        before = json.loads(file.read_text("utf-8"))["checks"]
        document["checks"] = [each for each in before if not each["id"].startswith(only)] + document["checks"]
    del document["counts"]
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(report.summary(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mediator", choices=MEDIATORS)
    parser.add_argument("only", nargs="*", help="only checks whose ids begin so; what is known of the others stays")
    given = parser.parse_args()
    asyncio.run(_main(given.mediator, *given.only))
