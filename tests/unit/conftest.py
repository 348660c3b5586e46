"""What tests of rules and protocols share: a broker over a store on a RAM disk, plain, with mediation, with a door."""

from collections.abc import AsyncIterator

import pytest

from mediator.store.base import Store
from tests.harness.broker import Broker
from tests.harness.mediation import Mediation
from tests.harness.protocols import Door, open_door
from tests.harness.stores import ram_store


@pytest.fixture
def store() -> Store:
    """An empty store; tests/slow/rules puts PostgreSQL in its place."""
    return ram_store()


@pytest.fixture
def histories() -> int:
    """How many random histories a test plays; tests/slow/rules, with a server between, says fewer."""
    return 150


@pytest.fixture
def broker(store: Store) -> Broker:
    return Broker(store)


@pytest.fixture
def house(store: Store) -> Mediation:
    """A broker with mediation."""
    return Mediation(store)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    """A DIDComm door without cryptography."""
    async with open_door() as door:
        yield door
