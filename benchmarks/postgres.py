"""Mail on PostgreSQL with one to three instances, beside JetStream and beside a plain table on the same server."""

import base64
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import nats_clients, postgres_table, prefill
from benchmarks.bench import Bench, ResultRow, beside
from benchmarks.nats_clients import Result
from benchmarks.servers import JetStreamServer, ServiceProcess, running
from tests.harness.postgres import PrivateServer, programs_found

IN_FLIGHT = (1, 100, 10)
"""With --quick the first two."""
INSTANCES = (1, 2, 3)
SENT = [f"send{number}" for number in range(1000)]
"""Many mailboxes: an instance locks those of its batch until the commit, and others wait for these."""
READ = [f"fetch{number}" for number in range(3)]

Load = Callable[[int], Result]


@dataclass(frozen=True, slots=True)
class Installation:
    """Instances on a database of their own, behind a nats-server."""

    nats: JetStreamServer
    services: Sequence[ServiceProcess]
    database: PrivateServer

    def load(self, name: str, **spec: Any) -> Result:
        """Run a load; the CPU is that of all these processes."""
        pids = [self.nats.pid, self.database.pid, *(service.pid for service in self.services)]
        return nats_clients.run(name, self.nats, pid=pids, **spec)


def run(bench: Bench) -> Iterator[ResultRow]:
    programs = programs_found()
    if programs is None:
        yield ResultRow("Instances on PostgreSQL", "-", "PostgreSQL is not installed")
        return
    count = 3_000 if bench.quick else 30_000
    with ExitStack() as stack:
        # On the disk that is measured, as JetStream's files are.
        server = PrivateServer(programs, in_memory=False)
        stack.callback(server.stop)
        table = postgres_table.Table(stack.enter_context(server.database()), server.pid)
        ours = {number: _install(bench, stack, server, number, count) for number in INSTANCES}
        peer = JetStreamServer(bench.folder / "peer", sync_always=True)
        stack.enter_context(running(peer))
        bench.status("fill the streams")
        for name in READ:
            nats_clients.run("publish", peer, stream=name, count=count, subject_each=False)
        for in_flight in IN_FLIGHT[:2] if bench.quick else IN_FLIGHT:
            yield from _send(bench, ours, peer, table, in_flight)
        yield from _fetch(bench, ours, peer, table, count)


def _install(bench: Bench, stack: ExitStack, server: PrivateServer, number: int, count: int) -> Installation:
    """Start instances on a database with mail; all of them run from the beginning, and those not measured are idle."""
    bench.status(f"start {number} instances")
    url = stack.enter_context(server.database())
    prefill.add_mailboxes(url, [*SENT, *READ])
    prefill.add_messages(url, READ, count * len(READ))
    folder = bench.folder / f"of{number}"
    nats = JetStreamServer(folder / "nats")
    stack.enter_context(running(nats))
    services: list[ServiceProcess] = []
    env = {"MEDIATOR_DATABASE_URL": url, "MEDIATOR_DIDCOMM__KEY": base64.b64encode(os.urandom(32)).decode()}
    for name in "abc"[:number]:
        services.append(ServiceProcess(folder / name, nats_url=nats.url, semantic=False, env=env))
        stack.enter_context(running(services[-1]))
    return Installation(nats, services, server)


def _send(
    bench: Bench, ours: Mapping[int, Installation], peer: JetStreamServer, table: postgres_table.Table, in_flight: int
) -> Iterator[ResultRow]:
    same: dict[str, Any] = {"in_flight": in_flight, "seconds": bench.seconds}

    def send(number: int, _turn: int) -> Result:
        return ours[number].load("send", addresses=SENT, **same)

    yield from _rows(
        bench,
        f"SEND, {in_flight} in flight",
        send,
        {
            "JetStream R1, sync always": lambda _: nats_clients.run("publish", peer, stream="send", **same),
            "INSERT … RETURNING": lambda _: table.run("insert", **same),
        },
    )


def _fetch(
    bench: Bench, ours: Mapping[int, Installation], peer: JetStreamServer, table: postgres_table.Table, count: int
) -> Iterator[ResultRow]:
    def fetch(number: int, turn: int) -> Result:
        spec: dict[str, Any] = {"addresses": READ, "group": f"g{turn}", "count": count, "each": False, "leased": False}
        return ours[number].load("fetch_all", **spec)

    def pull(turn: int) -> Result:
        spec: dict[str, Any] = {"streams": READ, "group": f"g{turn}", "count": count, "each": False, "answered": False}
        return nats_clients.run("pull_all", peer, **spec)

    yield from _rows(
        bench,
        f"FETCH 100 + ACK, {len(READ)} readers",
        fetch,
        {
            "JetStream R1, ack all": pull,
            "DELETE … SKIP LOCKED": lambda _: table.run("delete", in_flight=len(READ), count=count * len(READ)),
        },
    )


def _rows(
    bench: Bench, what: str, ours: Callable[[int, int], Result], peers: Mapping[str, Load]
) -> Iterator[ResultRow]:
    """Compare each number of instances with each peer in rate, and with the table, which is the last, also in CPU."""
    names = {number: f"{number} instance{'s' if number > 1 else ''}" for number in INSTANCES}
    sides: dict[str, Load] = {name: partial(ours, number) for number, name in names.items()}
    seen = bench.in_turn(what, sides | dict(peers), bench.long_rounds)
    table = list(peers)[-1]
    for name in names.values():
        for peer in peers:
            yield beside(f"{what}, {name} / {peer}", "/s", _of(seen[name], "rate"), _of(seen[peer], "rate"))
        cpu = f"{what}, {name}, CPU of all processes a message / {table}"
        yield beside(cpu, "µs", _of(seen[name], "cpu_us"), _of(seen[table], "cpu_us"))


def _of(results: Sequence[Result], name: str) -> list[float]:
    return [result[name] for result in results]
