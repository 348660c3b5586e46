"""Totals over all connections of a tenant, for operators: how many there are, of what kind, and what waits for them."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from mediator.mailboxes.bounds import DAY
from pickup.broker import MediationBroker
from pickup.connection_use import HOUR
from pickup.rules.listing import ConnectionView

PAGE = 1000
"""Connections read at once, so that other reads get their turn."""
MAX_COUNTED = 200_000
"""Connections that are looked at, the oldest ones; the total counts all."""
SHOWN_HOURS = 24

AGES = (("hour", HOUR), ("day", DAY), ("week", 7 * DAY), ("month", 30 * DAY))
OLDER = "older"
QUEUES = (("0", 0), ("1-9", 9), ("10-99", 99), ("100-999", 999), ("1000-9999", 9999))
LONGER = "10000+"


async def collect(mediation: MediationBroker, tenant: str) -> dict[str, Any]:
    """Return the totals; ``hours`` are of all tenants and instances."""
    now, after, more, total = mediation.clock(), 0, True, 0
    counts: dict[str, Counter[str]] = {
        "didcomm": Counter(), "pickup": Counter(), "transport": Counter(),
        "created": Counter(dict.fromkeys((*dict(AGES), OLDER), 0)),
        "seen": Counter(dict.fromkeys((*dict(AGES), OLDER), 0)),
        "queues": Counter(dict.fromkeys((*dict(QUEUES), LONGER), 0)),
    }  # fmt: skip
    counted = messages = size = 0
    while more and counted < MAX_COUNTED:
        page = await mediation.list_connections(tenant, after, PAGE)
        more, total = page.more, page.total
        for view in page.views:
            _count(counts, view, now)
            counted += 1
            if view.mailbox is not None:
                messages += view.mailbox.messages
                size += view.mailbox.bytes
        after = page.views[-1].connection.no if page.views else after
    await mediation.uses.flush()
    hours = await mediation.list_hours(now - now % HOUR - (SHOWN_HOURS - 1) * HOUR)
    return {
        "connections": total,
        "counted": counted,
        "messages": messages,
        "bytes": size,
        **{name: dict(counter) for name, counter in counts.items()},
        "hours": [{"began_at": at / 1000, **asdict(traffic)} for at, traffic in hours],
    }


def _count(counts: dict[str, Counter[str]], view: ConnectionView, now: int) -> None:
    connection, use = view.connection, view.use
    counts["didcomm"][connection.generation.value] += 1
    counts["pickup"][use.pickup or "none"] += 1
    counts["transport"][use.transport or "none"] += 1
    counts["created"][_age(now - connection.created_at)] += 1
    counts["seen"][_age(now - view.seen_at)] += 1
    waiting = 0 if view.mailbox is None else view.mailbox.messages
    counts["queues"][next((name for name, most in QUEUES if waiting <= most), LONGER)] += 1


def _age(span: int) -> str:
    return next((name for name, most in AGES if span < most), OLDER)
