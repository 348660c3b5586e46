"""Writes what the registry answers, alike at both doors: cards go out as they came in, byte for byte (G3)."""

from typing import Any

import orjson

from mediator.agents.records import Agent, State
from registry.requests import Discover, Found, Registered


def found(page: Found, query: Discover) -> dict[str, Any]:
    """Return the fields of a page."""
    fields: dict[str, Any] = {
        "agents": [orjson.Fragment(agent.card) for agent in page.agents],
        "mode": page.mode,
        "total": page.total,
    }
    if query.with_scores:
        fields["scores"] = [round(score, 4) for score in page.scores]
    if query.with_state:
        fields["states"] = [state(*each) for each in zip(page.agents, page.states, strict=True)]
    if page.next is not None:
        fields["next"] = page.next
    if page.note:
        fields["note"] = page.note
    return fields


def state(agent: Agent, counts_as: State) -> dict[str, Any]:
    """Return what is known of an agent's life; the status is the last report as it came, or null."""
    return {
        "state": counts_as,
        "last_seen": agent.seen_at // 1000,
        "status": None if agent.status is None else orjson.Fragment(agent.status),
    }


def registration(done: Registered) -> dict[str, Any]:
    """Return what a registration has come to."""
    return {**history(done.agent), "warnings": done.card.warnings, "created": done.created}


def history(agent: Agent) -> dict[str, Any]:
    """Return what the registry says of an agent besides its card; times are Unix seconds."""
    return {
        "mailbox": agent.address,
        "name": agent.name,
        "edition": agent.edition,
        "registered_at": agent.registered_at // 1000,
        "updated_at": agent.updated_at // 1000,
    }
