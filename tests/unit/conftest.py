"""What tests of rules and protocols share: a broker over a store on a RAM disk, plain, with mediation, with a door."""

from collections.abc import AsyncIterator

import pytest

from tests.harness.broker import Broker
from tests.harness.mediation import Mediation
from tests.harness.protocols import Door, open_door
from tests.harness.stores import ram_store


@pytest.fixture
def broker() -> Broker:
    return Broker(ram_store())


@pytest.fixture
def house() -> Mediation:
    """A broker with mediation."""
    return Mediation(ram_store())


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    """A DIDComm door without cryptography."""
    async with open_door() as door:
        yield door
