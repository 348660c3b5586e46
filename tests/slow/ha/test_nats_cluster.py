"""A NATS cluster of three: each server is killed in turn under load, and nothing answered is missing (A8).

Two instances, their gateways and all clients connect to the cluster; nobody restarts them.
"""

import asyncio
import base64
import contextlib
import json
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from nats import connect
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from mediator.nats.server import find_binary
from tests.harness.client import Answer, Client
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
IN_A_ROW = 50
"""SENDs that are answered when no more requests go to a server that hangs."""
CONFIGURATION = """
server_name: nats-{number}
listen: "127.0.0.1:{port}"
ping_interval: "5s"
ping_max: 2
cluster {{
  name: mail
  listen: "{route}"
  routes: [ {routes} ]
}}
"""


class NatsCluster:
    """Three servers with routes to each other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = [free_port() for _ in range(SERVERS)]
        self._routes = [f"127.0.0.1:{free_port()}" for _ in range(SERVERS)]
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
        file = self._folder / f"nats-{number}.conf"
        routes = ", ".join(f'"nats://{route}"' for route in self._routes)
        file.write_text(
            CONFIGURATION.format(number=number, port=self._ports[number], route=self._routes[number], routes=routes)
        )
        self._processes[number] = spawn([str(find_binary()), "-c", str(file)], self._log(number))
        await until(lambda: listening(self._ports[number]), what="nats-server listens")

    def hang(self, number: int) -> None:
        """Let one answer nothing any more, as a machine that lost power: its connections stay."""
        self._processes[number].send_signal(signal.SIGSTOP)

    def kill(self, number: int) -> None:
        """Kill one."""
        self._processes[number].kill()
        self._processes[number].wait()

    def close(self) -> None:
        """End them all."""
        for number in self._processes:
            self.kill(number)


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsCluster]:
    cluster = NatsCluster(tmp_path)
    with contextlib.closing(cluster):
        await cluster.form()
        yield cluster


@pytest.fixture
def database(postgres: Server) -> Iterator[str]:
    with postgres.database(migrated=True) as url:
        yield url


async def running(services: Services, database: str, nats_urls: list[str], gateways: list[str]) -> list[Service]:
    """Start an instance for each of these URLs and gateways, and wait until all are ready."""
    key = base64.b64encode(bytes(32)).decode()
    # Programs of their own: each has its order of sets, which forks would share.
    services.forked = False
    for number, (nats_url, gateway) in enumerate(zip(nats_urls, gateways, strict=True)):
        service = services.new(f"instance-{number}", database_url=database, nats_url=nats_url)
        service.environment |= {"MEDIATOR_DIDCOMM__KEY": key, "MEDIATOR_GATEWAY__LISTEN": gateway}
        service.environment |= {"MEDIATOR_INSTANCE": f"instance-{number}"}
        service.start()
    await all_ready(services.all)
    return services.all


@pytest.mark.rule("A3", "A8", "N3", "S3", "E6", "E7", "K2", "K3")
async def test_each_server_of_a_cluster_may_be_killed(
    database: str, nats: NatsCluster, services: Services, stack: AsyncExitStack
):
    gateways = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    instances = await running(services, database, [",".join(nats.urls)] * 2, gateways)

    # One load at the servers themselves, one through the gateways, and subscriptions to one of its mailboxes.
    ways = {"direct": nats.urls, "gateway": [f"nats://{gateway}" for gateway in gateways]}
    loads = {way: Load(random.Random(way), way) for way in ways}
    clients = {way: await Client.connect(urls, connections=4, within=GIVEN_UP_AFTER) for way, urls in ways.items()}
    for way, client in clients.items():
        stack.push_async_callback(client.close)
        patient = await Client.connect(ways[way], tries=10)
        stack.push_async_callback(patient.close)
        await loads[way].create(patient)
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


@pytest.mark.rule("A3", "A8")
async def test_a_server_that_hangs_is_left(database: str, nats: NatsCluster, services: Services, stack: AsyncExitStack):
    # Each instance begins at a server of its own, and learns there of the others.
    instances = await running(services, database, nats.urls[:2], [f"127.0.0.1:{free_port()}" for _ in range(2)])
    client = await Client.connect(nats.urls[2], within=GIVEN_UP_AFTER)
    stack.push_async_callback(client.close)
    await client.create(name="box")
    answered: set[int] = set()

    async def are_answered() -> bool:
        sending = (client.send("box", b"x") for _ in range(IN_A_ROW))
        answers = await asyncio.gather(*sending, return_exceptions=True)
        got = {answer.body["msg_id"] for answer in answers if isinstance(answer, Answer)}
        assert not got & answered
        answered.update(got)
        return len(got) == IN_A_ROW

    await until(are_answered)
    nats.hang(0)
    await until(lambda: instances[0].events("reconnected"), what="the instance leaves the server that hangs")
    await until(are_answered, what="nothing goes there any more")
    await all_ready(instances)
    await until(are_answered)
    assert answered <= {item["msg_id"] for item in await client.query_all("box")}


@pytest.mark.rule("N12")
async def test_nats_tools_find_every_instance(
    database: str, nats: NatsCluster, services: Services, stack: AsyncExitStack
):
    await running(services, database, nats.urls[:2], [f"127.0.0.1:{free_port()}" for _ in range(2)])
    names = {"instance-0", "instance-1"}
    for url in nats.urls:
        client = await connect(url)
        stack.push_async_callback(client.close)
        answers = await discovered(client, "STATS.mq9")
        assert set(answers) == names
        before = counted(answers)
        created = await client.request("$mq9.AI.MAILBOX.CREATE", b"{}", timeout=20)
        assert not json.loads(created.data)["error"]
        # Either instance may have been asked.
        assert counted(await discovered(client, "STATS")) == before + 1
        for name in names:
            pong = await client.request(f"$SRV.PING.mq9.{name}", b"", timeout=20)
            assert json.loads(pong.data)["metadata"]["instance"] == name


async def discovered(client: NatsClient, question: str) -> dict[str, dict[str, Any]]:
    """Return what both instances answer to a question of NATS's tools (ADR-32), by the instance."""
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    await client.publish(f"$SRV.{question}", b"", reply=inbox)
    read = [json.loads((await answers.next_msg(20)).data) for _ in range(2)]
    return {answer["metadata"]["instance"]: answer for answer in read}


def counted(answers: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many CREATEs all instances counted."""
    return sum(
        each["num_requests"] for answer in answers.values() for each in answer["endpoints"] if each["name"] == "CREATE"
    )


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
