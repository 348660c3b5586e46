"""A service with a registry, each set in a tenant of its own, filled and asked over NATS as any client does."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats
import orjson
from nats.aio.client import Client

from mediator.system.usage import cpu_seconds
from registry.evaluation import DEPTH
from tests.acceptance.registry.sets import Set, key_of
from tests.harness.service import Service, Services
from tests.harness.waiting import until

PREFIX = "$mq9.AI.AGENT."
PASSWORD = "only for this test"
IN_FLIGHT = 64
ANSWERS_WITHIN = 30.0
EMBEDDED_WITHIN = 7200.0
LOOK_EVERY = 0.25
"""Seconds between two looks at the metrics, which take CPU from the encoders."""
LACKING = re.compile(r"^mediator_registry_unembedded_agents (\S+)$", re.MULTILINE)
READY = re.compile(r"^mediator_registry_encoder_up 1\.0$", re.MULTILINE)


@dataclass
class Answers:
    """What one set's requests were answered."""

    ranked: dict[str, list[str]] = field(default_factory=dict)
    """Keys of cards, best first, by qid."""
    seconds: list[float] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)
    """Why keywords answered in place of vectors."""
    cpu_seconds: float = 0.0
    """Of all requests together, in all processes of the service."""


class Registry:
    """One set in its tenant."""

    def __init__(self, service: Service, client: Client, wanted: Set) -> None:
        self._service = service
        self._client = client
        self.set = wanted
        self._cards = {key_of(wanted.catalog, card): card for card in wanted.catalog.cards}
        self._keys = {orjson.dumps(orjson.loads(card)): key for key, card in self._cards.items()}

    async def fill(self) -> None:
        """Register all cards."""
        waiting = iter(self.set.catalog.cards)

        async def worker() -> None:
            for card in waiting:
                reply = orjson.loads(await self._ask("REGISTER", card))
                assert reply["error"] == "", reply

        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))

    async def answers(self, how: str, told: Callable[[], object] = lambda: None) -> Answers:
        """Ask every request, one after the other; ``how`` is ``text`` or ``semantic``."""
        answers = Answers()
        assert self._service.process is not None
        before = cpu_seconds(self._service.process.pid)
        for case in self.set.cases:
            body = orjson.dumps({how: case.query, "limit": DEPTH})
            asked_at = time.perf_counter()
            data = await self._ask("DISCOVER", body)
            answers.seconds.append(time.perf_counter() - asked_at)
            reply = orjson.loads(data)
            assert reply["error"] == "", reply
            assert len(reply["agents"]) <= DEPTH
            keys = [self._keys[orjson.dumps(agent)] for agent in reply["agents"]]
            for key in keys:
                assert self._cards[key] in data, f"{key} did not come back byte for byte"
            answers.ranked[case.qid] = keys
            answers.notes |= {reply["note"]} if "note" in reply else set()
            told()
        answers.cpu_seconds = cpu_seconds(self._service.process.pid) - before
        return answers

    async def _ask(self, verb: str, body: bytes) -> bytes:
        return (await self._client.request(PREFIX + verb, body, ANSWERS_WITHIN)).data


@asynccontextmanager
async def registries(
    services: Services, wanted: Sequence[Set], models: Sequence[str] = ()
) -> AsyncIterator[tuple[Service, list[Registry]]]:
    """Start a service with a tenant for each set; the registries are empty. Without ``models`` the packed one runs."""
    config = services.folder / "mediator.toml"
    tenants = (f'[tenants.{each.name}]\nusers = [{{name = "{each.name}", password = "{PASSWORD}"}}]' for each in wanted)
    config.write_text("\n".join([f"registry.models = {json.dumps(list(models))}", *tenants]))
    service = await services.running(config=config, semantic=True)
    clients = [await nats.connect(service.nats_url, user=each.name, password=PASSWORD) for each in wanted]
    try:
        yield service, [Registry(service, client, each) for client, each in zip(clients, wanted, strict=True)]
    finally:
        for client in clients:
            await client.close()


async def embedded(service: Service, count: int, told: Callable[[int], object] = lambda _done: None) -> None:
    """Wait until all agents have vectors and requests are read by the model; ``told`` hears how many have."""

    async def done() -> bool:
        _, metrics = await service.get("/metrics")
        lacking = LACKING.search(metrics)
        assert lacking is not None, "the metrics tell how many agents have no vectors"
        told(count - int(float(lacking[1])))
        if float(lacking[1]) == 0 and READY.search(metrics) is not None:
            return True
        await asyncio.sleep(LOOK_EVERY)
        return False

    await until(done, EMBEDDED_WITHIN, "all agents have vectors")
