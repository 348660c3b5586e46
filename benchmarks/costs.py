"""What a message costs by verb: CPU of all processes, bytes written, commits; and what a million agents need of it."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import didcomm_clients, nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, number, spaced, spread
from benchmarks.servers import ServiceProcess, running
from mediator.operate.control import send_command
from mediator.system.usage import cpu_seconds

COMMITS = "mediator_store_commit_seconds_count"
MAIL = "$mq9.AI.MAILBOX.MSG"
FETCHED = 10_000
PUSHED = 10_000
FORWARD = "forward of 1 kB, its delivery and ack, 10 a delivery"
FORWARDED = 816
AGENTS, A_DAY, SOCKETS = 1_000_000, 10, 10_000
BUSY = 3
"""Times the mean rate of a day in its busy hour."""
SEALED_BYTES = 1500
"""By which a sealed message of 1 kB is larger than the 256 bytes that were stored."""
LOADED = 0.6
"""Of a core, at most, so that the busy hour's latencies stay those of a quiet machine."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one message cost, on average over a load."""

    cpu_us: float
    written: float
    """Bytes."""
    commits: float


def run(bench: Bench) -> Iterator[ResultRow]:
    data_dir = bench.folder / "ours"
    names = [f"pushed.{turn}" for turn in range(bench.long_rounds)]
    prefill.add_mailboxes(data_dir, ["sent", "fetched", *names])
    prefill.add_messages(data_dir, ["fetched"], FETCHED)
    service = ServiceProcess(data_dir)
    with running(service):
        made = asyncio.run(send_command(data_dir, "invite", tenant="default", label="", ttl_ms=None, uses=None))
        sides: dict[str, Callable[[int], Cost]] = {
            "SEND of 256 B, 1 in flight": lambda _: _send(bench, service, 1),
            "SEND of 256 B, 100 in flight": lambda _: _send(bench, service, 100),
            "FETCH 100 + ACK of the last": partial(_fetch, service, each=False),
            "FETCH 100 + ACK each": partial(_fetch, service, each=True),
            "SEND of 256 B and its live push to 1": partial(_push, service),
            f"DIDComm v1, {FORWARD}": partial(_forward, service, str(made["v1_url"])),
            f"DIDComm v2, {FORWARD}": partial(_forward, service, str(made["v2_url"])),
        }
        seen = bench.in_turn("costs", sides, bench.long_rounds)
        resident = service.resident_mb + service.children_mb + service.encoder_mb
        stored = sum(path.stat().st_size for path in data_dir.glob("mediator.db*") if path.suffix != ".reserve")
        kept = int(service.counter('mediator_messages_total{event="sent"')) + FETCHED
    for name, costs in seen.items():
        yield _row(name, costs)
    yield from _needs([cost for name, costs in seen.items() if "v2" in name for cost in costs], resident, stored / kept)


def _send(bench: Bench, service: ServiceProcess, in_flight: int) -> Cost:
    """SEND with a client that only counts."""
    subject = f"{nats_clients.API}MSG.SEND.sent"
    spec: dict[str, Any] = {"subject": subject, "good": '"error":""', "in_flight": in_flight, "seconds": bench.seconds}
    return _measured(service, lambda: nats_clients.run("counted", service, **spec))


def _fetch(service: ServiceProcess, turn: int, *, each: bool) -> Cost:
    spec: dict[str, Any] = {"address": "fetched", "group": f"g{turn}-{each}", "each": each, "leased": False}
    return _measured(service, lambda: nats_clients.run("fetch", service, count=FETCHED, **spec) | {"count": FETCHED})


def _push(service: ServiceProcess, turn: int) -> Cost:
    spec: dict[str, Any] = {"subject": f"{MAIL}.pushed.{turn}.normal", "subscribers": 1, "ahead": 1000}
    return _measured(service, lambda: nats_clients.run("live", service, count=PUSHED, **spec) | {"count": PUSHED})


def _forward(service: ServiceProcess, invitation: str, _turn: int) -> Cost:
    """Measure two loads; all that they have in common, as connecting the holders, is not counted."""
    few, many = (_forwarded(service, invitation, count) for count in (didcomm_clients.HOLDERS, FORWARDED))
    return Cost(*((now - then) / (FORWARDED - didcomm_clients.HOLDERS) for now, then in zip(many, few, strict=True)))


def _forwarded(service: ServiceProcess, invitation: str, count: int) -> tuple[float, float, float]:
    before = _used(service)
    didcomm_clients.run(
        invitation=invitation,
        pid=service.pid,
        count=count,
        handshake="didexchange/1.1",
        pickup=True,
        settles=False,
    )
    cpu, written, commits = (now - then for now, then in zip(_used(service), before, strict=True))
    return cpu, written, commits


def _measured(service: ServiceProcess, load: Callable[[], nats_clients.Result]) -> Cost:
    before = _used(service)
    count = load()["count"]
    return Cost(*((now - then) / count for now, then in zip(_used(service), before, strict=True)))


def _used(service: ServiceProcess) -> tuple[float, float, float]:
    """Return CPU in microseconds, bytes written and commits so far."""
    lines = Path(f"/proc/{service.pid}/io").read_text().splitlines()
    written = next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
    return cpu_seconds(service.pid) * 1e6, written, service.counter(COMMITS)


def _row(name: str, costs: list[Cost]) -> ResultRow:
    cpu = number(median(cost.cpu_us for cost in costs), "µs CPU")
    written = number(median(cost.written for cost in costs) / 1000, "kB written")
    commits = median(cost.commits for cost in costs)
    return ResultRow(name, f"{cpu}, {written}, {commits:.3f} commits", spread=spread([cost.cpu_us for cost in costs]))


def _needs(costs: list[Cost], resident: float, stored: float) -> Iterator[ResultRow]:
    """Say what many wallets need, all on DIDComm v2, the dearest door."""
    a_second = AGENTS * A_DAY / 86_400
    cpu, written = (median(getattr(cost, name) for cost in costs) for name in ("cpu_us", "written"))
    cores = a_second * BUSY * cpu / 1e6
    what = f"{spaced(AGENTS)} agents, {A_DAY} messages a day each"
    yield ResultRow(f"{what}: messages a second, mean / busy hour", f"{a_second:.0f} / {a_second * BUSY:.0f}")
    yield ResultRow(f"{what}: cores in the busy hour / instances at {LOADED:.0%} of one", _cores(cores))
    yield ResultRow(f"{what}: written a day", number(AGENTS * A_DAY * written / 1e9, "GB"))
    kept = number(AGENTS * A_DAY * (stored + SEALED_BYTES) / 1e9, "GB")
    yield ResultRow(f"{what}: kept, if all of a day waits", kept)
    yield ResultRow("one instance after all of this: resident, all processes", number(resident, "MB"))


def _cores(cores: float) -> str:
    return f"{cores:.2f} / {max(1, -(-cores // LOADED)):.0f}"
