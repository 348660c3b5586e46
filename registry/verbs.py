"""The registry at the NATS door: the verbs of AGENT.* (G1–G3)."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from mediator.fields import parse_body
from registry import reading, writing
from registry.directory import Directory

TURNS = 8
"""Searches at once: each may hold a reply as large as the server takes."""

Room = Callable[[], int]
"""How many bytes a reply may have now; raises :class:`mediator.errors.BusyError` while too many are under way."""
Handler = Callable[[str, bytes, Room], Awaitable[bytes]]
"""Takes a tenant and a body as it came, and returns the reply."""


class Verbs:
    """Answers for one directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._turns = asyncio.Semaphore(TURNS)

    @property
    def table(self) -> Mapping[str, tuple[str, Handler]]:
        """What the NATS door adds to its own: by subject behind the prefix, the verb's name and who handles it."""
        return {
            "AGENT.REGISTER": ("REGISTER", self._register),
            "AGENT.UNREGISTER": ("UNREGISTER", self._unregister),
            "AGENT.REPORT": ("REPORT", self._report),
            "AGENT.DISCOVER": ("DISCOVER", self._discover),
        }

    async def _register(self, tenant: str, data: bytes, _room: Room) -> bytes:
        done = await self._directory.register(tenant, data)
        return _success(mailbox=done.agent.address, warnings=done.card.warnings)

    async def _unregister(self, tenant: str, data: bytes, _room: Room) -> bytes:
        agent = await self._directory.unregister(tenant, reading.who(data))
        return _success(mailbox=agent.address)

    async def _report(self, tenant: str, data: bytes, _room: Room) -> bytes:
        agent = await self._directory.report(tenant, reading.report(data), data)
        return _success(mailbox=agent.address)

    async def _discover(self, tenant: str, data: bytes, room: Room) -> bytes:
        query = reading.discover(parse_body(data))
        async with self._turns:
            page = await self._directory.discover(tenant, query, room())
        return _success(**writing.found(page, query))


def _success(**fields: Any) -> bytes:
    return orjson.dumps({"error": "", **fields})
