"""How far SEND is from its floor: a bare program that stores the same row, commits, answers, and does nothing else."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, beside
from benchmarks.servers import BareServer, ServerProcess, ServiceProcess, running

IN_FLIGHT = (1, 10, 100)
ADDRESS = "send"
OURS, FLOOR = "service", "floor"
CLIENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "a client that only counts": (
        "counted",
        {"subject": f"{nats_clients.API}MSG.SEND.{ADDRESS}", "good": '"error":""'},
    ),
    "nats-py": ("send", {"addresses": [ADDRESS]}),
}
"""The load of each client, and what it is given."""


def run(bench: Bench) -> Iterator[ResultRow]:
    folders = {name: bench.folder / name for name in (OURS, FLOOR)}
    for folder in folders.values():
        prefill.add_mailboxes(folder, [ADDRESS])
    service, floor = ServiceProcess(folders[OURS]), BareServer(folders[FLOOR])
    with running(service, floor):
        for in_flight in IN_FLIGHT:
            for client in CLIENTS:
                yield from _compare(bench, service, floor, client, in_flight)


def _compare(
    bench: Bench, service: ServerProcess, floor: ServerProcess, client: str, in_flight: int
) -> Iterator[ResultRow]:
    name, spec = CLIENTS[client]

    def load(server: ServerProcess) -> nats_clients.Result:
        return nats_clients.run(name, server, in_flight=in_flight, seconds=bench.seconds, **spec)

    what = f"SEND, {in_flight} in flight, {client}"
    seen = bench.in_turn(what, {OURS: lambda _: load(service), FLOOR: lambda _: load(floor)})
    for figure, unit, shown in (("rate", "/s", ""), ("cpu_us", "µs", ", CPU of all processes a message")):
        ours, bare = ([result[figure] for result in seen[side]] for side in (OURS, FLOOR))
        yield beside(f"{what} / {FLOOR}{shown}", unit, ours, bare)
