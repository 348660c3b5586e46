"""Puts agents with vectors into a database directly through the store: to have so many embedded takes half an hour.

Only while no service runs on it; what is measured afterwards goes through the port.
"""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import catalog, filling
from mediator.agents import registering
from mediator.agents.records import Embedded, Liveness, Registration
from registry.cards import Card, read_card
from registry.digest import Digest
from registry.packing import pack_rows
from registry.texts import texts

CHUNK = 2_000
SPREAD = 0.7
"""How far an agent's vectors lie from what they are about, where it is 1 away from nothing."""


def add_agents(
    data_dir: Path, count: int, space: str, topics: NDArray[np.float32]
) -> Iterator[tuple[Card, NDArray[np.float32]]]:
    """Register the catalog's first cards, with vectors that scatter around ``topics``; yield each with its vectors.

    The service takes them for the encoder's own, since they are in its ``space``: (1 + skills, dims), of length one.
    """
    dice = np.random.default_rng(7)
    cards = catalog.cards(count)
    with filling.store(data_dir) as kept:
        while chunk := list(islice(cards, CHUNK)):
            now = time.time_ns() // 1_000_000
            embedded, added = [], []
            with kept.transaction() as tx:
                for data in chunk:
                    card = read_card(data)
                    new = Registration(filling.TENANT, card.address, card.name, data, Digest.of(card).pack(), card.ttl)
                    agent, _ = registering.register(tx, Liveness(), 0, new, now)
                    rows = _scattered(dice, topics, len(texts(card)))
                    embedded.append(Embedded(agent.no, agent.card_revision, pack_rows(rows)))
                    added.append((card, rows))
                tx.vectors.put(space, embedded)
            kept.upkeep(busy=False)
            yield from added


def _scattered(dice: np.random.Generator, topics: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    dims = topics.shape[1]
    near = topics[dice.integers(len(topics), size=count)]
    rows = near + dice.standard_normal((count, dims), np.float32) * np.float32(SPREAD / dims**0.5)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)  # type: ignore[no-any-return]
