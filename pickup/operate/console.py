"""The console's pages of the DIDComm door: who is connected, what waits and moves, who may connect, and how many do."""

import asyncio
import base64
import time
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from mediator.console.console import Console
from mediator.console.pages import Page, PageContent, PageRequest
from mediator.console.tables import MAX_ROWS, next_step
from mediator.errors import NoSuchMailboxError
from mediator.mailboxes.address import DEFAULT_TENANT, NUMBERED
from mediator.operate.operations import Answer, Right
from mediator.operate.records import Column, Kind, LaneView
from mediator.operate.units import format_count
from pickup import qr
from pickup.operate.connections import LOOKED_AT, MAX_LISTED, MAX_NUMBER, SHOWN_HOURS
from pickup.operate.records import (
    AccessRuleView,
    ListedInvitation,
    LiveSessionView,
    RankedConnection,
    RouteView,
    TrafficOfHour,
)
from pickup.rules.records import TRAFFIC, Verdict

GROUP: Final = "Wallets"
_ORDERS: Final = {
    "-created_at": "newest",
    "-messages": "depth",
    "-bytes": "size",
    "oldest_at": "age",
    "seen_at": "idle",
}
_MESSAGES: Final = Column("messages", field="messages", kind=Kind.NUMBER)
_DELIVERY: Final = Column("delivery", field="delivery")
_CONNECTIONS: Final = [
    *RankedConnection.columns("connection", "label", "didcomm", "messages", "bytes", "oldest_at"),
    _DELIVERY,
    *RankedConnection.columns("keys", "seen_at", "client", "pickup", "created_at"),
]
_QUEUES: Final = [
    *RankedConnection.columns("connection", "label", "oldest_at", "messages", "bytes"),
    _DELIVERY,
    *RankedConnection.columns("seen_at"),
]
_TRAFFIC: Final = [
    Column("event", field="event"),
    _MESSAGES,
    Column("size", field="bytes", kind=Kind.SIZE),
]
_SHARES: Final = {
    "seen": "Last seen within",
    "created": "Created within",
    "queues": "Waiting messages",
    "didcomm": "DIDComm version",
    "pickup": "Pickup version",
    "transport": "Last transport",
}
_STEPS: Final = [
    Column("step", field="step"),
    Column("state", field="state", kind=Kind.STATE),
    Column("result", field="what", kind=Kind.CODE),
    Column("took", field="seconds", kind=Kind.SECONDS),
]
_SERVERS: Final = [Column("server", field="server", kind=Kind.CODE), _MESSAGES]
_HOUR: Final = 3600


def add_pages(console: Console) -> None:
    """Add the pages."""
    console.add_pages(
        "didcomm",
        Path(__file__).with_name("templates"),
        Page("/connections", "Connections", _list_connections, GROUP, guide=_GUIDE),
        Page(
            "/connections/{tenant}/{connection}",
            "Connection",
            _show_connection,
            template="connection.html",
            guide=_GUIDE,
        ),
        Page("/invitations", "Invitations", _list_invitations, GROUP, guide=_GUIDE),
        Page(
            "/invitations/{tenant}/{id}",
            "Invitation",
            _show_invitation,
            template="invitation.html",
            right=Right.OPERATE,
        ),
        Page("/try", "Try it", _show_tries, GROUP, guide=_GUIDE),
        Page("/access", "Allow and deny", _show_lists, GROUP, guide=_GUIDE),
        Page("/sessions", "Live sessions", _list_sessions, GROUP, guide=_GUIDE),
        Page("/queues", "Queues", _show_queues, GROUP, guide=_GUIDE),
        Page("/statistics", "Statistics", _show_statistics, GROUP, guide=_GUIDE),
        Page("/statistics/hours.json", "", _send_hours),
    )


def _tenant(page_request: PageRequest) -> dict[str, str]:
    return {"tenant": page_request.text("tenant") or DEFAULT_TENANT}


async def _list_connections(page_request: PageRequest) -> PageContent:
    asked = {**_tenant(page_request), "text": page_request.text("text")}
    request = page_request.table_request("connections", _ORDERS, MAX_LISTED)
    found = await page_request.run("connections-rank", **asked, order=request.order, **request.window)
    empty = (
        "No connection matches." if asked["text"] else next_step("No wallet has connected yet. Invite one:", _INVITE)
    )
    rows = [_with_delivery(asked["tenant"], each) for each in found["connections"]]
    caption, total = f"Connections of tenant {asked['tenant']}", found["found"]
    table = page_request.table(request, caption, _CONNECTIONS, rows, empty=empty, total=total)
    return {"asked": asked, "found": found, "connections": table, "looked_at": LOOKED_AT}


def _with_delivery(tenant: str, connection: Answer) -> Answer:
    """Return a connection as a row, with how mail gets to the wallet."""
    if connection["mail_address"] is None:
        delivery = "no mediation"
    else:
        delivery = "live" if connection["live"] else "its endpoint" if connection["relayed"] else "pickup"
    return {**connection, "tenant": tenant, "delivery": delivery}


async def _show_connection(page_request: PageRequest) -> PageContent:
    place: dict[str, Any] = {**_tenant(page_request), "connection": page_request.number("connection", 0, 0, MAX_NUMBER)}
    shown = await page_request.run("connections-show", **place)
    mailbox = await _find_mailbox(page_request, place["tenant"], shown["mailbox_number"])
    traffic = [
        {"event": name, "messages": shown[name], "bytes": shown[f"{name}_bytes"]}
        for name in ("queued", "delivered", "acknowledged")
    ]
    keys, listed = shown["keys"], len(shown["routes"])
    caption = format_count(keys, "key") + (f", the first {listed:,} of them" if keys > listed else "")
    return {
        "place": place,
        "shown": _with_delivery(place["tenant"], shown),
        "mailbox": mailbox,
        "lanes": mailbox
        and page_request.table(
            "lanes",
            f"The oldest {format_count(mailbox['counted'], 'message')} by lane",
            LaneView.columns("lane", "messages", "oldest_at"),
            mailbox["lanes"],
        ),
        "traffic": page_request.table("traffic", "Since it connected", _TRAFFIC, traffic),
        "routes": page_request.table(
            "routes", caption, RouteView.columns("key", "created_at", "used_at"), shown["routes"]
        ),
    }


async def _find_mailbox(page_request: PageRequest, tenant: str, number: int | None) -> Any:
    """Return the mailbox with its lanes; None without one, or when it was deleted meanwhile."""
    if number is None:
        return None
    try:
        return await page_request.run("mailbox-show", tenant=tenant, mail_address=f"{NUMBERED}{number}")
    except NoSuchMailboxError:
        return None


async def _list_invitations(page_request: PageRequest) -> PageContent:
    asked, request = _tenant(page_request), page_request.table_request("invitations")
    found = await page_request.run("invitations-list", **asked, **request.window)
    rows = [{**each, "state": "open" if each["open"] else "closed"} for each in found["invitations"]]
    caption = f"Invitations of tenant {asked['tenant']}, newest first"
    table = page_request.table(
        request,
        caption,
        _INVITATIONS,
        rows,
        empty=next_step("No invitations yet. Make one above, or:", _INVITE),
        total=found["total"],
    )
    return {"asked": asked, "invitations": table}


_GUIDE: Final = "howto/wallet-operators"
_INVITE: Final = "mediator invite"
_INVITATIONS: Final = [
    *ListedInvitation.columns("id", "label"),
    Column("state", field="state", kind=Kind.STATE),
    *ListedInvitation.columns("uses", "max_uses", "created_at", "expire_at"),
]


async def _show_invitation(page_request: PageRequest) -> PageContent:
    place = {**_tenant(page_request), "id": page_request.text("id")}
    shown = await page_request.run("invitations-show", **place)
    codes = {name: await _draw(shown[name]) for name in ("v1_short_url", "v1_url", "v2_short_url", "v2_url")}
    return {"place": place, "shown": shown, "codes": codes}


async def _show_tries(page_request: PageRequest) -> PageContent:
    tries = (await page_request.run("didcomm-tries"))["tries"]
    tables = [
        page_request.table(
            f"steps-{number}",
            f"Steps as tenant {each['tenant']}",
            _STEPS,
            [
                step | {"state": "done" if step["ok"] else "failed", "seconds": step["ms"] / 1000}
                for step in each["steps"]
            ],
        )
        for number, each in enumerate(tries, 1)
    ]
    return {"tries": tries, "tables": tables}


async def _show_lists(page_request: PageRequest) -> PageContent:
    asked, request = (
        {"list": page_request.text("list", Verdict.DENY), "text": page_request.text("text")},
        page_request.table_request("names"),
    )
    found = await page_request.run("access-list", **asked, **request.window)
    caption, columns = f"The {asked['list']} list, oldest first", AccessRuleView.columns("name", "created_at", "note")
    table = page_request.table(request, caption, columns, found["names"], empty="No entries.", total=found["total"])
    return {"asked": asked, "names": table, "lists": list(Verdict)}


async def _list_sessions(page_request: PageRequest) -> PageContent:
    asked, request = (
        {"tenant": page_request.text("tenant")},
        page_request.table_request("sessions", max_rows=MAX_LISTED),
    )
    found = await page_request.run("live-sessions", **asked, **request.window)
    columns = LiveSessionView.columns("connection", "label", "tenant", "since", "mode", "pushed", "client")
    rows, empty = found["sessions"], "No live sessions."
    table = page_request.table(request, "Live sessions, newest first", columns, rows, empty=empty, total=found["total"])
    return {"asked": asked, "sessions": table}


async def _show_queues(page_request: PageRequest) -> PageContent:
    asked, request = (
        _tenant(page_request),
        page_request.table_request("queues", {"oldest_at": "age", **_ORDERS}, MAX_LISTED),
    )
    found = await page_request.run("connections-rank", **asked, order=request.order, waiting=True, **request.window)
    outbound = await page_request.run("didcomm-outbound", limit=MAX_ROWS)
    rows = [_with_delivery(asked["tenant"], each) for each in found["connections"]]
    caption, total = f"Waiting for wallets of tenant {asked['tenant']}", found["found"]
    return {
        "asked": asked,
        "found": found,
        "queues": page_request.table(request, caption, _QUEUES, rows, empty="No mail is waiting.", total=total),
        "looked_at": LOOKED_AT,
        "outbound": outbound,
        "servers": page_request.table("servers", "Answers waiting for each server", _SERVERS, outbound["servers"]),
    }


async def _show_statistics(page_request: PageRequest) -> PageContent:
    asked = _tenant(page_request)
    stats = await page_request.run("didcomm-stats", **asked)
    shares = [
        page_request.table(f"by-{name}", title, _columns(title), _shares(stats[name], stats["counted"]))
        for name, title in _SHARES.items()
    ]
    caption = "Of all tenants and instances, without hours in which nothing happened"
    return {
        "asked": asked,
        "stats": stats,
        "shares": shares,
        "hours": page_request.table(
            "hours", caption, _HOURS, stats["hours"][::-1], empty="No mail in the last 24 hours."
        ),
    }


_HOURS: Final = TrafficOfHour.columns("began_at", *TRAFFIC)


def _columns(title: str) -> list[Column]:
    return [
        Column(title, field="value"),
        Column("connections", field="connections", kind=Kind.NUMBER),
        Column("share in %", field="share", kind=Kind.NUMBER),
    ]


def _shares(counts: dict[str, int], total: int) -> list[Answer]:
    return [
        {"value": value, "connections": count, "share": 100 * count / total if total else 0}
        for value, count in counts.items()
    ]


async def _send_hours(page_request: PageRequest) -> PageContent:
    """Send the plots their numbers; hours in which nothing happened are 0."""
    counted = {
        hour["began_at"]: hour for hour in (await page_request.run("didcomm-stats", **_tenant(page_request)))["hours"]
    }
    now = int(time.time())
    began = [now - now % _HOUR - _HOUR * ago for ago in reversed(range(SHOWN_HOURS))]
    # The last word of a column's name is what the plot calls it.
    columns = {
        f"size.{name.removesuffix('_bytes')}" if name.endswith("_bytes") else name: [
            counted.get(at, {}).get(name, 0) for at in began
        ]
        for name in TRAFFIC
    }
    return web.json_response({"kept": SHOWN_HOURS, "columns": {"at": began, **columns}})


async def _draw(url: str) -> str:
    """Return the QR code of a URL as the URL of an image; empty for one that is too long."""
    image = await asyncio.to_thread(qr.cached_png, url)
    return "" if image is None else f"data:image/png;base64,{base64.b64encode(image).decode()}"
