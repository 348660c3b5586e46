"""Inserts agents with vectors directly through the store, because embedding that many takes half an hour.

Use it only while no service runs on the database. What is measured afterwards goes through the port.
"""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import catalog, prefill
from registry import rules
from registry.cards.card import Card, read_card
from registry.embedding.texts import card_texts
from registry.index.keywords import IndexDocument
from registry.index.vectors import pack_rows
from registry.records import CardVectors, Liveness, Registration
from registry.tables import RegistryTables

CHUNK = 2_000
SPREAD = 0.7
"""How far an agent's vectors lie from what they are about, where it is 1 away from nothing."""


def add_agents(
    data_dir: Path, count: int, space: str, topics: NDArray[np.float32]
) -> Iterator[tuple[Card, NDArray[np.float32]]]:
    """Register the catalog's first cards with vectors scattered around ``topics``; yield each card with its vectors.

    The vectors have shape (1 + skills, dims), unit length, and the encoder's ``space``, so the service uses them as is.
    """
    dice = np.random.default_rng(7)
    cards = catalog.cards(count)
    with prefill.store(data_dir) as kept:
        while chunk := list(islice(cards, CHUNK)):
            now = time.time_ns() // 1_000_000
            embedded, added = [], []
            with kept.transaction() as tx:
                for data in chunk:
                    card = read_card(data)
                    new = Registration(
                        prefill.TENANT, card.address, card.name, data, IndexDocument.of(card).pack(), card.ttl
                    )
                    agent, _ = rules.register(tx.table(RegistryTables), Liveness(), 0, new, now)
                    rows = scattered(dice, topics[dice.integers(len(topics), size=len(card_texts(card)))])
                    embedded.append(CardVectors(agent.id, agent.card_revision, pack_rows(rows)))
                    added.append((card, rows))
                tx.table(RegistryTables).vectors.save(space, embedded)
            kept.upkeep(busy=False)
            yield from added


def scattered(dice: np.random.Generator, around: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors of unit length, each near to one of (n, dims)."""
    dims = around.shape[1]
    rows = around + dice.standard_normal(around.shape, np.float32) * np.float32(SPREAD / dims**0.5)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)  # type: ignore[no-any-return]
