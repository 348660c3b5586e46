"""The first edition: mailboxes that are asked for what is unread, by their token (E4)."""

import asyncio
from binascii import b2a_base64
from collections.abc import Callable

import orjson

from mediator.broker import Broker
from mediator.fields import Fields
from mediator.mailboxes.address import parse_address
from mediator.mailboxes.querying import Unread
from mediator.nats import replies
from mediator.nats.editions.publishing import ADDRESS

LARGE = 64 * 1024
"""Bytes of JSON that take a while to look through."""


class First:
    """The verbs of this edition."""

    def __init__(self, broker: Broker, room: Callable[[], int]) -> None:
        """``room`` says how many bytes a reply may have, or raises :class:`BusyError`."""
        self._broker = broker
        self._room = room
        self.verbs = {"MAILBOX.QUERY.": ("MAILBOX.QUERY", self._query)}

    async def _query(self, tenant: str, address: str, fields: Fields) -> bytes:
        token = fields.text("token", 256) or ""
        request = Unread(tenant, parse_address(address, ADDRESS), token, self._room())
        found = await self._broker.unread(request)
        messages = []
        for message in found.messages:
            messages.append(_shown(message.payload))
            if len(message.payload) > LARGE:
                # Others wait no longer than for one.
                await asyncio.sleep(0)
        return replies.success(mail_id=request.address, unread=found.unread, messages=messages)


def _shown(payload: bytes) -> object:
    """Show a body as it was published if it is JSON, else in base64."""
    try:
        orjson.loads(payload)
    except orjson.JSONDecodeError:
        return b2a_base64(payload, newline=False).decode("ascii")
    return orjson.Fragment(payload)
