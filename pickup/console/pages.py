"""The console's pages of the DIDComm door: connections, invitations, and a button that tries it."""

import asyncio
import base64
from pathlib import Path
from typing import Any, Final

from mediator.console.console import HOME, Console
from mediator.console.pages import Page, Shown, Visit
from mediator.errors import NoSuchMailboxError
from mediator.mailboxes.address import DEFAULT_TENANT
from pickup import qr
from pickup.connection_operations import LOOKED_AT, MAX_NUMBER, ORDERS
from pickup.mediation.invitations import MAX_INVITATIONS

GROUP: Final = "DIDComm"
PER_PAGE: Final = 50


def add_pages(console: Console) -> None:
    """Add the pages."""
    console.add_pages(
        "didcomm",
        Path(__file__).with_name("templates"),
        Page("/connections", "Connections", _list_connections, GROUP),
        Page("/connections/{tenant}/{connection}", "Connection", _show_connection, template="connection.html"),
        Page("/invitations", "Invitations", _list_invitations, GROUP),
        Page("/invitations/{tenant}/{id}", "Invitation", _show_invitation, template="invitation.html"),
        Page("/try", "Try it", _show_tries, GROUP),
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
        "mailbox": await _find_mailbox(visit, place["tenant"], shown["mail_address"]),
        "path": f"{HOME}/connections/{place['tenant']}/{place['connection']}",
    }


async def _find_mailbox(visit: Visit, tenant: str, mail_address: str | None) -> Any:
    """Return the mailbox with its lanes; None without one, or when it was deleted meanwhile."""
    if mail_address is None:
        return None
    try:
        return await visit.run("mailbox-show", tenant=tenant, mail_address=mail_address)
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


async def _draw(url: str) -> str:
    """Return the QR code of a URL as the URL of an image; empty for one that is too long."""
    image = await asyncio.to_thread(qr.drawn, url)
    return "" if image is None else f"data:image/png;base64,{base64.b64encode(image).decode()}"
