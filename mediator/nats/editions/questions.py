"""The edition of questions and answers: LIST, with a tag, a bound, and without payloads (E1)."""

from collections.abc import Callable

from mediator.broker import Broker
from mediator.fields import Fields
from mediator.mailboxes.address import parse_address
from mediator.mailboxes.bounds import DEFAULT_FETCH, MAX_FETCH, MAX_TAG, MAX_TAGS
from mediator.mailboxes.message import Message
from mediator.mailboxes.ports import Filter
from mediator.mailboxes.querying import Query
from mediator.nats import replies
from mediator.nats.editions.publishing import ADDRESS

SHOWN = ("high", "high", "normal", "low")
"""The word for each lane in this edition, and for the client that speaks it (E1, E11)."""


class Questions:
    """The verbs of this edition."""

    def __init__(self, broker: Broker, room: Callable[[], int]) -> None:
        """``room`` says how many bytes a reply may have, or raises :class:`BusyError`."""
        self._broker = broker
        self._room = room
        self.verbs = {"MAILBOX.LIST.": ("MAILBOX.LIST", self._list)}
        self.python_verbs = {"MAILBOX.LIST.": ("MAILBOX.LIST", self._snapshot)}
        """In place of the same for ``robustmq-mq9-python``, whose LIST never has payloads and knows no bound."""

    async def _list(self, tenant: str, address: str, fields: Fields) -> bytes:
        limit = fields.number("max_count", 1, MAX_FETCH, zero_is_absent=True)
        headers_only = fields.flag("headers_only") or False
        wanted = Filter(tags=fields.words("tag", MAX_TAGS, MAX_TAG) or ())
        return await self._found(tenant, address, wanted, DEFAULT_FETCH if limit is None else limit, headers_only)

    async def _snapshot(self, tenant: str, address: str, _fields: Fields) -> bytes:
        return await self._found(tenant, address, Filter(), MAX_FETCH, headers_only=True)

    async def _found(self, tenant: str, address: str, wanted: Filter, limit: int, headers_only: bool) -> bytes:
        request = Query(tenant, parse_address(address, ADDRESS), wanted, limit, self._room(), headers_only=headers_only)
        found = await self._broker.query(request)
        return replies.success(messages=[_item(message, headers_only) for message in found])


def _item(message: Message, headers_only: bool) -> dict[str, object]:
    return replies.item(message, headers_only=headers_only, words=SHOWN) | {"ts": message.created_at // 1000}
