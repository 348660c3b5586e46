"""What the tests of the domain share: a broker over the in-memory store."""

import pytest

from mediator.store.memory import MemoryStore
from tests.unit.broker import Broker


@pytest.fixture
def broker() -> Broker:
    return Broker(MemoryStore())
