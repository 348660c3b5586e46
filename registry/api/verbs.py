"""The verbs AGENT.* of the NATS door (G1–G8)."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

from mediator import callers
from mediator.errors import NoSuchAgentError
from mediator.fields import parse_body
from mediator.parts import Host
from registry.api import codec
from registry.directory import Directory
from registry.memory.policy import MemoryPolicy
from registry.search.signs import WeakSigns

MAX_SEARCHES = 8
"""Concurrent searches: each may hold a reply of the maximum size."""

ReplyBudget = Callable[[], int]
"""Returns how many bytes a reply may have now; raises :class:`mediator.errors.BusyError` while too many are pending."""


def add_verbs(host: Host, directory: Directory, policy: MemoryPolicy, signs: WeakSigns) -> None:
    """Have the NATS door answer the verbs; ``signs`` are taken note of where the policy says so."""
    searches = asyncio.Semaphore(MAX_SEARCHES)

    async def register(tenant: str, data: bytes, _budget: ReplyBudget) -> bytes:
        done = await directory.register(tenant, data, callers.current.get())
        note = {} if done.card.note is None else {"note": done.card.note}
        return _success(mailbox=done.agent.address, warnings=done.card.warnings, **note)

    async def unregister(tenant: str, data: bytes, _budget: ReplyBudget) -> bytes:
        reference = codec.parse_reference(data)
        try:
            agent = await directory.unregister(tenant, reference)
        except NoSuchAgentError:
            return _success(mailbox=reference.address or "", removed=False)
        return _success(mailbox=agent.address, removed=True)

    async def report(tenant: str, data: bytes, _budget: ReplyBudget) -> bytes:
        agent = await directory.report(tenant, codec.parse_report(data), data)
        return _success(mailbox=agent.address)

    async def discover(tenant: str, data: bytes, budget: ReplyBudget) -> bytes:
        query = codec.parse_discover(parse_body(data))
        async with searches:
            page = await directory.discover(tenant, query, budget())
        if page.query_id and tenant in policy.signs:
            addresses = [agent.address for agent in page.agents]
            signs.found(tenant, callers.connection.get(), page.query_id, callers.current.get(), addresses)
        return _success(**codec.encode_page(page, query))

    async def feedback(tenant: str, data: bytes, _budget: ReplyBudget) -> bytes:
        said = codec.parse_feedback(parse_body(data))
        counted = await directory.feedback(tenant, said, callers.current.get())
        return _success(mailbox=said.address, counted=counted)

    if policy.signs:
        host.add_send_listener(signs.sent)
    host.add_verb("AGENT.REGISTER", "REGISTER", register)
    host.add_verb("AGENT.UNREGISTER", "UNREGISTER", unregister)
    host.add_verb("AGENT.REPORT", "REPORT", report)
    host.add_verb("AGENT.FEEDBACK", "FEEDBACK", feedback)
    host.add_verb("AGENT.DISCOVER", "DISCOVER", discover, {"agents": []})


def _success(**fields: Any) -> bytes:
    return orjson.dumps({"error": "", **fields})
