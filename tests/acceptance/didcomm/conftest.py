"""A service with its DIDComm door open, for each test its own."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.acceptance.didcomm.door import Door, Invites
from tests.acceptance.service import Services


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Everything a test opens, closed with it."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def door(services: Services, stack: AsyncExitStack) -> Door:
    """Start a service on SQLite."""
    return await Door.opened(services, stack)


@pytest.fixture
async def invites(door: Door) -> Invites:
    """Make an invitation that may be used for ever."""
    return await door.invite()
