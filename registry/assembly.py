"""Puts the parts of a registry together: the same for the service and for a trial of a catalog."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mediator.agents.records import Liveness
from mediator.broker import Broker
from registry.directory import Directory
from registry.following import Following
from registry.meanings import Meanings
from registry.meters import Meters
from registry.searching import Searching
from registry.sharing import Announcer

MODELS = "models"
"""The folder of files made from models, in the data folder."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A registry that runs."""

    following: Following
    meanings: Meanings | None
    directory: Directory


@asynccontextmanager
async def assembled(
    broker: Broker,
    liveness: Liveness,
    max_agents: int,
    model: str | None,
    data_dir: Path,
    meters: Meters,
    announcer: Announcer | None = None,
) -> AsyncIterator[Assembly]:
    """Run a registry inside this block; without ``model`` keywords answer alone.

    ``announcer`` reaches the instances that share the database. Nothing here waits for a model or for the index.
    """
    async with AsyncExitStack() as stack:
        following = Following(broker, liveness)
        shared = announcer is not None
        meanings = None if model is None else Meanings(broker, following, model, data_dir / MODELS, shared=shared)
        searching = Searching(broker, liveness, following, meanings, announcer)
        await searching.open()
        stack.callback(searching.close)
        stack.push_async_callback(following.stop)
        if meanings is None:
            await following.start("")
        else:
            stack.push_async_callback(meanings.stop)
            await meanings.start()
        directory = Directory(broker, liveness, max_agents, following, searching, meanings, meters)
        stack.callback(directory.close)
        yield Assembly(following, meanings, directory)
