"""Inserts remembered requests with a vote on each directly through the store, because nobody could ask that many.

Use it only while no service runs on the database. What is measured afterwards goes through the port.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import prefill
from benchmarks.prefill_agents import CHUNK, scattered
from registry.index.vectors import pack_rows
from registry.records import USEFUL, RecentSearch, Vote
from registry.tables import RegistryTables


def add_requests(
    data_dir: Path, count: int, space: str, topics: NDArray[np.float32], serving: Mapping[int, Sequence[int]]
) -> Iterator[int]:
    """Remember requests scattered around ``topics``, each with the vote of somebody else; yield how many there are.

    The vote is for one of the agents that are ``serving`` the topic, by their numbers.
    """
    dice = np.random.default_rng(11)
    with prefill.store(data_dir) as kept:
        for start in range(0, count, CHUNK):
            now = time.time_ns() // 1_000_000
            with kept.transaction() as tx:
                memory = tx.table(RegistryTables).memory
                chosen = dice.choice(list(serving), size=min(CHUNK, count - start))
                rows = scattered(dice, topics[chosen])
                for at, (topic, row) in enumerate(zip(chosen.tolist(), rows, strict=True), start):
                    agent_id = int(dice.choice(serving[topic]))
                    asked = RecentSearch("", prefill.TENANT, f"request {at}", space, pack_rows(row[None]), b"")
                    memory.vote(Vote(memory.save_request(asked, now), agent_id, at + 1, USEFUL, now), 1)
            kept.upkeep(busy=False)
            yield start + len(rows)
