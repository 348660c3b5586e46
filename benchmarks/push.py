"""Push through the public port compared with a nats-server that has the same clients and stores nothing.

Both sides have the same subscribers and the same publisher, which does not wait for answers; in a replay the service
itself is the publisher. Our messages were committed to disk before; the peer's are not stored.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from benchmarks import nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, at_least, beside, headline, spaced
from benchmarks.servers import JetStreamServer, ServerProcess, ServiceProcess, running

STORED = 100_000
REPLAY_FACTOR = 0.5
LIVE_FACTORS = {1: 0.15, 10: 0.3, 1000: 0.6}
"""Subscribers, and the part of core NATS's rate that is aimed at."""
LIVE_MESSAGES = {1: 50_000, 10: 20_000, 1000: 200}
"""To so many subscribers, with --quick; else four times as many."""
UNDER_WAY = 100_000
"""At most this many messages in flight to all subscribers together, and a hundredth of it to each."""
MAIL = "$mq9.AI.MAILBOX.MSG"
OURS, PEER = "service", "core NATS"


def run(bench: Bench) -> Iterator[ResultRow]:
    folder = bench.folder / "ours"
    names = [f"live.{each}.{turn}" for each in LIVE_FACTORS for turn in range(bench.rounds)]
    prefill.add_mailboxes(folder, ["stored", *names])
    prefill.add_messages(folder, ["stored"], STORED)
    service, peer = ServiceProcess(folder), JetStreamServer(bench.folder / "peer")
    with running(service, peer):
        yield from _replay(bench, service, peer)
        for each, factor in LIVE_FACTORS.items():
            yield from _live(bench, service, peer, each, factor)


def _replay(bench: Bench, service: ServerProcess, peer: ServerProcess) -> Iterator[ResultRow]:
    what = f"replay of {spaced(STORED)} messages to 1 subscriber"
    replayed = partial(nats_clients.run, "replayed", service, subject=f"{MAIL}.stored.*", count=STORED)
    seen = bench.in_turn(what, {OURS: lambda _: replayed(), PEER: lambda _: _published(peer, "peer", STORED, 1)})
    yield from _rows(what, "core publish of the same", seen, REPLAY_FACTOR)


def _live(bench: Bench, service: ServerProcess, peer: ServerProcess, each: int, factor: float) -> Iterator[ResultRow]:
    count = LIVE_MESSAGES[each] * (1 if bench.quick else 4)
    what = f"live push to {spaced(each)} subscriber{'s'[: each > 1]}"
    seen = bench.in_turn(
        what,
        {
            OURS: lambda turn: _published(service, f"live.{each}.{turn}", count, each),
            PEER: lambda _: _published(peer, "peer", count, each),
        },
    )
    yield from _rows(what, PEER, seen, factor)


def _published(server: ServerProcess, name: str, count: int, each: int) -> nats_clients.Result:
    ahead = min(UNDER_WAY // 100, UNDER_WAY // each)
    subject = f"{MAIL}.{name}.normal"
    return nats_clients.run("live", server, subject=subject, count=count, subscribers=each, ahead=ahead)


def _rows(what: str, peer: str, seen: Mapping[str, list[nats_clients.Result]], factor: float) -> Iterator[ResultRow]:
    rates = {side: [result["rate"] for result in results] for side, results in seen.items()}
    cpu = {side: [result["cpu_us"] for result in results] for side, results in seen.items()}
    yield headline(at_least(f"{what} / {peer}", "/s", rates[OURS], rates[PEER], factor))
    yield beside(f"{what} / {peer}, CPU of all processes a push", "µs", cpu[OURS], cpu[PEER])
