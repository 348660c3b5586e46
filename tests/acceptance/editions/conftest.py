"""Two services for the whole folder; each test has mailboxes of its own, and connects as it likes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from tests.acceptance.conftest import SERVICES
from tests.acceptance.editions.stock import Stock
from tests.acceptance.service import Service, Services, free_port

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


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A service whose gateway stands before a nats-server of somebody else, which has JetStream."""

    services: Services
    service: Service
    direct: str
    """The URL of the nats-server."""
    url: str
    """The URL of the gateway."""


@pytest.fixture(scope="package")
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    folder = tmp_path_factory.mktemp("elsewhere")
    services = Services(folder)
    try:
        direct = asyncio.run(services.nats_server("-js", "-sd", str(folder / "streams")))
        service, port = services.new(nats_url=direct), free_port()
        service.environment |= {**LIGHT, "MEDIATOR_GATEWAY__LISTEN": f"127.0.0.1:{port}"}
        service.start()
        asyncio.run(service.ready())
        yield Elsewhere(services, service, direct, f"nats://127.0.0.1:{port}")
        assert service.complaints() == []
    finally:
        services.close()


@pytest.fixture
def elsewhere(request: pytest.FixtureRequest, _elsewhere: Elsewhere) -> Elsewhere:
    """The folder's other service; its data and its nats-server outlive what a test does to it."""
    request.node.stash[SERVICES] = _elsewhere.services
    return _elsewhere


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Everything a test opens, closed with it."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def stock(service: Service, stack: AsyncExitStack) -> Stock:
    """A stock NATS client on the public port."""
    return await Stock.connect(service.nats_url, stack)
