"""The core's pages but for those of mailboxes: overview, tenants, audit log, settings, clean-up, checks, admin API."""

import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web
from multidict import MultiDict

from mediator.broker import Broker
from mediator.console.console import Console
from mediator.console.documentation import DOCUMENTATION_PAGES
from mediator.console.mailbox_pages import MailboxPages
from mediator.console.pages import Page, PageContent, PageRequest
from mediator.console.streams import Broadcast, event
from mediator.console.tables import HOME, Table, TableRequest, heading, next_step
from mediator.errors import BadRequestError, MediatorError
from mediator.mailboxes.message import Door
from mediator.operate.activity import HOUR, LANE_WORDS, RANGES, Activity
from mediator.operate.activity_history import Sample
from mediator.operate.admin_api import PREFIX
from mediator.operate.alarms import MAX_ENDED
from mediator.operate.logs import LEVELS, MAX_RECENT
from mediator.operate.long_tasks import BackupFile
from mediator.operate.operations import Actor, Answer, Right
from mediator.operate.records import (
    AlarmView,
    AuditEntry,
    Column,
    CopyRuleView,
    Kind,
    LogLine,
    TenantTokenView,
    TenantUse,
    TenantUserView,
    TenantView,
)
from mediator.operate.scheduler import CleanupMinute, CleanupSummary, JobView
from mediator.operate.sign_in import SignInView
from mediator.operate.tenant_operations import MAX_LISTED

FINDINGS_SECONDS: Final = 30.0
"""Between two looks of the doctor for live pages."""
_ITSELF: Final = Actor("console", frozenset({Right.READ}), "local")
"""Reads what all live pages show."""
PLOTS: Final[Sequence[tuple[str, str, int]]] = (
    ("In: messages a second", " ".join(f"incoming.{lane}" for lane in LANE_WORDS), 1),
    ("Out: messages a second delivered", " ".join(f"outgoing.{lane}" for lane in LANE_WORDS), 1),
    ("Acknowledged: messages a second", " ".join(f"acknowledged.{lane}" for lane in LANE_WORDS), 1),
    ("Depth: messages stored", "messages", 1),
    ("Latency of requests, ms", "p99 p50", 1000),
    ("Requests a second, and those that failed", "failed requests", 1),
)
"""Captions, names of the columns of ``activity-history``, and by what they are multiplied."""


class Overview:
    """The page and its live parts, which are rendered once for all who look."""

    def __init__(self, console: Console, activity: Activity) -> None:
        self._console = console
        self._live = Broadcast()
        self._findings: list[Answer] = []
        self._findings_at = 0.0
        activity.listener = self._publish

    def pages(self) -> tuple[Page, ...]:
        """Return the pages."""
        return (
            Page("", "Overview", self._show, group="Mail", template="overview.html"),
            Page("/history", "Activity as a table", self._history),
            Page("/history.json", "", self._samples),
            Page("/live", "", self._follow),
        )

    async def _show(self, page_request: PageRequest) -> PageContent:
        return {
            "plots": PLOTS,
            "range": _range(page_request),
            "ranges": RANGES,
            **_numbers(await page_request.run("activity"), page_request.table),
            "found": (await page_request.run("installation", quick=True))["findings"],
        }

    async def _history(self, page_request: PageRequest) -> PageContent:
        """Show means of each minute, or of what a row of a longer range stands for."""
        found = await page_request.run("activity-history", range=_range(page_request))
        columns, per = found["columns"], max(1, 60 // found["step"])
        rows = [
            {"at": columns["at"][start : start + per][-1], **_by_lane(means)}
            for start in range(0, len(columns["at"]), per)
            if (means := {name: _mean(columns[name][start : start + per]) for name in columns if name != "at"})
        ]
        caption = "Messages and requests a second, latency and messages stored, newest first"
        empty = "Nothing is kept yet: a row comes with each minute." if per == 1 else "No sample has been taken yet."
        table = page_request.table("minutes", caption, _MINUTES, rows[::-1], empty=empty)
        return {"range": _range(page_request), "step": max(found["step"], 60), "minutes": table}

    async def _samples(self, page_request: PageRequest) -> PageContent:
        return web.json_response(
            body=orjson.dumps(await page_request.run("activity-history", range=_range(page_request)))
        )

    async def _follow(self, page_request: PageRequest) -> PageContent:
        return await self._console.streams.serve(page_request.request, page_request.actor, self._live.follow())

    async def _publish(self, sample: Sample) -> None:
        if not self._live.followers:
            return
        run, now = self._console.operations.run, time.monotonic()
        try:
            numbers = _numbers(await run(_ITSELF, "activity", {}), _live_table)
            if now - self._findings_at > FINDINGS_SECONDS:
                self._findings = (await run(_ITSELF, "installation", {"quick": True}))["findings"]
                self._findings_at = now
        except (MediatorError, TimeoutError):
            # The next sample is tried again; until then, pages show the last one.
            return
        render = self._console.render
        self._live.publish(
            event("state", await render("console/overview_state.html", found=self._findings))
            + event("facts", await render("console/overview_facts.html", **numbers))
            + event("numbers", await render("console/overview_numbers.html", **numbers))
            + event("findings", await render("console/overview_findings.html", found=self._findings))
            + event("sample", orjson.dumps(dict(sample)).decode())
        )


_FLOWS: Final = ("incoming", "outgoing", "acknowledged")
_BY_LANE: Final = [
    Column("lane", field="lane", kind=Kind.LANE),
    *(
        Column(title, field=flow, kind=Kind.RATE)
        for flow, title in zip(_FLOWS, ("in/s", "out/s", "acknowledged/s"), strict=True)
    ),
]
_MINUTES: Final = [
    Column("time", field="at", kind=Kind.TIME),
    *(
        Column(title, field=flow, kind=Kind.COUNTS)
        for flow, title in zip(_FLOWS, ("in/s", "out/s", "acknowledged/s"), strict=True)
    ),
    Column("requests/s", field="requests", kind=Kind.RATE),
    Column("failed/s", field="failed", kind=Kind.RATE),
    Column("latency p50", field="p50", kind=Kind.SECONDS),
    Column("latency p99", field="p99", kind=Kind.SECONDS),
    Column("stored", field="messages", kind=Kind.NUMBER),
]
_INSTANCES: Final = [
    Column("instance", field="instance"),
    Column("state", field="state", kind=Kind.STATE),
    Column("requests/s", field="requests", kind=Kind.RATE),
    Column("latency p99", field="p99", kind=Kind.SECONDS),
    Column("NATS connections", field="nats", kind=Kind.NUMBER),
    Column("WebSockets", field="websocket", kind=Kind.NUMBER),
    Column("started", field="since", kind=Kind.TIME),
    Column("last heard of", field="heard_at", kind=Kind.TIME),
    Column("version", field="version"),
]
_CHECKS: Final = [Column("component", field="name"), Column("state", field="state", kind=Kind.STATE)]


def _range(page_request: PageRequest) -> str:
    name = page_request.text("range", HOUR)
    if name not in RANGES:
        raise BadRequestError("range", f"expected {', '.join(RANGES)}")
    return name


def _numbers(activity: Answer, table: Callable[..., Table]) -> Mapping[str, Any]:
    """Return what the page shows of the operation's answer."""
    own = activity["instances"][0]
    flows = [{"lane": lane, **{flow: own["sample"].get(f"{flow}.{lane}") for flow in _FLOWS}} for lane in LANE_WORDS]
    instances = [
        {
            **each,
            "state": "ready" if each["ready"] else _failed(each["checks"]),
            **{name: each["sample"].get(name) for name in ("requests", "p99")},
            **each["sockets"],
        }
        for each in activity["instances"]
    ]
    checks = [{"name": name, "state": state} for name, state in own["checks"].items()]
    return {
        "activity": activity,
        "own": own,
        "sample": own["sample"],
        "flows": table("flows", "Messages a second on this instance, by lane", _BY_LANE, flows),
        "instances": table("instances", "Instances", _INSTANCES, instances),
        "checks": table("components", "Components of this instance", _CHECKS, checks),
    }


def _failed(checks: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {state}" for name, state in checks.items() if state != "ok") or "not ready"


def _live_table(name: str, caption: str, columns: Sequence[Column], rows: Sequence[Answer]) -> Table:
    """Return a table in its usual order, for all who look at a live page."""
    request = TableRequest(name, HOME, MultiDict(), {})
    return Table.of(request, caption, columns, rows, _ITSELF.rights, empty="None.", total=None, older=None)


def _by_lane(sample: Mapping[str, float | None]) -> Mapping[str, Any]:
    """Return a sample in which each flow is an object with its lanes."""
    flows = {flow: {lane: sample.get(f"{flow}.{lane}") or 0 for lane in LANE_WORDS} for flow in _FLOWS}
    return {**{name: value for name, value in sample.items() if "." not in name}, **flows}


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


QUOTAS: Final = TenantUse.columns(
    "mailboxes", "messages", "bytes", "rate", "sockets", "subscriptions", rate="messages a second"
)
"""Quotas whose use is known."""
_TENANTS: Final = [
    *TenantView.columns("name", "origin"),
    Column("users", field="users", kind=Kind.NUMBER),
    Column("API tokens", field="tokens", kind=Kind.NUMBER),
    *QUOTAS,
]
_QUOTA_TITLES: Final = [*((column.field, heading(column)) for column in QUOTAS), ("burst", "Burst (messages at once)")]
GRACES: Final = ((0, "not at all"), (3_600_000, "1 hour"), (86_400_000, "1 day"), (604_800_000, "7 days"))
"""Milliseconds for which former secrets may stay valid, and how that reads."""
COPY_COLUMNS: Final = CopyRuleView.columns(
    "name", "tenant", "address", "tags", "priorities", "doors", "to_address", "headers_only", "when_full",
    "to_subject", "to_url", "ttl_seconds", "origin", "matched", "copied", "dropped", "refused", "forwarded", "failed",
    "lag_seconds", "state",
)  # fmt: skip
AUDIT_FIELDS: Final = ("actor", "operation", "since", "until", "result")
PLOTTED: Final = 3
"""Kinds that have a line of their own in the plot; the rest has one together."""
REST: Final = "other"


async def _list_tenants(page_request: PageRequest) -> PageContent:
    asked, request = {"prefix": page_request.text("prefix")}, page_request.table_request("tenants", max_rows=MAX_LISTED)
    found = await page_request.run("tenant-list", **asked, after=page_request.text("after"), limit=request.limit)
    rows = [_with_use(tenant) for tenant in found["tenants"]]
    older = {"after": rows[-1]["name"] if found["more"] else None}
    table = page_request.table(
        request, "Tenants and their quotas", _TENANTS, rows, empty="No tenant matches.", older=older
    )
    return {"asked": asked, "tenants": table, "external": found["external"]}


def _with_use(tenant: Answer) -> Answer:
    """Return a tenant as a row: what it takes of its quotas beside its other fields."""
    return {**tenant, **tenant["use"]} | {name: len(tenant[name]) for name in ("users", "tokens")}


async def _show_tenant(page_request: PageRequest) -> PageContent:
    shown = await page_request.run("tenant-show", tenant=page_request.text("tenant"))
    return {
        "tenant": shown,
        "use": _with_use(shown),
        "place": {"tenant": shown["name"]},
        "users": page_request.table(
            "users", "Users who may connect", TenantUserView.columns("name", "nkey", "previous_until"), shown["users"]
        ),
        "tokens": page_request.table(
            "tokens", "API tokens", TenantTokenView.columns("name", "expires_at"), shown["tokens"]
        ),
        "quotas": QUOTAS,
        "quota_titles": _QUOTA_TITLES,
        "graces": GRACES,
    }


TENANT_PAGES: Final = (
    Page("/tenants", "Tenants", _list_tenants, group="Service", guide="howto/tenants"),
    Page("/tenants/{tenant}", "Tenant", _show_tenant, template="tenant.html", guide="howto/tenants"),
)


async def _list_copies(page_request: PageRequest) -> PageContent:
    found = await page_request.run("copy-rule-list", tenant=page_request.text("tenant"))
    caption = "Rules by which mail is copied, and what they did at this instance"
    return {
        "tenant": page_request.text("tenant"),
        "rules": page_request.table("rules", caption, COPY_COLUMNS, found["rules"], empty="No mail is copied."),
        "lanes": LANE_WORDS,
        "doors": [*Door],
    }


COPY_PAGES: Final = (Page("/copies", "Copies", _list_copies, group="Mail", guide="howto/copy-mail"),)


async def _show_alarms(page_request: PageRequest) -> PageContent:
    found = await page_request.run("alarm-list", limit=MAX_ENDED)
    present, ended = "No problems now.", "No problem ended in the last week."
    return {
        "present": page_request.table(
            "present", "Problems now, the latest first", _PRESENT, found["present"], empty=present
        ),
        "ended": page_request.table(
            "ended", "Problems of the last week that ended", _ENDED, found["ended"], empty=ended
        ),
    }


_PRESENT: Final = AlarmView.columns("began_at", "text", "advice")
_ENDED: Final = AlarmView.columns("ended_at", "began_at", "text", began_at="began")
ALARM_PAGES: Final = (Page("/alarms", "Alarms", _show_alarms, group="Service", guide="operations"),)


async def _show_audit(page_request: PageRequest) -> PageContent:
    asked = {name: page_request.text(name) for name in AUDIT_FIELDS}
    wanted = asked | {name: _seconds(name, asked[name]) for name in ("since", "until")}
    request, before = page_request.table_request("entries"), page_request.number("before", 0, 0, 2**53) or None
    found = await page_request.run("audit-list", **wanted, before=before, limit=request.limit)
    rows = [each | {"last_at": each["last_at"] if each["times"] > 1 else None} for each in found["entries"]]
    older = {"before": rows[-1]["no"] if found["more"] else None}
    acts = [each.name for each in page_request.operations.all() if each.is_act]
    entries = page_request.table(
        request, "What operators did, newest first", _AUDIT, rows, empty="No entries.", older=older
    )
    return {"asked": asked, "acts": acts, "entries": entries}


_AUDIT: Final = AuditEntry.columns(
    "at", "actor", "operation", "result", "times", "last_at", "tenant", "via", "instance", "fields"
)


def _seconds(name: str, text: str) -> float | None:
    """Return Unix seconds of what a browser's field for a time sends, which is taken as UTC."""
    try:
        if not text:
            return None
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        raise BadRequestError(name, "expected a time such as 2026-01-31T12:00") from None


AUDIT_PAGES: Final = (Page("/audit", "Audit log", _show_audit, group="Service", guide="howto/operators"),)


async def _show_settings(page_request: PageRequest) -> PageContent:
    asked = {"text": page_request.text("text"), "from": page_request.text("from")}
    options = (await page_request.run("settings"))["options"]
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


async def _show_log(page_request: PageRequest) -> PageContent:
    level = page_request.text("level")
    lines = (await page_request.run("log", **({"level": level} if level else {}), limit=MAX_RECENT))["lines"]
    caption = f"What this instance logged last, newest first (at most {MAX_RECENT})"
    return {
        "level": level,
        "levels": LEVELS,
        "lines": page_request.table("lines", caption, _LOG, lines, empty="No lines."),
    }


_LOG: Final = LogLine.columns("at", "level", "logger", "event", "fields")
LOG_PAGES: Final = (Page("/log", "Log", _show_log, group="Service", right=Right.OPERATE, guide="operations"),)

SETTINGS_PAGES: Final = (Page("/settings", "Settings", _show_settings, group="Service", guide="configuration"),)


async def _show_cleanup(page_request: PageRequest) -> PageContent:
    request = page_request.table_request("minutes")
    before = {"before": page_request.number("before", 0, 0, 2**53)} if page_request.text("before") else {}
    hours = (await page_request.run("cleanup-hours"))["hours"]
    plan = await page_request.run("cleanup-plan")
    history = await page_request.run("cleanup-history", limit=request.limit, **before)
    older = {"before": history["minutes"][-1]["no"] if history["more"] else None}
    jobs = [
        each | {"state": each["error"] or ("ok" if each["last_at"] else None)}
        for each in (await page_request.run("job-list"))["jobs"]
    ]
    worked, nothing = [each for each in hours[::-1] if each["passes"]], "Nothing has been removed yet."
    return {
        "series": _series(hours),
        "plan": plan,
        "findings": page_request.table("findings", "Expired and not yet removed", _FINDINGS, plan["findings"]),
        "hours": page_request.table("hours", "Hours in which something was removed", _HOURS, worked, empty=nothing),
        "minutes": page_request.table(
            request, "Runs by the minute, newest first", _RUNS, history["minutes"], older=older
        ),
        "jobs": page_request.table("jobs", "Jobs", _JOBS, jobs),
    }


_FINDINGS: Final = [
    Column("what", field="what"),
    Column("why", field="why"),
    Column("count", field="count", kind=Kind.NUMBER, prefix=lambda found: "≥ " if found["more"] else ""),
]
_HOURS: Final = CleanupSummary.columns("at", "removed", "passes", "seconds", "failed", "error", passes="runs")
_RUNS: Final = CleanupMinute.columns("at", "removed", "passes", "seconds", "failed", "error", "instance", passes="runs")
_JOBS: Final = [
    *JobView.columns("job", "every_seconds", "next_at", "last_at", "took_seconds"),
    Column("result", field="state", kind=Kind.STATE),
]


async def _plot_cleanup(page_request: PageRequest) -> PageContent:
    hours = (await page_request.run("cleanup-hours"))["hours"]
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
    Page("/cleanup", "Clean-up", _show_cleanup, "Service", guide="operations"),
    Page("/cleanup.json", "", _plot_cleanup),
)


async def _show_checks(page_request: PageRequest) -> PageContent:
    backups, check = await page_request.run("backup-list"), (await page_request.run("verify-state"))["task"]
    tasks = [task for task in (backups["task"], check) if task is not None]
    skipped = ((check and check["result"]) or {}).get("skipped", [])
    return {
        "backups": backups,
        "files": page_request.table(
            "backups", f"In {backups['folder']}", _BACKUPS, backups["files"], empty=_NO_BACKUPS
        ),
        "check": check,
        "skipped": page_request.table("skipped", "Checks that could not be made", _SKIPPED, skipped),
        "running": any(task["state"] == "running" for task in tasks),
    }


_NO_BACKUPS: Final = next_step("No backups yet. Make one:", "mediator backup mediator.tar")
_BACKUPS: Final = BackupFile.columns("name", "bytes", "at")
_SKIPPED: Final = [Column("check", field="check"), Column("reason", field="reason")]
CHECKS_PAGES: Final = (Page("/checks", "Backups and checks", _show_checks, "Service", guide="howto/backup"),)


def add_core_pages(console: Console, activity: Activity, broker: Broker) -> Callable[[SignInView], Awaitable[str]]:
    """Add the pages of the core; return what writes the page of the sign-in."""
    overview, mailboxes = Overview(console, activity), MailboxPages(console, broker)
    api = Page("/api", "Admin API", _show_api, "Service", guide="howto/operators")
    pages = (*overview.pages(), *mailboxes.pages(), *COPY_PAGES, *ALARM_PAGES, *TENANT_PAGES, *AUDIT_PAGES)
    pages = (*pages, *SETTINGS_PAGES, *CLEANUP_PAGES, *CHECKS_PAGES, *LOG_PAGES, api, *DOCUMENTATION_PAGES)
    console.add_pages("console", Path(__file__).with_name("templates"), *pages)

    async def write_sign_in(view: SignInView) -> str:
        return await console.render("console/sign_in.html", view=view)

    return write_sign_in


async def _show_api(_page_request: PageRequest) -> PageContent:
    """Show the admin API's document in Swagger UI, which sends requests as whoever is signed in."""
    return {"document": f"{PREFIX}/openapi.json"}
