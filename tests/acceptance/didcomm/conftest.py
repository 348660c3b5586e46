"""A service with its DIDComm door open, for all tests of a file; each brings wallets of its own."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from tests.acceptance.conftest import SERVICES
from tests.acceptance.didcomm.door import SETTINGS, Door, Invites
from tests.acceptance.service import Service, Services


@dataclass(frozen=True, slots=True)
class House:
    """What the tests of a file share."""

    services: Services
    service: Service
    invites: Invites


@pytest.fixture(scope="module")
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Start a service on SQLite with the file's ``SETTINGS``, and an invitation that may be used for ever."""

    async def opened() -> Invites:
        service.start()
        await service.ready()
        async with AsyncExitStack() as stack:
            return await Door(service, stack).invite()

    services = Services(tmp_path_factory.mktemp("door"))
    service = services.new()
    service.environment |= SETTINGS | getattr(request.module, "SETTINGS", {})
    try:
        yield House(services, service, asyncio.run(opened()))
    finally:
        services.close()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Everything a test opens, closed with it."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def door(request: pytest.FixtureRequest, house: House, stack: AsyncExitStack) -> Door:
    """The file's service, running whatever the test before did to it."""
    request.node.stash[SERVICES] = house.services
    if not house.service.alive:
        house.service.start()
        await house.service.ready()
    return Door(house.service, stack)


@pytest.fixture
async def invites(door: Door, house: House) -> Invites:
    """An invitation that may be used for ever."""
    return house.invites
