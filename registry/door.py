"""Runs the registry of a service: its parts, and what operators see of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.http.health import Health
from mediator.operators.control import ControlServer
from mediator.operators.diagnosis import Examine
from mediator.settings_registry import Registry
from registry.assembly import assembled
from registry.directory import Directory
from registry.handover import Handover
from registry.meters import Meters
from registry.operating import RegistryOperating
from registry.sharing import Announcer


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
    meters = Meters(metrics)
    model = chosen.model if chosen.semantic else None
    async with assembled(broker, chosen.liveness, chosen.max_agents, model, data_dir, meters, announcer) as made:
        following, meanings = made.following, made.meanings
        meters.agents.set_function(lambda: following.agents)
        if meanings is not None:
            models = meanings
            meters.watch_model(lambda: models.lacking, lambda: models.encoder.ready)
        health.add("registry", following.check)
        operating = RegistryOperating(following, meanings)
        operating.register(control)
        Handover(broker, made.directory, meanings).register(control)
        examined.append(operating.examine)
        yield made.directory
