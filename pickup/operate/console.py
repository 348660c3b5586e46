"""The console's pages of the DIDComm door: who is connected, what waits and moves, who may connect, and how many do."""

import asyncio
import base64
import time
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from mediator.console.console import HOME, Console
from mediator.console.pages import Page, Shown, Visit
from mediator.errors import NoSuchMailboxError
from mediator.mailboxes.address import DEFAULT_TENANT, NUMBERED
from mediator.operate.operations import Right
from pickup import qr
from pickup.live_sessions import MAX_SESSIONS
from pickup.operate.connections import LOOKED_AT, MAX_NUMBER, ORDERS, SHOWN_HOURS
from pickup.rules.connecting import MAX_INVITATIONS
from pickup.rules.granting import MAX_RULES
from pickup.rules.records import TRAFFIC, Verdict

GROUP: Final = "DIDComm"
PER_PAGE: Final = 50
_HOUR: Final = 3600


def add_pages(console: Console) -> None:
    """Add the pages."""
    console.add_pages(
        "didcomm",
        Path(__file__).with_name("templates"),
        Page("/connections", "Connections", _list_connections, GROUP),
        Page("/connections/{tenant}/{connection}", "Connection", _show_connection, template="connection.html"),
        Page("/invitations", "Invitations", _list_invitations, GROUP),
        Page(
            "/invitations/{tenant}/{id}",
            "Invitation",
            _show_invitation,
            template="invitation.html",
            right=Right.OPERATE,
        ),
        Page("/try", "Try it", _show_tries, GROUP),
        Page("/access", "Allow and deny", _show_lists, GROUP),
        Page("/sessions", "Live sessions", _list_sessions, GROUP),
        Page("/queues", "Queues", _show_queues, GROUP),
        Page("/statistics", "Statistics", _show_statistics, GROUP),
        Page("/statistics/hours.json", "", _send_hours),
    )


def _tenant(visit: Visit) -> dict[str, str]:
    return {"tenant": visit.text("tenant") or DEFAULT_TENANT}


async def _list_connections(visit: Visit) -> Shown:
    asked = {**_tenant(visit), "text": visit.text("text"), "order": visit.text("order", ORDERS[0])}
    skip = visit.number("skip", 0, 0, LOOKED_AT)
    found = await visit.run("connections-rank", **asked, skip=skip, limit=PER_PAGE)
    return {"asked": asked, "found": found, "skip": skip, "per_page": PER_PAGE, "looked_at": LOOKED_AT}


async def _show_connection(visit: Visit) -> Shown:
    place: dict[str, Any] = {**_tenant(visit), "connection": visit.number("connection", 0, 0, MAX_NUMBER)}
    shown = await visit.run("connections-show", **place)
    return {
        "place": place,
        "shown": shown,
        "mailbox": await _find_mailbox(visit, place["tenant"], shown["mailbox_number"]),
        "path": f"{HOME}/connections/{place['tenant']}/{place['connection']}",
    }


async def _find_mailbox(visit: Visit, tenant: str, number: int | None) -> Any:
    """Return the mailbox with its lanes; None without one, or when it was deleted meanwhile."""
    if number is None:
        return None
    try:
        return await visit.run("mailbox-show", tenant=tenant, mail_address=f"{NUMBERED}{number}")
    except NoSuchMailboxError:
        return None


async def _list_invitations(visit: Visit) -> Shown:
    asked, skip = _tenant(visit), visit.number("skip", 0, 0, MAX_INVITATIONS)
    found = await visit.run("invitations-list", **asked, skip=skip, limit=PER_PAGE)
    return {"asked": asked, "found": found, "skip": skip, "per_page": PER_PAGE}


async def _show_invitation(visit: Visit) -> Shown:
    place = {**_tenant(visit), "id": visit.text("id")}
    shown = await visit.run("invitations-show", **place)
    codes = {name: await _draw(shown[name]) for name in ("v1_short_url", "v1_url", "v2_short_url", "v2_url")}
    return {"place": place, "shown": shown, "codes": codes}


async def _show_tries(visit: Visit) -> Shown:
    return {"tries": (await visit.run("didcomm-tries"))["tries"]}


async def _show_lists(visit: Visit) -> Shown:
    asked = {"list": visit.text("list", Verdict.DENY), "text": visit.text("text")}
    skip = visit.number("skip", 0, 0, MAX_RULES)
    found = await visit.run("access-list", **asked, skip=skip, limit=PER_PAGE)
    return {"asked": asked, "found": found, "skip": skip, "per_page": PER_PAGE, "lists": list(Verdict)}


async def _list_sessions(visit: Visit) -> Shown:
    asked, skip = {"tenant": visit.text("tenant")}, visit.number("skip", 0, 0, MAX_SESSIONS)
    found = await visit.run("live-sessions", **asked, skip=skip, limit=PER_PAGE)
    return {"asked": asked, "found": found, "skip": skip, "per_page": PER_PAGE}


async def _show_queues(visit: Visit) -> Shown:
    asked, skip = _tenant(visit), visit.number("skip", 0, 0, LOOKED_AT)
    found = await visit.run("connections-rank", **asked, order="age", waiting=True, skip=skip, limit=PER_PAGE)
    outbound = await visit.run("didcomm-outbound", limit=PER_PAGE)
    return {
        "asked": asked,
        "found": found,
        "skip": skip,
        "per_page": PER_PAGE,
        "looked_at": LOOKED_AT,
        "outbound": outbound,
    }


async def _show_statistics(visit: Visit) -> Shown:
    asked = _tenant(visit)
    return {"asked": asked, "stats": await visit.run("didcomm-stats", **asked)}


async def _send_hours(visit: Visit) -> Shown:
    """Send the plots their numbers; hours in which nothing happened are 0."""
    counted = {hour["began_at"]: hour for hour in (await visit.run("didcomm-stats", **_tenant(visit)))["hours"]}
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
    image = await asyncio.to_thread(qr.drawn, url)
    return "" if image is None else f"data:image/png;base64,{base64.b64encode(image).decode()}"
