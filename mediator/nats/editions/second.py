"""The second edition: public mailboxes and their list, names that a lane word may not end, DELETE (M2, E2, E10)."""

from collections.abc import Callable

import orjson

from mediator.broker import Broker
from mediator.fields import Fields
from mediator.mailboxes import board, listing
from mediator.mailboxes.address import parse_address
from mediator.mailboxes.bounds import MAX_TAG, MAX_TAGS
from mediator.mailboxes.listing import PAGE, Listed, PublicList
from mediator.nats import replies, requests
from mediator.nats.editions.publishing import ADDRESS

MAX_LIMIT = 1000
MAX_PAGE = 10_000


class Second:
    """The verbs of this edition."""

    def __init__(self, broker: Broker, room: Callable[[], int]) -> None:
        """``room`` says how many bytes a reply may have, or raises :class:`BusyError`."""
        self._broker = broker
        self._room = room
        self.verbs = {"PUBLIC.LIST": ("PUBLIC.LIST", self._list), "MAILBOX.DELETE.": ("DELETE", self._delete)}

    async def _list(self, tenant: str, _tail: str, fields: Fields) -> bytes:
        request = question(tenant, fields)
        return _reply(await self._broker.read(lambda tx, now: listing.public(tx, request, now)), self._room())

    async def _delete(self, tenant: str, tail: str, _fields: Fields) -> bytes:
        address, msg_id = requests.numbered(tail, ADDRESS)
        await self._broker.delete(tenant, address, msg_id)
        return replies.success(deleted=True)


def question(tenant: str, fields: Fields) -> PublicList:
    """Read PUBLIC.LIST (E10)."""
    limit = fields.number("limit", 1, MAX_LIMIT, zero_is_absent=True)
    page = fields.number("page", 1, MAX_PAGE, zero_is_absent=True)
    after = fields.text("cursor", 4096)
    return PublicList(
        tenant=tenant,
        tags=fields.words("tag", MAX_TAGS, MAX_TAG) or (),
        limit=PAGE if limit is None else limit,
        page=1 if page is None else page,
        after="" if after is None else parse_address(after, "cursor"),
    )


def _reply(found: Listed, budget: int) -> bytes:
    """Write a page: what fits, one at least (N7), and where the next begins if there is more."""
    shown: list[orjson.Fragment] = []
    for mailbox in found.mailboxes:
        written = orjson.dumps(board.entry(mailbox))
        budget -= len(written) + 1
        if budget < 0 and shown:
            break
        shown.append(orjson.Fragment(written))
    cut = found.more or len(shown) < len(found.mailboxes)
    more = {"next": found.mailboxes[len(shown) - 1].address} if cut else {}
    return replies.success(mailboxes=shown, **more)
