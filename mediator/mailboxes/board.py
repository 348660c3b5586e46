"""The mailbox ``public``: one message for each public mailbox of a tenant, kept in step by the service alone (E10).

An entry is a message whose key is the address and which ends with its mailbox. So QUERY and FETCH find what PUBLIC.LIST
says, a subscription hears of each change, and one that reads slowly gets the last state of each mailbox only.
"""

import json
from copy import copy
from dataclasses import dataclass
from typing import Any

from mediator.mailboxes.address import PUBLIC
from mediator.mailboxes.appending import append
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Mailbox, NewMailbox
from mediator.mailboxes.message import HIDDEN_ID, Draft, Message
from mediator.mailboxes.transaction import Transaction

ENDED = Lane.LOW
"""The lane of the words that a mailbox ended; entries are in the lane normal."""
ENDED_LIFE = 3600 * 1000
"""Milliseconds for which they are kept, for those who were away or read slowly."""
_PAGE = 1000
PAGE = 100


@dataclass(frozen=True, slots=True)
class PublicList:
    """A question for public mailboxes, in order of their addresses."""

    tenant: str
    tags: tuple[str, ...] = ()
    """All of them are wanted."""
    limit: int = PAGE
    page: int = 1
    after: str = ""
    """Only addresses behind this one; pages are counted from there."""


@dataclass(frozen=True, slots=True)
class PublicPage:
    """A page, and whether there is more behind it."""

    mailboxes: list[Mailbox]
    more: bool


def list_public(tx: Transaction, request: PublicList, now: int) -> PublicPage:
    """Return a page of living public mailboxes."""
    skip = (request.page - 1) * request.limit
    found = tx.mailboxes.public(request.tenant, request.after, request.tags, skip, request.limit + 1, now)
    return PublicPage([copy(mailbox) for mailbox in found[: request.limit]], len(found) > request.limit)


def entry(mailbox: Mailbox) -> dict[str, Any]:
    """Show a public mailbox as PUBLIC.LIST does."""
    return {
        "mail_address": mailbox.address,
        "mail_id": mailbox.address,
        "name": mailbox.address,
        "desc": mailbox.desc,
        "tags": list(mailbox.tags),
        "created_at": mailbox.created_at // 1000,
    }


def ready(tx: Transaction, tenant: str, now: int) -> Mailbox:
    """Return the board of a tenant, which is made when it is first needed, of the public mailboxes that live then."""
    board = tx.mailboxes.find(tenant, PUBLIC)
    if board is not None:
        return board
    board = tx.mailboxes.add(NewMailbox(tenant, PUBLIC, now, desc="the public mailboxes of this tenant"))
    if board is None:
        # Another instance was first while this one waited for it.
        return ready(tx, tenant, now)
    tx.events.append(Event(EventType.MAILBOX_CREATED, now, tenant, board.id, created_at=now))
    after = ""
    while found := tx.mailboxes.public(tenant, after, (), 0, _PAGE, now):
        for mailbox in found:
            _write(tx, board, mailbox, now)
        after = found[-1].address
    return board


def post(tx: Transaction, mailbox: Mailbox, now: int) -> None:
    """Write what a mailbox is now, if it is public."""
    if not mailbox.public:
        return
    board = tx.mailboxes.find(mailbox.tenant, PUBLIC)
    if board is None:
        ready(tx, mailbox.tenant, now)
    else:
        _write(tx, board, mailbox, now)


def take_down(tx: Transaction, mailbox: Mailbox, now: int) -> None:
    """Write that a mailbox ends, if it is public; it still has its address."""
    if not mailbox.public:
        return
    address = mailbox.address
    said = {"mail_address": address, "mail_id": address, "name": address, "deleted": True}
    _put(tx, ready(tx, mailbox.tenant, now), Draft(_json(said), ENDED, address), now + ENDED_LIFE, now)


def _write(tx: Transaction, board: Mailbox, mailbox: Mailbox, now: int) -> None:
    draft = Draft(_json(entry(mailbox)), key=mailbox.address, tags=mailbox.tags)
    _put(tx, board, draft, mailbox.expire_at, now)


def _put(tx: Transaction, board: Mailbox, draft: Draft, expire_at: int | None, now: int) -> None:
    message = Message(
        msg_id=HIDDEN_ID,
        lane=draft.lane,
        payload=draft.payload,
        size=draft.size,
        created_at=now,
        sent_at=now,
        expire_at=expire_at,
        key=draft.key,
        tags=draft.tags,
    )
    append(tx, board, message, False, now, EventType.STORED)


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
