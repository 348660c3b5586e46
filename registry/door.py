"""Puts the registry together, and opens it for the doors."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.http.health import Health
from mediator.operators.control import ControlServer
from mediator.operators.diagnosis import Examine
from mediator.settings_registry import Registry
from registry.directory import Directory
from registry.following import Following
from registry.meanings import Meanings
from registry.meters import Meters
from registry.operating import RegistryOperating
from registry.searching import Searching
from registry.sharing import Announcer

MODELS = "models"
"""The folder of files made from models, in the data folder."""


@asynccontextmanager
async def registry_door(
    chosen: Registry,
    broker: Broker,
    data_dir: Path,
    metrics: CollectorRegistry,
    control: ControlServer,
    health: Health,
    examined: list[Examine],
    announcer: Announcer | None,
) -> AsyncIterator[Directory]:
    """Run the registry inside this block; ``announcer`` reaches the instances that share the database.

    ``control``, ``health`` and ``examined`` learn what operators may ask of it.

    Nothing here waits for a model or for the index: both come while the service answers already.
    """
    async with AsyncExitStack() as stack:
        following = Following(broker, chosen.liveness)
        meanings = (
            Meanings(broker, following, chosen.model, data_dir / MODELS, shared=announcer is not None)
            if chosen.semantic
            else None
        )
        searching = Searching(broker, chosen.liveness, following, meanings, announcer)
        await searching.open()
        stack.callback(searching.close)
        stack.push_async_callback(following.stop)
        if meanings is None:
            await following.start("")
        else:
            stack.push_async_callback(meanings.stop)
            await meanings.start()
        meters = Meters(metrics)
        meters.agents.set_function(lambda: following.agents)
        if meanings is not None:
            models = meanings
            meters.watch_model(lambda: models.lacking, lambda: models.encoder.ready)
        health.add("registry", following.check)
        operating = RegistryOperating(following, meanings)
        operating.register(control)
        examined.append(operating.examine)
        directory = Directory(broker, chosen.liveness, chosen.max_agents, following, searching, meanings, meters)
        stack.callback(directory.close)
        yield directory
