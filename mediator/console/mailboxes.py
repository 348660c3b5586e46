"""The pages of mailboxes: which there are, what is in one, why it is stuck, and its messages as they come."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from mediator.broker import Broker
from mediator.console.console import HOME, Console
from mediator.console.pages import Page, Shown, Visit
from mediator.console.streams import COMMENT, WRITE_SECONDS, event
from mediator.errors import MediatorError
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.operate.activity import LANE_WORDS
from mediator.operate.mailbox_operations import LOOKED_AT, ORDERS, find_address
from mediator.operate.operations import read_numbered
from mediator.operate.records import RankedMailbox

PER_PAGE: Final = 50
DEAD_SHOWN: Final = 100
SHOWN_BYTES: Final = 256 * 1024
"""Bytes of a payload that its page shows."""
FOLLOW_SECONDS: Final = 1.0
"""At least so long between two events of a page that follows a mailbox, however busy that is."""
_COLUMNS: Final = RankedMailbox.columns(
    "messages", "bytes", "oldest_at", "newest_at", "rate", "tenant", "kind", "expire_at"
)
_KINDS: Final = {Kind.MEDIATION: "wallet", Kind.LATEST: "latest"}
_ONE: Final = "/mailboxes/{tenant}/{mail_address}"


class MailboxPages:
    """The pages."""

    def __init__(self, console: Console, broker: Broker) -> None:
        self._console = console
        self._broker = broker

    def pages(self) -> tuple[Page, ...]:
        """Return the pages."""
        return (
            Page("/mailboxes", "Mailboxes", self._list, group="Mail"),
            Page(_ONE, "Mailbox", self._show, template="mailbox.html"),
            Page(f"{_ONE}/dead/{{group_name}}", "Dead messages", self._dead, template="dead.html"),
            # Its operation refuses whoever may read no payloads, and audits that.
            Page(f"{_ONE}/messages/{{msg_id}}", "Message", self._message, template="message.html"),
            Page(f"{_ONE}/live", "", self._follow),
        )

    async def _list(self, visit: Visit) -> Shown:
        order = visit.text("order", "depth")
        skip = visit.number("skip", 0, 0, LOOKED_AT)
        asked = {"tenant": visit.text("tenant"), "prefix": visit.text("prefix"), "order": order}
        found = await visit.run("mailbox-rank", **asked, skip=skip, limit=PER_PAGE)
        for each in found["mailboxes"]:
            each["kind"] = _KINDS.get(each["kind"], "queue" if each["retention"] == Retention.UNTIL_ACK else "log")
        shown = {"asked": asked, "found": found, "columns": _COLUMNS, "skip": skip}
        return {**shown, "per_page": PER_PAGE, "orders": ORDERS}

    async def _show(self, visit: Visit) -> Shown:
        place = _place(visit)
        mailbox = await visit.run("mailbox-show", **place)
        asked: dict[str, Any] = {}
        if lane := visit.text("lane"):
            asked["lane"] = lane
        if visit.text("before"):
            asked["before"] = visit.number("before", 0, 0, 2**53)
        listed = await visit.run("message-list", **place, **asked, limit=PER_PAGE)
        return {
            "place": place,
            "mailbox": mailbox,
            "found": (await visit.run("doctor", **place))["findings"],
            "listed": listed,
            "messages": listed["messages"],
            "delayed": await visit.run("delayed-list", **place, limit=PER_PAGE),
            "asked": asked,
            "lanes": LANE_WORDS,
            "path": _path(place),
        }

    async def _dead(self, visit: Visit) -> Shown:
        place = _place(visit)
        group = visit.text("group_name")
        found = await visit.run("dead-list", **place, group_name=group, limit=DEAD_SHOWN)
        for each in found["messages"]:
            if "payload_start" in each:
                each["payload_start"] = base64.b64decode(each["payload_start"]).decode(errors="replace")
        return {
            "place": place,
            "mail_address": (await visit.run("mailbox-show", **place))["mail_address"],
            "group": group,
            "messages": found["messages"][::-1],
            "at_most": DEAD_SHOWN,
            "path": _path(place),
        }

    async def _message(self, visit: Visit) -> Shown:
        place = _place(visit)
        message = await visit.run("message-show", **place, msg_id=visit.number("msg_id", 0, 0, 2**53))
        payload = base64.b64decode(message["payload"])
        beginning = payload[:SHOWN_BYTES]
        try:
            shown, binary = beginning.decode(errors="strict" if len(payload) <= SHOWN_BYTES else "ignore"), False
        except UnicodeDecodeError:
            shown, binary = beginning.hex(" ", -4), True
        return {
            "place": place,
            "mail_address": (await visit.run("mailbox-show", **place))["mail_address"],
            "message": message,
            "payload": shown,
            "binary": binary,
            "complete": len(payload) <= SHOWN_BYTES,
            "path": _path(place),
        }

    async def _follow(self, visit: Visit) -> Shown:
        place = _place(visit)
        await visit.run("mailbox-show", **place)
        number = read_numbered(place["mail_address"])
        address = place["mail_address"] if number is None else await find_address(self._broker, place["tenant"], number)
        # A browser that connects again says by itself what it has seen; before, the page does.
        seen = visit.request.headers.get("Last-Event-ID") or visit.text("after")
        after = int(seen) if seen.isascii() and seen.isdigit() and len(seen) < 16 else None
        events = self._new_messages(visit, place, address or "", after)
        return await self._console.streams.serve(visit.request, visit.actor, events)

    async def _new_messages(
        self, visit: Visit, place: dict[str, str], address: str, after: int | None
    ) -> AsyncIterator[bytes]:
        """Yield the rows of messages as they come, a second's worth at once and the newest of many."""
        with self._broker.watching((place["tenant"], address)) as woken:
            while True:
                woken.clear()
                try:
                    listed = await visit.run("message-list", **place, after=after, limit=PER_PAGE)
                except MediatorError:
                    # The mailbox is gone.
                    return
                if fresh := listed["messages"]:
                    after = fresh[0]["msg_id"]
                    shown = {"messages": fresh, "visit": visit, "place": place, "path": _path(place)}
                    yield event("messages", await self._console.render("console/messages.html", **shown), after)
                else:
                    yield COMMENT
                await asyncio.sleep(FOLLOW_SECONDS)
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), WRITE_SECONDS)


def _place(visit: Visit) -> dict[str, str]:
    return {"tenant": visit.text("tenant"), "mail_address": visit.text("mail_address")}


def _path(place: dict[str, str]) -> str:
    """Return the path of a mailbox's page; tenants, addresses and numbers need no escapes."""
    return f"{HOME}/mailboxes/{place['tenant']}/{place['mail_address']}"
