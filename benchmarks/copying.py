"""A SEND that a rule copies to another mailbox, compared with one that no rule matches, on the same service."""

import asyncio
from collections.abc import Iterator
from typing import Any

from benchmarks import nats_clients
from benchmarks.bench import Bench, ResultRow, at_most, beside
from benchmarks.servers import ServiceProcess, running
from mediator.operate.control import send_command

COPIED, PLAIN, WITHOUT = "copied", "plain", "without rules"
"""A mailbox that a rule copies, one that it does not, and one of a service that has no rule."""
TARGET = "target"
FACTOR = 1.6


def run(bench: Bench) -> Iterator[ResultRow]:
    service, bare = (ServiceProcess(bench.folder / name, semantic=False) for name in ("ours", "bare"))
    with running(service, bare):
        nats_clients.run("make", service, addresses=[COPIED, PLAIN, TARGET])
        nats_clients.run("make", bare, addresses=[PLAIN])
        rule: dict[str, Any] = {"name": "all", "address": COPIED, "to_address": TARGET}
        asyncio.run(send_command(bench.folder / "ours", "copy-rule-add", **rule))
        for in_flight in (1, 100):

            def send(server: ServiceProcess, address: str, in_flight: int = in_flight) -> nats_clients.Result:
                subject = f"{nats_clients.API}MSG.SEND.{address}"
                spec: dict[str, Any] = {"subject": subject, "good": '"error":""', "in_flight": in_flight}
                return nats_clients.run("counted", server, seconds=bench.seconds, **spec)

            sides = {COPIED: lambda _: send(service, COPIED), PLAIN: lambda _: send(service, PLAIN)}
            sides[WITHOUT] = lambda _: send(bare, PLAIN)
            seen = bench.in_turn(f"copies, {in_flight} in flight", sides, bench.long_rounds)
            what = f"SEND, {in_flight} in flight"
            cpu = {side: [result["cpu_us"] for result in results] for side, results in seen.items()}
            times = {side: [1e6 / result["rate"] for result in results] for side, results in seen.items()}
            copied = f"{what}, copied by a rule / not copied"
            yield at_most(f"{copied}: time of one", "µs", times[COPIED], times[PLAIN], FACTOR)
            yield at_most(f"{copied}: CPU of all processes", "µs", cpu[COPIED], cpu[PLAIN], FACTOR)
            unmatched = f"{what}, beside a rule that does not match / without rules: CPU of all processes"
            yield beside(unmatched, "µs", cpu[PLAIN], cpu[WITHOUT])
