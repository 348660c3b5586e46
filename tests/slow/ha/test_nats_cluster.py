"""A NATS cluster of three: each server is killed in turn under load, and nothing answered is missing (A8).

Two instances, their gateways and all clients connect to the cluster; nobody restarts them.
"""

import asyncio
import base64
import random
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from mediator.nats.server import find_binary
from tests.harness.client import Client
from tests.harness.load import SENDERS, Load
from tests.harness.postgres import Server
from tests.harness.service import Service, Services, free_port, listening, spawn
from tests.harness.stock import Stock, id_of
from tests.harness.waiting import until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(100)]

SERVERS = 3
ANSWERS = 200
"""SENDs that are answered, on each way in, before a server dies, and after."""
GIVEN_UP_AFTER = 2.0


class NatsCluster:
    """Three servers with routes to each other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = [free_port() for _ in range(SERVERS)]
        self._routes = [f"nats://127.0.0.1:{free_port()}" for _ in range(SERVERS)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def urls(self) -> list[str]:
        """Where clients connect."""
        return [f"nats://127.0.0.1:{port}" for port in self._ports]

    async def form(self) -> None:
        """Start all, and wait until each has a route to another."""
        for number in range(SERVERS):
            await self.start(number)
        for number in range(SERVERS):
            log = self._log(number)
            await until(lambda log=log: "Route connection created" in log.read_text(), what="the cluster is formed")

    def _log(self, number: int) -> Path:
        return self._folder / f"nats-{number}.log"

    async def start(self, number: int) -> None:
        """Start one."""
        options = ["-a", "127.0.0.1", "-p", str(self._ports[number]), "--cluster_name", "mail"]
        options += ["--cluster", self._routes[number], "--routes", ",".join(self._routes)]
        self._processes[number] = spawn([str(find_binary()), *options], self._log(number))
        await until(lambda: listening(self._ports[number]), what="nats-server listens")

    def kill(self, number: int) -> None:
        """Kill one."""
        self._processes[number].kill()
        self._processes[number].wait()

    def close(self) -> None:
        """End them all."""
        for number in self._processes:
            self.kill(number)


@pytest.mark.rule("A3", "A8", "N3", "S3", "E6", "E7", "K2", "K3")
async def test_each_server_of_a_cluster_may_be_killed(
    services: Services, stack: AsyncExitStack, postgres: Server, tmp_path: Path
):
    nats = NatsCluster(tmp_path)
    stack.callback(nats.close)
    await nats.form()
    database = stack.enter_context(postgres.database(migrated=True))
    instances = [services.new(name, database_url=database, nats_url=",".join(nats.urls)) for name in ("one", "two")]
    stack.callback(services.close)
    gateways, key = [f"127.0.0.1:{free_port()}" for _ in instances], base64.b64encode(bytes(32)).decode()
    for each, gateway in zip(instances, gateways, strict=True):
        each.environment |= {"MEDIATOR_DIDCOMM__KEY": key, "MEDIATOR_GATEWAY__LISTEN": gateway}
        each.start()
    await all_ready(instances)

    # One load at the servers themselves, one through the gateways, and subscriptions to one of its mailboxes.
    ways = {"direct": nats.urls, "gateway": [f"nats://{gateway}" for gateway in gateways]}
    loads = {way: Load(random.Random(way), way) for way in ways}
    clients = {way: await Client.connect(urls, connections=4, within=GIVEN_UP_AFTER) for way, urls in ways.items()}
    for way, client in clients.items():
        stack.push_async_callback(client.close)
        await loads[way].create(client)
    box = loads["gateway"].boxes[1]
    alone, crew = (
        await subscribed(ways["gateway"], box, "", stack),
        await subscribed(ways["gateway"], box, "crew", stack),
    )

    def everything(got: set[int]) -> bool:
        return loads["gateway"].books.numbers[box].keys() <= got

    async def killing() -> None:
        for number in range(SERVERS):
            await asyncio.gather(*(load.answered(ANSWERS) for load in loads.values()))
            nats.kill(number)
            await asyncio.gather(*(load.answered(ANSWERS) for load in loads.values()))
            await all_ready(instances)
            await nats.start(number)

    await loads["direct"].work(clients["direct"], lambda: loads["gateway"].work(clients["gateway"], killing))
    for way, load in loads.items():
        # What was not answered is sent again, with its dedup id.
        await load.work(clients[way], lambda load=load: load.answered(SENDERS))
        patient = await Client.connect(ways[way], tries=10)
        stack.push_async_callback(patient.close)
        await load.hold(patient)
        print(way, dict(load.books.counted))
    for got in (alone, crew):
        await until(lambda got=got: everything(got), what="the subscription has everything")


async def all_ready(instances: list[Service]) -> None:
    """Wait until all instances are ready."""
    await asyncio.gather(*(each.ready() for each in instances))


async def subscribed(urls: list[str], box: str, queue: str, stack: AsyncExitStack) -> set[int]:
    """Subscribe to a mailbox, and return the numbers of what comes."""
    client, got = await Stock.connect(urls, stack), set[int]()

    async def take(message: Msg) -> None:
        got.add(id_of(message))

    await client.client.subscribe(f"$mq9.AI.MAILBOX.MSG.{box}.*", queue=queue, cb=take)
    await client.client.flush()
    return got
