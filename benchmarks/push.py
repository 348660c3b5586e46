"""Push through the public port compared with a nats-server that has the same clients and stores nothing.

Both sides have the same subscribers and the same publisher, which does not wait for answers; in a replay the service
itself is the publisher. Our messages were committed to disk before; core NATS's are not stored. With one subscriber
the peers are JetStream's push consumers too, which deliver what their stream of files has taken.
"""

from collections.abc import Iterator, Mapping, Sequence
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
SYNCED, UNSYNCED = "JetStream push consumer, sync always", "JetStream push consumer, no fsync"
SYNCED_FACTOR = 1.0
STREAM_MESSAGES = 10_000
"""Compared with push consumers, with --quick; else four times as many."""


def run(bench: Bench) -> Iterator[ResultRow]:
    folder = bench.folder / "ours"
    live = [f"live.{each}.{turn}" for each in LIVE_FACTORS for turn in range(bench.rounds)]
    prefill.add_mailboxes(folder, ["stored", *live, *(f"stream.{turn}" for turn in range(bench.rounds))])
    prefill.add_messages(folder, ["stored"], STORED)
    service, peer = ServiceProcess(folder), JetStreamServer(bench.folder / "peer")
    synced = JetStreamServer(bench.folder / "synced", sync_always=True)
    with running(service, peer, synced):
        yield from _replay(bench, service, peer)
        for each, factor in LIVE_FACTORS.items():
            yield from _live(bench, service, peer, each, factor)
        yield from _live_from_stream(bench, service, {SYNCED: synced, UNSYNCED: peer})


def _replay(bench: Bench, service: ServerProcess, peer: ServerProcess) -> Iterator[ResultRow]:
    what = f"replay of {spaced(STORED)} messages to 1 subscriber"
    replayed = partial(nats_clients.run, "replayed", service, subject=f"{MAIL}.stored.*", count=STORED)
    seen = bench.in_turn(what, {OURS: lambda _: replayed(), PEER: lambda _: _published(peer, "peer", STORED, 1)})
    yield from _rows(f"{what} / core publish of the same", seen[OURS], seen[PEER], REPLAY_FACTOR)


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
    yield from _rows(f"{what} / {PEER}", seen[OURS], seen[PEER], factor)


def _live_from_stream(bench: Bench, service: ServerProcess, peers: Mapping[str, ServerProcess]) -> Iterator[ResultRow]:
    """Compare with what passes on to one subscriber only what it has stored, with an fsync and without."""
    count, what = STREAM_MESSAGES * (1 if bench.quick else 4), "live push to 1 subscriber"

    def ours(turn: int) -> nats_clients.Result:
        return _published(service, f"stream.{turn}", count, 1)

    def theirs(server: ServerProcess, _: int) -> nats_clients.Result:
        return _published(server, "peer", count, 1, load="live_from_stream")

    seen = bench.in_turn(what, {OURS: ours} | {name: partial(theirs, server) for name, server in peers.items()})
    for name in peers:
        yield from _rows(f"{what} / {name}", seen[OURS], seen[name], SYNCED_FACTOR if name == SYNCED else None)


def _published(server: ServerProcess, name: str, count: int, each: int, load: str = "live") -> nats_clients.Result:
    ahead = min(UNDER_WAY // 100, UNDER_WAY // each)
    subject = f"{MAIL}.{name}.normal"
    return nats_clients.run(load, server, subject=subject, count=count, subscribers=each, ahead=ahead)


def _rows(
    claim: str, ours: Sequence[nats_clients.Result], peer: Sequence[nats_clients.Result], factor: float | None
) -> Iterator[ResultRow]:
    rates = [result["rate"] for result in ours], [result["rate"] for result in peer]
    yield headline(at_least(claim, "/s", *rates, factor) if factor else beside(claim, "/s", *rates))
    cpu = [result["cpu_us"] for result in ours], [result["cpu_us"] for result in peer]
    yield beside(f"{claim}, CPU of all processes a push", "µs", *cpu)
