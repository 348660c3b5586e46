"""The pages of tenants: who they are, what each takes of its quotas, and the forms that change them (A6, S7)."""

from typing import Final

from mediator.console.pages import Page, Shown, Visit

PER_PAGE: Final = 50
QUOTAS: Final = (
    ("mailboxes", "Mailboxes", "number"),
    ("messages", "Messages", "number"),
    ("bytes", "Bytes", "size"),
    ("rate", "Messages a second", "rate"),
    ("sockets", "Sockets", "number"),
    ("subscriptions", "Subscriptions", "number"),
)
"""Quotas whose use is known: the name, what it bounds, and the filter that shows it."""
GRACES: Final = ((0, "end at once"), (3_600_000, "1 hour"), (86_400_000, "1 day"), (604_800_000, "7 days"))
"""Milliseconds for which former secrets may stay valid, and how that reads."""


async def _list(visit: Visit) -> Shown:
    asked = {"prefix": visit.text("prefix"), "after": visit.text("after")}
    return {"asked": asked, "found": await visit.run("tenant-list", **asked, limit=PER_PAGE), "quotas": QUOTAS}


async def _show(visit: Visit) -> Shown:
    shown = await visit.run("tenant-show", tenant=visit.text("tenant"))
    return {"tenant": shown, "place": {"tenant": shown["name"]}, "quotas": QUOTAS, "graces": GRACES}


PAGES: Final = (
    Page("/tenants", "Tenants", _list, group="Service"),
    Page("/tenants/{tenant}", "Tenant", _show, template="tenant.html"),
)
