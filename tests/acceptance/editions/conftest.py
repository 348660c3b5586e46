"""One service on its defaults for the whole folder; each test has mailboxes of its own, and connects as it likes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from tests.acceptance.conftest import SERVICES
from tests.acceptance.editions.stock import Stock
from tests.acceptance.service import Service, Services

LIGHT = {"MEDIATOR_REGISTRY__SEMANTIC": "false"}
"""Nobody is searched for here."""


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Start a managed nats-server with the gateway before it, on SQLite."""
    services = Services(tmp_path_factory.mktemp("editions"))
    service = services.new()
    service.environment |= LIGHT
    service.start()
    try:
        asyncio.run(service.ready())
        yield services
        assert service.complaints() == []
    finally:
        services.close()


@pytest.fixture
def service(request: pytest.FixtureRequest, shared: Services) -> Service:
    """The folder's service."""
    request.node.stash[SERVICES] = shared
    return shared.all[0]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Everything a test opens, closed with it."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def stock(service: Service, stack: AsyncExitStack) -> Stock:
    """A stock NATS client on the public port."""
    return await Stock.connect(service.nats_url, stack)
