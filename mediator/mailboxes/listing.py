"""PUBLIC.LIST: the mailboxes of a tenant that anybody in it may find (E10)."""

from copy import copy
from dataclasses import dataclass

from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.ports import Transaction

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
class Listed:
    """A page, and whether there is more behind it."""

    mailboxes: list[Mailbox]
    more: bool


def public(tx: Transaction, request: PublicList, now: int) -> Listed:
    """Return a page of living public mailboxes."""
    skip = (request.page - 1) * request.limit
    found = tx.mailboxes.public(request.tenant, request.after, request.tags, skip, request.limit + 1, now)
    return Listed([copy(mailbox) for mailbox in found[: request.limit]], len(found) > request.limit)
