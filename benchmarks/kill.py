"""kill -9 under load: every answered message is there under its msg_id, and no msg_id is given twice."""

import threading
import time
from collections import Counter
from collections.abc import Iterator

from benchmarks import nats_clients
from benchmarks.bench import Bench, ResultRow, headline
from benchmarks.servers import ServiceProcess, running

PATIENCE = 60.0
"""Seconds that the senders may take to start."""


def _kill_under_load(service: ServiceProcess, seconds: float) -> None:
    """Kill the service some seconds after the first message was stored, or a minute later without one."""
    end = time.monotonic() + PATIENCE
    while not service.counter("mediator_messages_total") and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(seconds)
    service.kill()


def run(bench: Bench) -> Iterator[ResultRow]:
    data_dir = bench.folder / "ours"
    answered: dict[int, int] = {}
    first = 0
    for turn in range(bench.kills):
        bench.status(f"kill -9, {turn + 1} of {bench.kills}")
        service = ServiceProcess(data_dir)
        if not turn:
            nats_clients.run("make", service, addresses=["kill"])
        killer = threading.Thread(target=_kill_under_load, args=(service, bench.seconds))
        killer.start()
        try:
            seen = nats_clients.run("until_killed", service, address="kill", first=first)
        finally:
            killer.join()
        answered |= {int(sent): msg_id for sent, msg_id in seen["answered"].items()}
        first = seen["next"]
    service = ServiceProcess(data_dir)
    with running(service):
        found = nats_clients.run("read_all", service, address="kill")["found"]
    stored = dict(found)
    missing = sum(stored.get(sent) != msg_id for sent, msg_id in answered.items())
    twice = sum(times - 1 for times in Counter(msg_id for _, msg_id in found).values())
    twice += len(answered) - len(set(answered.values()))
    for name, found_ones in ((f"missing of {len(answered)} answered", missing), ("msg_ids given twice", twice)):
        met = bool(answered) and not found_ones
        yield headline(ResultRow(f"{bench.kills} × kill -9: {name}", str(found_ones), limit="0", met=met))
