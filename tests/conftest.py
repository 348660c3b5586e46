"""What every layer of tests shares: the servers and services of a run, and how tests are dealt out to processes."""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.harness.didcomm_service import Door, Invites
from tests.harness.node import rust
from tests.harness.postgres import postgres
from tests.harness.service import Service, Services, free_port
from tests.harness.stock import Stock
from tests.harness.stores import closed_stores

__all__ = ["closed_stores", "postgres", "rust"]

# A deadline would measure the machine.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

SPARK = "tests/slow/spark/"
SPARK_AND_MAIL = tuple(
    f"{SPARK}test_{name}" for name in ["source", "sink", "killed", "java", "session", "standalone", "example"]
)
AIRFLOW = "tests/slow/test_example_airflow.py"
SERVICES = pytest.StashKey[Services]()
"""The processes of a test, whose logs are shown with its failure."""


class ByFile(LoadFileScheduling):
    """A file to a process, and all that runs Spark to two, which two cores bear: a third gives up on its Python."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.startswith(SPARK_AND_MAIL) or file == AIRFLOW:
            return "Spark and mail"
        return "Spark and the lake" if file.startswith(SPARK) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Take the place of what ``--dist`` says."""
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Show the end of each process's log with the failure."""
    report = yield
    services = item.stash.get(SERVICES, None)
    if report.failed and services is not None:
        for name, said in services.logs():
            report.sections.append((f"log of {name}", said))
    return report


@pytest.fixture
async def services(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Services]:
    """Make services of this test's own; they end with it."""
    services = Services(tmp_path)
    request.node.stash[SERVICES] = services
    try:
        yield services
    finally:
        services.close()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Close what a test opens, at its end."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def shared_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Start a managed nats-server with the gateway before it, on SQLite, for all tests that share a service."""
    services = Services(tmp_path_factory.mktemp("shared"))
    try:
        asyncio.run(services.running())
        yield services
        assert services.all[0].complaints() == []
    finally:
        services.close()


@pytest.fixture
def service(request: pytest.FixtureRequest, shared_services: Services) -> Service:
    """Return the shared service; each test has mailboxes of its own, and connects as it likes."""
    request.node.stash[SERVICES] = shared_services
    return shared_services.all[0]


@pytest.fixture
async def stock(service: Service, stack: AsyncExitStack) -> Stock:
    """Connect a stock NATS client to the public port of the shared service."""
    return await Stock.connect(service.nats_url, stack)


@dataclass(frozen=True, slots=True)
class ForeignServer:
    """A service whose gateway stands before a nats-server of somebody else, which has JetStream."""

    services: Services
    service: Service
    direct: str
    """The URL of the nats-server."""
    url: str
    """The URL of the gateway."""


@pytest.fixture(scope="session")
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForeignServer]:
    folder = tmp_path_factory.mktemp("elsewhere")
    services = Services(folder)
    try:
        direct = asyncio.run(services.nats_server("-js", "-sd", str(folder / "streams")))
        service, port = services.new(nats_url=direct), free_port()
        service.environment["MEDIATOR_GATEWAY__LISTEN"] = f"127.0.0.1:{port}"
        asyncio.run(service.serve())
        yield ForeignServer(services, service, direct, f"nats://127.0.0.1:{port}")
        assert service.complaints() == []
    finally:
        services.close()


@pytest.fixture
def elsewhere(request: pytest.FixtureRequest, _elsewhere: ForeignServer) -> ForeignServer:
    """Return the shared service before another nats-server; both outlive what a test does to them."""
    request.node.stash[SERVICES] = _elsewhere.services
    return _elsewhere


@dataclass(frozen=True, slots=True)
class SharedDoor:
    """A shared service with its DIDComm door open, and an invitation that may be used for ever."""

    services: Services
    service: Service
    invites: Invites


@pytest.fixture(scope="session")
def _shared_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedDoor]:
    """Start a service on SQLite; tests may kill it."""

    async def opened() -> Invites:
        async with AsyncExitStack() as stack:
            return await (await Door.opened(services, stack)).invite()

    services = Services(tmp_path_factory.mktemp("door"))
    try:
        invites = asyncio.run(opened())
        yield SharedDoor(services, services.all[0], invites)
    finally:
        services.close()


@pytest.fixture
async def door(request: pytest.FixtureRequest, _shared_door: SharedDoor, stack: AsyncExitStack) -> Door:
    """Return the shared DIDComm door, running whatever the test before did to it; each brings wallets of its own."""
    request.node.stash[SERVICES] = _shared_door.services
    service = _shared_door.service
    if not service.alive:
        await service.serve()
    return Door(service, stack)


@pytest.fixture
async def invites(door: Door, _shared_door: SharedDoor) -> Invites:
    """Return an invitation that may be used for ever."""
    return _shared_door.invites
