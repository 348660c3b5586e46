"""Runs an operation in the service that owns the store, or on the store itself if no service runs."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from mediator.broker import Broker
from mediator.errors import SetupError, StoreHeldError, UnavailableError
from mediator.journal.writer import JournalWriter
from mediator.metrics import Metrics
from mediator.operate.control import ANSWER_SECONDS, send_command
from mediator.operate.operations import Answer
from mediator.settings.settings import Settings
from mediator.store.base import Store
from mediator.store.opening import database_path, open_store

START_SECONDS = 10.0
"""How long to wait for a process that holds the file and does not answer yet, such as a service that is starting."""
RETRY_SECONDS = 0.1


async def ask_service(settings: Settings, command: str, *, within: float = ANSWER_SECONDS, **fields: Any) -> Answer:
    """Return the service's answer to a command of the control socket.

    Raises :class:`SetupError` when no service listens, :class:`UnavailableError` with its reason when it refuses.
    """
    answer = await send_command(settings.data_dir, command, within=within, **fields)
    if answer["error"]:
        raise UnavailableError(str(answer["error"]).removeprefix("unavailable: "))
    return answer


async def ask_or_do(
    settings: Settings,
    command: str,
    fields: Answer,
    do: Callable[[], Awaitable[Answer]],
    *,
    within: float = ANSWER_SECONDS,
) -> Answer:
    """Return the service's answer to a command; without a service, what ``do`` returns, which opens the store.

    Raises :class:`MediatorError` when there is no database, another process holds it and does not answer, or the
    service does not know the command.
    """
    end = asyncio.get_running_loop().time() + START_SECONDS
    while True:
        try:
            return await ask_service(settings, command, within=within, **fields)
        except SetupError as error:
            if settings.database_url is None and not database_path(settings.data_dir).exists():
                raise SetupError(f"data_dir: no database in {settings.data_dir}, and {error}") from None
        try:
            return await do()
        except StoreHeldError:
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(RETRY_SECONDS)


def ask_or_use_store(settings: Settings, command: str, fields: Answer, work: Callable[[Store], Answer]) -> Answer:
    """Return the service's answer to a command, or what ``work`` does on the store; raises as :func:`ask_or_do`."""

    async def do() -> Answer:
        store = open_store(settings.data_dir, settings.store_url, settings.migrations_of_parts)
        try:
            return work(store)
        finally:
            store.close()

    return asyncio.run(ask_or_do(settings, command, fields, do))


@asynccontextmanager
async def open_broker(settings: Settings, purpose: str) -> AsyncIterator[Broker]:
    """Own the store for a command, or share it on PostgreSQL; events go to the journal as from a service.

    ``purpose`` is a word for the instance's name. Raises as :func:`mediator.store.opening.open_store`.
    """
    # Not in a thread: if cancelled while opening, the file would stay locked.
    store = open_store(settings.data_dir, settings.store_url, settings.migrations_of_parts)
    try:
        owner = settings.database_url is None
        # The owner writes the journal as the service would; on a shared database the services do.
        name = settings.instance if owner else f"{settings.instance[:48]}.{purpose}.{os.getpid()}"
        journal = JournalWriter(settings.journal, settings.data_dir, name, Metrics())
        broker = Broker(store, settings.bounds, observers=[journal.observe] if settings.journal.enabled else [])
        try:
            if owner:
                await journal.start(broker)
            else:
                journal.leave_to_others(broker.clock())
            try:
                yield broker
            finally:
                await journal.stop()
        finally:
            await broker.close()
    finally:
        store.close()
