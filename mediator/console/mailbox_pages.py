"""The pages of mailboxes: all of them, one with its groups, messages, leases and dead messages, and one message."""

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

from markupsafe import Markup

from mediator.broker import Broker
from mediator.console.console import Console
from mediator.console.pages import Page, PageContent, PageRequest
from mediator.console.streams import COMMENT, WRITE_SECONDS, event
from mediator.console.tables import HOME, MAX_ROWS, PER_PAGE, Table, next_step
from mediator.errors import MediatorError
from mediator.mailboxes.mailbox import Kind as MailboxKind
from mediator.mailboxes.mailbox import Retention
from mediator.operate.activity import LANE_WORDS
from mediator.operate.mailbox_operations import find_address
from mediator.operate.operations import Answer, read_numbered
from mediator.operate.records import (
    ClientView,
    DeadMessage,
    DelayedMessage,
    FrequentName,
    GroupView,
    LaneView,
    LeaseView,
    MailboxClientView,
    MessageSummary,
    RankedMailbox,
)
from mediator.operate.units import format_count

DEAD_SHOWN: Final = 100
SHOWN_BYTES: Final = 256 * 1024
"""Bytes of a payload that its page shows."""
FOLLOW_SECONDS: Final = 1.0
"""At least so long between two events of a page that follows a mailbox, however busy that is."""
_KINDS: Final = {MailboxKind.MEDIATION: "wallet", MailboxKind.LATEST: "latest"}
_NO_MAILBOXES: Final = next_step("No mailboxes yet. Create one below, or:", "mediator mailbox create NAME")
RETENTIONS: Final = {
    Retention.KEEP.value: "keep: until it expires or is deleted",
    Retention.UNTIL_ACK.value: "until_ack: a work queue, the first ACK removes a message",
}
_ORDERS: Final = {
    "-messages": "depth",
    "-bytes": "size",
    "oldest_at": "age",
    "-rate": "rate",
    "mail_address": "address",
}
_MAILBOXES: Final = RankedMailbox.columns(
    "mail_address",
    "messages",
    "ready",
    "leased",
    "delayed",
    "dead",
    "rate",
    "rate_out",
    "oldest_at",
    "bytes",
    "tenant",
    "kind",
    "expire_at",
)
_GROUPS: Final = GroupView.columns(
    "name", "waiting", "open", "leased", "delayed", "due", "dead", "next_lease_end", "max_deliver"
)
_MESSAGES: Final = MessageSummary.columns("msg_id", "lane", "created_at", "size", "key", "tags", "expire_at")
_DEAD: Final = DeadMessage.columns("msg_id", "lane", "created_at", "deliveries", "died_at", "size", "payload_start")
_LEASES: Final = LeaseView.columns("msg_id", "lane", "until", "deliveries", "delayed")
_CLIENTS: Final = ClientView.columns(
    "client", "name", "tenant", "user", "address", "subscriptions", "state", "unread_bytes", "since"
)
_OF_MAILBOX: Final = MailboxClientView.columns("action", "name", "user", "client", "queue", "requests", "last_at")
_NO_GATEWAY: Final = Markup(
    "Clients connect to nats-server itself: ask it with <code>nats server report connections</code>."
)
_FREQUENT: Final = FrequentName.columns("name", "messages")
LANES: Final = LaneView.columns("lane", "messages", "oldest_at")
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
            Page("/clients", "Clients", self._clients, group="Mail", guide="gateway"),
            Page(_ONE, "Mailbox", self._show, template="mailbox.html"),
            Page(
                f"{_ONE}/dead/{{group_name}}",
                "Dead messages",
                self._dead,
                template="dead.html",
                guide="howto/task-queue",
            ),
            Page(
                f"{_ONE}/leases/{{group_name}}",
                "Leases",
                self._leases,
                template="leases.html",
                guide="explanation/leases",
            ),
            # Its operation refuses whoever may read no payloads, and audits that.
            Page(f"{_ONE}/messages/{{msg_id}}", "Message", self._message, template="message.html"),
            Page(f"{_ONE}/live", "", self._follow),
        )

    async def _list(self, page_request: PageRequest) -> PageContent:
        request = page_request.table_request("mailboxes", _ORDERS)
        asked = {"tenant": page_request.text("tenant"), "prefix": page_request.text("prefix")}
        found = await page_request.run("mailbox-rank", **asked, order=request.order, **request.window)
        for each in found["mailboxes"]:
            each["kind"] = _KINDS.get(each["kind"], each["retention"])
        empty = "No mailbox matches." if any(asked.values()) else _NO_MAILBOXES
        total = found["looked_at"]
        table = page_request.table(request, "Mailboxes", _MAILBOXES, found["mailboxes"], empty=empty, total=total)
        return {
            "asked": asked,
            "mailboxes": table,
            "looked_at": total,
            "complete": found["complete"],
            "retentions": RETENTIONS,
        }

    async def _clients(self, page_request: PageRequest) -> PageContent:
        asked, request = {"tenant": page_request.text("tenant")}, page_request.table_request("clients")
        found = await page_request.run("client-list", **asked, **request.window)
        empty = "No NATS client is connected to this instance." if found["gateway"] else _NO_GATEWAY
        table = page_request.table(
            request, "Clients, the latest first", _CLIENTS, found["clients"], empty=empty, total=found["total"]
        )
        return {"asked": asked, "clients": table}

    async def _show(self, page_request: PageRequest) -> PageContent:
        place = _place(page_request)
        mailbox = await page_request.run("mailbox-show", **place)
        request = page_request.table_request("messages")
        asked: dict[str, Any] = {}
        if lane := page_request.text("lane"):
            asked["lane"] = lane
        if page_request.text("before"):
            asked["before"] = page_request.number("before", 0, 0, 2**53)
        listed = await page_request.run("message-list", **place, **asked, limit=request.limit)
        delayed = await page_request.run("delayed-list", **place, limit=MAX_ROWS)
        shown = mailbox["group_count"]
        groups = f"Consumer groups: {shown}" + (", the first of them" if shown > len(mailbox["groups"]) else "")
        return {
            "place": place,
            "mailbox": mailbox,
            "found": (await page_request.run("doctor", **place))["findings"],
            "groups": page_request.table("groups", groups, _GROUPS, [place | each for each in mailbox["groups"]]),
            "clients": page_request.table(
                "clients",
                "NATS clients of this instance in the last ten minutes",
                _OF_MAILBOX,
                (await page_request.run("mailbox-clients", **place))["clients"],
                empty="No NATS client of this instance sent to it or fetched from it in the last ten minutes.",
            ),
            "lanes_table": page_request.table("lanes", _oldest(mailbox), LANES, mailbox["lanes"]),
            "listed": listed,
            "messages": self._messages(page_request, place, listed, {"before": listed["next"]}),
            "frequent": [
                page_request.table(f"frequent-{name}", name.capitalize(), _FREQUENT, listed[name])
                for name in ("keys", "tags", "recipients")
                if listed.get(name)
            ],
            "delayed": page_request.table(
                "delayed",
                "Not yet visible, the next due first" + ("" if delayed["complete"] else "; there are more"),
                DelayedMessage.columns("due_at", "lane", "size", "sent_at"),
                delayed["messages"],
            ),
            "asked": asked,
            "is_live": not asked and not request.is_whole and not request.skip,
            "lanes": LANE_WORDS,
            "path": _path(place),
        }

    def _messages(
        self, page_request: PageRequest, place: dict[str, str], listed: Answer, older: Mapping[str, Any]
    ) -> Table:
        rows = [place | each for each in listed["messages"]]
        return page_request.table("messages", "Messages, newest first", _MESSAGES, rows, older=older)

    async def _dead(self, page_request: PageRequest) -> PageContent:
        place = _place(page_request)
        group = page_request.text("group_name")
        found = await page_request.run("dead-list", **place, group_name=group, limit=DEAD_SHOWN)
        for each in found["messages"]:
            each.update(place, group=group)
            if "payload_start" in each:
                each["payload_start"] = base64.b64decode(each["payload_start"]).decode(errors="replace")
        caption = f"Dead messages, newest first (at most {DEAD_SHOWN})"
        return {
            "place": place,
            "mail_address": (await page_request.run("mailbox-show", **place))["mail_address"],
            "group": group,
            "max_deliver": found["max_deliver"],
            "messages": page_request.table("dead", caption, _DEAD, found["messages"][::-1], empty="No dead messages."),
            "path": _path(place),
        }

    async def _leases(self, page_request: PageRequest) -> PageContent:
        place, group = _place(page_request), page_request.text("group_name")
        found = await page_request.run("lease-list", **place, group_name=group, limit=MAX_ROWS)
        caption = "Messages in the hands of workers" + (f", the first {MAX_ROWS:,}" if found["more"] else "")
        return {
            "place": place,
            "mail_address": (await page_request.run("mailbox-show", **place))["mail_address"],
            "group": group,
            "leases": page_request.table(
                "leases", caption, _LEASES, found["leases"], empty="No worker holds a message."
            ),
            "path": _path(place),
        }

    async def _message(self, page_request: PageRequest) -> PageContent:
        place, msg_id = _place(page_request), page_request.number("msg_id", 0, 0, 2**53)
        message = await page_request.run("message-show", **place, msg_id=msg_id)
        payload = base64.b64decode(message["payload"])
        beginning = payload[:SHOWN_BYTES]
        try:
            shown, binary = beginning.decode(errors="strict" if len(payload) <= SHOWN_BYTES else "ignore"), False
        except UnicodeDecodeError:
            shown, binary = beginning.hex(" ", -4), True
        return {
            "place": place,
            "mail_address": (await page_request.run("mailbox-show", **place))["mail_address"],
            "message": message,
            "payload": shown,
            "binary": binary,
            "complete": len(payload) <= SHOWN_BYTES,
            "path": _path(place),
            "lanes": LANE_WORDS,
            **await self._death(page_request, place, msg_id),
        }

    async def _death(self, page_request: PageRequest, place: dict[str, str], msg_id: int) -> Mapping[str, Any]:
        """Return the group for which a message is dead, if the page was asked for it, and how it died."""
        group = page_request.text("dead_for")
        found = (
            await page_request.run("dead-list", **place, group_name=group, limit=DEAD_SHOWN)
            if group
            else {"messages": []}
        )
        dead = next((each for each in found["messages"] if each["msg_id"] == msg_id), None)
        return {"group": group, "dead": dead, "max_deliver": found.get("max_deliver")}

    async def _follow(self, page_request: PageRequest) -> PageContent:
        place = _place(page_request)
        await page_request.run("mailbox-show", **place)
        number = read_numbered(place["mail_address"])
        address = place["mail_address"] if number is None else await find_address(self._broker, place["tenant"], number)
        # A browser that connects again says by itself what it has seen; before, the page does.
        seen = page_request.request.headers.get("Last-Event-ID") or page_request.text("after")
        after = int(seen) if seen.isascii() and seen.isdigit() and len(seen) < 16 else None
        events = self._new_messages(page_request, place, address or "", after)
        return await self._console.streams.serve(page_request.request, page_request.actor, events)

    async def _new_messages(
        self, page_request: PageRequest, place: dict[str, str], address: str, after: int | None
    ) -> AsyncIterator[bytes]:
        """Yield the rows of messages as they come, a second's worth at once and the newest of many."""
        with self._broker.watching((place["tenant"], address)) as woken:
            while True:
                woken.clear()
                try:
                    listed = await page_request.run("message-list", **place, after=after, limit=PER_PAGE)
                except MediatorError:
                    # The mailbox is gone.
                    return
                if fresh := listed["messages"]:
                    after = fresh[0]["msg_id"]
                    shown = {
                        "messages": self._messages(page_request, place, listed, {}),
                        "page_request": page_request,
                        "path": _path(place),
                    }
                    yield event("messages", await self._console.render("console/messages.html", **shown), after)
                else:
                    yield COMMENT
                await asyncio.sleep(FOLLOW_SECONDS)
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), WRITE_SECONDS)


def _oldest(mailbox: Answer) -> str:
    return f"The oldest {format_count(mailbox['counted'], 'message')} by lane"


def _place(page_request: PageRequest) -> dict[str, str]:
    return {"tenant": page_request.text("tenant"), "mail_address": page_request.text("mail_address")}


def _path(place: dict[str, str]) -> str:
    """Return the path of a mailbox's page; tenants, addresses and numbers need no escapes."""
    return f"{HOME}/mailboxes/{place['tenant']}/{place['mail_address']}"
