"""The console of a real service in a real browser: a store with something of everything, and what is looked at."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mediator.client import Client
from mediator.operate.control import send_command
from pickup.client import Holder, Sender
from tests.harness.browser import Tab
from tests.harness.didcomm_service import missing, note, note_v2
from tests.harness.live import Live
from tests.harness.service import Service
from tests.harness.waiting import until

DESKTOP, PHONE = 1280, 375
"""Widths in CSS pixels."""
BOX = "/console/mailboxes/default/orders.eu"
PAGES = {
    "overview": "/console",
    "pipeline": "/console/pipeline",
    "run": "/console/pipeline/runs/2",
    "checks": "/console/checks",
    "mailboxes": "/console/mailboxes",
    "mailbox": BOX,
    "clients": "/console/clients",
    "dead": f"{BOX}/dead/workers",
    "leases": f"{BOX}/leases/workers",
    "message": f"{BOX}/messages/0",
    "dead message": f"{BOX}/messages/3?dead_for=workers",
    "history": "/console/history",
    "cleanup": "/console/cleanup",
    "connections": "/console/connections",
    "connection": "/console/connections/default/1",
    "access": "/console/access",
    "sessions": "/console/sessions",
    "queues": "/console/queues",
    "statistics": "/console/statistics",
    "tenants": "/console/tenants",
    "tenant": "/console/tenants/acme",
    "invitations": "/console/invitations",
    "alarms": "/console/alarms",
    "audit": "/console/audit",
    "log": "/console/log",
    "try": "/console/try",
    "settings": "/console/settings",
    "documentation": "/console/docs/howto/backup",
    "agents": "/console/agents?request=Cook+soup+for+forty+guests.+Warn+me+of+floods.",
    "agent": "/console/agents/default/own.soup.scale",
    "nothing": f"{BOX}0",
}
"""Every page, by a name for its picture; `nothing` is one that is not there, and `wallets` adds an invitation's."""
CATALOG = Path(__file__).parents[1] / "data" / "catalog.jsonl"
TOKENS = {"ada": ("token-of-the-administrator", "admin"), "ben": ("token-of-the-reader", "read")}
OPERATORS = json.dumps([{"name": name, "token": token, "roles": [role]} for name, (token, role) in TOKENS.items()])
SETTINGS = {"MEDIATOR_OPERATORS__TOKENS": OPERATORS}
AXE = """axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations.map(
  each => `${each.impact} ${each.id}: ${each.nodes.map(node => node.html.slice(0, 200)).join(" ")}`))"""
WIDE_TABLES = f"""innerWidth < {DESKTOP} ? [] : [...document.querySelectorAll(".scroll")]
  .filter(each => each.scrollWidth > each.clientWidth)
  .map(each => `a table scrolls: ${{each.getAttribute("aria-label")}}`)"""
FOCUSABLE = """[...document.querySelectorAll(
  "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']")]
  .filter(each => each.checkVisibility() && each.getClientRects().length).length"""
FOCUSED = """(() => {
  const each = document.activeElement;
  if (each === document.body) return null;
  const box = each.getBoundingClientRect();
  const style = getComputedStyle(each);
  window.met ??= new Set();
  const first = !met.has(each);
  met.add(each);
  return {
    first,
    outlined: style.outlineStyle !== "none",
    seen: box.bottom > 0 && box.top < innerHeight,
    html: each.outerHTML.slice(0, 200),
  };
})()"""


def settings(service: Service) -> dict[str, str]:
    """Return what the environment of the service says."""
    return SETTINGS | {"MEDIATOR_BACKUP_DIR": str(service.data_dir.with_name("backups"))}


async def fill(service: Service) -> None:
    """Send mail, let workers fail at some of it, delay some, and register agents."""
    async with Client(service.nats_url) as client:
        for address in ("orders.eu", "orders.us", "billing.invoices", "agents.inbox", "logs.audit"):
            await client.create(address, retention="keep" if address.startswith("logs") else "until_ack")
            for number in range(len(address) * 3):
                await client.mailbox(address).send(
                    f'{{"order": {number}}}'.encode(),
                    priority=("normal", "urgent", "normal", "critical")[number % 4],
                    tags=["vip"] if number % 5 == 0 else [],
                )
        orders = client.mailbox("orders.eu")
        for _ in range(3):
            await orders.send(b"later", delay=3600)
            await orders.send(b"soon over", ttl=1)
        # The first are delivered once at most and dead a second later; the others stay with a worker.
        for lease in (1.0, 60.0):
            await orders.fetch(group="workers", limit=4, lease=lease, max_deliver=1)
        await orders.fetch(group="report", limit=5)
        for card in map(json.loads, CATALOG.read_text(encoding="utf-8").splitlines()):
            await client.register({**card, "mailbox": card["mailbox"].replace("-", ".")})
        await client.create("own.soup.scale")
        await client.report("own.soup.scale", {"load": 0.4, "waiting": 2})
        hidden = await client.create()
        await hidden.register({"name": "Flood Watch", "description": "Warns of floods and storms.", "ttl": 3600})
    await until(lambda: embedded(service), what="the agents are found by meaning")
    await until(lambda: expired(service), what="short-lived mail is over, so that no page loses a row by itself")
    quotas = {"mailboxes": 50, "messages": 1000, "bytes": 1 << 20, "rate": 2000}
    await _told(service, "tenant-add", tenant="acme", users=["ann", "bob"], tokens=["shop"], quotas=quotas)
    password = (await _told(service, "tenant-rotate", tenant="acme", users=["ann"], grace_ms=3_600_000))["passwords"]
    await _told(service, "tenant-add", tenant="initech", users=["peter"], quotas={"sockets": 20})
    async with Client(service.nats_url, user="ann", password=password["ann"]) as client:
        for address, count in (("invoices", 700), ("refunds", 200)):
            await client.create(address)
            await client.mailbox(address).send_many([b"x" * 1100] * count)


async def _told(service: Service, operation: str, **fields: Any) -> dict[str, Any]:
    answer = await send_command(service.data_dir, operation, **fields)
    assert answer["error"] == "", answer
    return answer


async def embedded(service: Service) -> bool:
    """Return whether all agents have vectors, or none will have some."""
    found = await send_command(service.data_dir, "registry")
    return found["model"] is None or bool(found["embedded"] == found["agents"] > 0)


async def expired(service: Service) -> bool:
    """Return whether the mailbox holds no message any more that expires."""
    listed = await _told(service, "message-list", tenant="default", mail_address="orders.eu", limit=100)
    return all(message["expire_at"] is None for message in listed["messages"])


@asynccontextmanager
async def wallets(service: Service) -> AsyncIterator[None]:
    """Connect three wallets, whose mail waits, and one more that is live inside this block."""
    async with AsyncExitStack() as stack:
        sender = await stack.enter_async_context(Sender())
        for number, label in enumerate(("Ada's phone", "Ben's laptop", "Cloud agent", "Dora, live"), 1):
            made = await send_command(service.data_dir, "invite", label="Our mediator", uses=2 * number)
            url = made["v2_url"] if number == 3 else made["v1_url"]
            holder = await stack.enter_async_context(await Holder.connect(url, label=label))
            grant, key = await holder.mediate(), await holder.add_key()
            if number == 4:
                await stack.enter_async_context(Live.of(holder))
            for text in map(str, range(number)):
                if number == 3:
                    await sender.send_v2(key, grant.routing[0], grant.endpoint, note_v2(text))
                else:
                    await sender.send_v1(key, grant.routing, grant.endpoint, note(text))
        for version in ("v1", "v2"):
            await send_command(service.data_dir, "didcomm-try", didcomm=version)
        for name, why in (("203.0.113.0/24", "floods"), (key, "ticket 17")):
            await send_command(service.data_dir, "access-add", list="deny", name=name, note=why)
        PAGES["invitation"] = f"/console/invitations/default/{made['id']}"
        yield


async def record_runs(service: Service) -> None:
    """Leave a run of the pipeline that succeeded and one that failed, as its commands do, and a report."""
    for name, outcome in (("ingest", "succeeded"), ("report", "failed")):
        run = (await _told(service, "run-begin", name=name, arguments=["--lake", "/srv/lake"], process="x"))["run"]
        numbers = {"events": 1200, "files": 3}
        error = "" if outcome == "succeeded" else "no Java was found"
        await _told(service, "run-end", run=run, outcome=outcome, numbers=numbers, error_text=error)
    lake = service.data_dir / "lake"
    lake.mkdir()
    (lake / "report.html").write_text("<!DOCTYPE html><html lang=en><title>Usage</title><h1>Usage</h1></html>")


async def run_tasks(service: Service) -> None:
    """Have the database backed up and checked, and wait until that is done; leave runs of the pipeline."""
    await record_runs(service)
    for operation, state in (("backup", "backup-list"), ("verify", "verify-state")):
        await _told(service, operation)
        await until(lambda state=state: _ended(service, state), what=f"{operation} is done", within=60)


async def _ended(service: Service, operation: str) -> bool:
    return bool((await _told(service, operation))["task"]["state"] == "succeeded")


async def work(service: Service, seconds: float) -> None:
    """Send, fetch and acknowledge for a while, more and less in turn."""
    end = time.monotonic() + seconds
    async with Client(service.nats_url) as client:
        box = client.mailbox("orders.us")
        while (left := end - time.monotonic()) > 0:
            for lane in ("normal", "normal", "urgent", "critical")[: 1 + int(left / 7) % 4]:
                await box.send(b"order", priority=lane)
            for message in await box.fetch(group="shop", limit=3, wait=0.05):
                await box.ack(message, group="shop")
            await asyncio.sleep(0.02)


async def sign_in(tab: Tab, origin: str, name: str = "ada") -> None:
    """Sign in with a token, as a person does."""
    await tab.show(f"{origin}/console")
    await tab.evaluate(f"document.querySelector('#token').value = {TOKENS[name][0]!r}")
    await tab.evaluate("document.querySelector('#token').form.requestSubmit()")
    await until(lambda: at(tab, "/console"), what=f"{name} has signed in")


async def at(tab: Tab, path: str) -> bool:
    """Return whether the tab shows a page of this path, completely."""
    return bool(await tab.evaluate(f"document.readyState === 'complete' && location.pathname === {path!r}"))


async def resize(tab: Tab, width: int, scheme: str = "light") -> None:
    """Make the window as wide as a phone or a desktop, in light or in dark."""
    phone = width < 500
    await tab.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=phone)
    await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


async def examine(tab: Tab, url: str) -> list[str]:
    """Show a page, and return what is wrong with it."""
    await tab.show(url)
    return await find_faults(tab)


async def find_faults(tab: Tab) -> list[str]:
    """Return what is wrong with the page that is shown: what axe finds, and what is wider than the window.

    On a phone tables scroll sideways.
    """
    if not await tab.evaluate("typeof axe !== 'undefined'"):
        await tab.evaluate(f"{_axe()};0")
    found: list[str] = await tab.evaluate(AXE)
    if await tab.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
        found.append("wider than the window")
    found += await tab.evaluate(WIDE_TABLES)
    return found


async def walk(tab: Tab) -> list[str]:
    """Press Tab until the focus is back at the start; return what cannot be reached, or not be seen with the focus."""
    wanted = await tab.evaluate(FOCUSABLE)
    await tab.evaluate("window.met = new Set(); document.activeElement.blur(); document.body.focus()")
    wrong: list[str] = []
    met = 0
    # The field of a time has stops of its own inside.
    for _ in range(2 * wanted + 20):
        if met == wanted:
            break
        await tab.press("Tab", 9)
        focused: dict[str, Any] | None = await tab.evaluate(FOCUSED)
        if focused is None or not focused["first"]:
            continue
        met += 1
        if not (focused["outlined"] and focused["seen"]):
            wrong.append(f"not seen with the focus: {focused['html']}")
    if met < wanted:
        wrong.append(f"{met} of {wanted} were reached")
    return wrong


def _axe() -> str:
    # Its package wants another browser's driver, which is not installed: the script alone is used.
    package = find_spec("axe_playwright_python")
    if package is None or not package.submodule_search_locations:
        missing("needs axe-playwright-python: make test-slow installs it")
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0], "axe.min.js").read_text()
