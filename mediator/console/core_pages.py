"""The pages that the core brings to the console; here those of tenants, audit log, settings, clean-up and checks."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web

from mediator.broker import Broker
from mediator.console.console import Console
from mediator.console.mailboxes import MailboxPages
from mediator.console.overview import Overview
from mediator.console.pages import Page, Shown, Visit
from mediator.errors import BadRequestError
from mediator.operate.activity import Activity
from mediator.operate.admin_api import PREFIX
from mediator.operate.operations import Answer
from mediator.operate.sign_in import SignInView

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
AUDIT_FIELDS: Final = ("actor", "operation", "since", "until", "result")
PLOTTED: Final = 3
"""Kinds that have a line of their own in the plot; the rest has one together."""
REST: Final = "other"


async def _list_tenants(visit: Visit) -> Shown:
    asked = {"prefix": visit.text("prefix"), "after": visit.text("after")}
    return {"asked": asked, "found": await visit.run("tenant-list", **asked, limit=PER_PAGE), "quotas": QUOTAS}


async def _show_tenant(visit: Visit) -> Shown:
    shown = await visit.run("tenant-show", tenant=visit.text("tenant"))
    return {"tenant": shown, "place": {"tenant": shown["name"]}, "quotas": QUOTAS, "graces": GRACES}


TENANT_PAGES: Final = (
    Page("/tenants", "Tenants", _list_tenants, group="Service"),
    Page("/tenants/{tenant}", "Tenant", _show_tenant, template="tenant.html"),
)


async def _show_audit(visit: Visit) -> Shown:
    asked = {name: visit.text(name) for name in AUDIT_FIELDS}
    wanted = asked | {name: _seconds(name, asked[name]) for name in ("since", "until")}
    before = visit.number("before", 0, 0, 2**53) or None
    found = await visit.run("audit-list", **wanted, before=before, limit=PER_PAGE)
    acts = [each.name for each in visit.operations.all() if each.is_act]
    return {"asked": asked, "found": found, "acts": acts, "first": before is None}


def _seconds(name: str, text: str) -> float | None:
    """Return Unix seconds of what a browser's field for a time sends, which is taken as UTC."""
    try:
        if not text:
            return None
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        raise BadRequestError(name, "expected a time such as 2026-01-31T12:00") from None


AUDIT_PAGES: Final = (Page("/audit", "Audit log", _show_audit, group="Service"),)


async def _show_settings(visit: Visit) -> Shown:
    asked = {"text": visit.text("text"), "from": visit.text("from")}
    options = (await visit.run("settings"))["options"]
    found = [each | {"value": _written(each["value"])} for each in options]
    found = [each for each in found if _matches(each, asked["text"].lower().split())]
    if asked["from"]:
        found = [each for each in found if each["source"] != "default"]
    ordered = sorted(found, key=_section)
    sections = [(section, list(some)) for section, some in groupby(ordered, key=_section)]
    return {"asked": asked, "sections": sections, "count": len(found), "all": len(options)}


def _section(option: Answer) -> str:
    return str(option["option"]).rpartition(".")[0]


def _matches(option: Answer, words: list[str]) -> bool:
    text = " ".join(map(str, option.values())).lower()
    return all(word in text for word in words)


def _written(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


SETTINGS_PAGES: Final = (Page("/settings", "Settings", _show_settings, group="Service"),)


async def _show_cleanup(visit: Visit) -> Shown:
    before = {"before": visit.number("before", 0, 0, 2**53)} if visit.text("before") else {}
    hours = (await visit.run("cleanup-hours"))["hours"]
    return {
        "hours": [each for each in hours[::-1] if each["passes"]],
        "series": _series(hours),
        "history": await visit.run("cleanup-history", limit=PER_PAGE, **before),
        "asked": before,
        "plan": await visit.run("cleanup-plan"),
        "jobs": (await visit.run("job-list"))["jobs"],
    }


async def _plot_cleanup(visit: Visit) -> Shown:
    hours = (await visit.run("cleanup-hours"))["hours"]
    columns = {"at": [each["at"] for each in hours], "seconds": [each["seconds"] for each in hours]}
    for name, kinds in _series(hours).items():
        columns[name] = [sum(each["removed"].get(kind, 0) for kind in kinds) for each in hours]
    return web.json_response(body=orjson.dumps({"kept": len(hours), "columns": columns}))


def _series(hours: Sequence[Answer]) -> Mapping[str, Sequence[str]]:
    """Return the lines of the plot, each with the kinds that it counts, the most frequent first."""
    total: Counter[str] = Counter()
    for each in hours:
        total.update(each["removed"])
    kinds = [kind for kind, _ in total.most_common()] or ["messages"]
    lines: dict[str, Any] = {kind: [kind] for kind in kinds[:PLOTTED]}
    return lines | ({REST: kinds[PLOTTED:]} if kinds[PLOTTED:] else {})


CLEANUP_PAGES: Final = (
    Page("/cleanup", "Clean-up", _show_cleanup, "Service"),
    Page("/cleanup.json", "", _plot_cleanup),
)


async def _show_checks(visit: Visit) -> Shown:
    backups, check = await visit.run("backup-list"), (await visit.run("verify-state"))["task"]
    tasks = [task for task in (backups["task"], check) if task is not None]
    return {"backups": backups, "check": check, "running": any(task["state"] == "running" for task in tasks)}


CHECKS_PAGES: Final = (Page("/checks", "Backups and checks", _show_checks, "Service"),)


def add_core_pages(console: Console, activity: Activity, broker: Broker) -> Callable[[SignInView], Awaitable[str]]:
    """Add the pages of the core; return what writes the page of the sign-in."""
    overview, mailboxes = Overview(console, activity), MailboxPages(console, broker)
    api = Page("/api", "Admin API", _show_api, "Service")
    pages = (*overview.pages(), *mailboxes.pages(), *TENANT_PAGES, *AUDIT_PAGES, *SETTINGS_PAGES)
    pages = (*pages, *CLEANUP_PAGES, *CHECKS_PAGES, api)
    console.add_pages("console", Path(__file__).with_name("templates"), *pages)

    async def write_sign_in(view: SignInView) -> str:
        return await console.render("console/sign_in.html", view=view)

    return write_sign_in


async def _show_api(_visit: Visit) -> Shown:
    """Show the admin API's document in Swagger UI, which sends requests as whoever is signed in."""
    return {"document": f"{PREFIX}/openapi.json"}
