"""What the tests of the domain share: a broker over the in-memory store, plain and with mediation."""

import pytest

from mediator.store.memory import MemoryStore
from tests.unit.broker import Broker
from tests.unit.mediation import Mediation


@pytest.fixture
def broker() -> Broker:
    return Broker(MemoryStore())


@pytest.fixture
def house() -> Mediation:
    """A broker with mediation."""
    return Mediation(MemoryStore())
