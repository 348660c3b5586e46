"""kill -9 under load: what was answered is there, with the msg_id that was answered, and no msg_id is given twice."""

import threading
from collections import Counter
from collections.abc import Iterator

from benchmarks import loads
from benchmarks.bench import Bench, Row
from benchmarks.servers import Service, running

KILLS = 3


def run(bench: Bench) -> Iterator[Row]:
    data_dir = bench.folder / "ours"
    answered: dict[int, int] = {}
    first = 0
    for turn in range(KILLS):
        bench.say(f"kill -9, {turn + 1} of {KILLS}")
        service = Service(data_dir)
        if not turn:
            loads.run("make", service, addresses=["kill"])
        timer = threading.Timer(bench.seconds + 0.7, service.kill)
        timer.start()
        try:
            seen = loads.run("until_killed", service, address="kill", first=first)
        finally:
            timer.join()
        answered |= {int(sent): msg_id for sent, msg_id in seen["answered"].items()}
        first = seen["next"]
    service = Service(data_dir)
    with running(service):
        found = loads.run("read_all", service, address="kill")["found"]
    stored = dict(found)
    missing = sum(stored.get(sent) != msg_id for sent, msg_id in answered.items())
    twice = sum(times - 1 for times in Counter(msg_id for _, msg_id in found).values())
    twice += len(answered) - len(set(answered.values()))
    yield Row(
        f"{KILLS} × kill -9: missing of {len(answered)} answered",
        str(missing),
        limit="0",
        met=bool(answered) and not missing,
    )
    yield Row(f"{KILLS} × kill -9: msg_ids given twice", str(twice), limit="0", met=bool(answered) and not twice)
