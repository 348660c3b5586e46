"""The tests of rules once more, on PostgreSQL: `make test` runs them on SQLite."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mediator.store.base import Store
from tests.harness.postgres import Server
from tests.unit.conftest import broker, house

__all__ = ["broker", "house"]

MANY = (
    "test_a_mailbox_remembers_100_000_dedup_ids",
    "test_dead_messages_take_no_room_among_the_leased",
    "test_a_group_has_at_most_10_000_leased",
    "test_bounds_are_off_by_default",
    "test_a_lane_empty_for_thousands_of_ids_misses_nothing",
)
"""Thousands of requests, which take minutes with a server between."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs PostgreSQL, and leave out what needs no store, and what would take long."""
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in ours:
        item.add_marker(pytest.mark.postgres)
    left_out = {item for item in ours if item.name.startswith(MANY) or "store" not in getattr(item, "fixturenames", ())}
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def histories() -> int:
    return 20


@pytest.fixture
def store(postgres: Server) -> Iterator[Store]:
    # Its driver is an extra: asked for after the fixture, which skips without it.
    from mediator.store.postgres import PostgresStore

    with postgres.emptied() as url, contextlib.closing(PostgresStore(url)) as store:
        yield store
