"""The table of verbs: for each subject what reads the request, the use case, and what writes the reply (M, F, K, Q, E).

SEND, BATCH, ACK, NACK, EXTEND and the publishes of older editions are not here: the door answers them without a task.
"""

from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, NamedTuple

from mediator import request_context
from mediator.broker import Broker
from mediator.fields import Fields, parse_body
from mediator.mailboxes.address import parse_address
from mediator.nats import replies, requests
from mediator.nats.client import Request
from mediator.nats.reply_queue import ReplyQueue
from mediator.store.writer import Done

ReplyRoom = Callable[[], int]
"""Returns how many bytes a reply may have; raises :class:`BusyError` while too many are under way."""
SendListener = Callable[[str, Hashable, str], None]
"""Takes the tenant, the connection and the address of a message that was stored."""
VerbHandler = Callable[[str, bytes, ReplyRoom], Awaitable[bytes]]
"""A verb of another part: takes the tenant, the body as it came and the room for a reply, and returns the reply."""


ImmediateHandler = Callable[[str, str, Request, float], None]
"""Takes the tenant, what follows the verb in the subject, the request, and when it came; must not wait."""


class VerbCall(NamedTuple):
    """One request to a verb."""

    tenant: str
    tail: str
    """What follows the verb in the subject: an address, an address and a msg_id, or nothing."""
    message: Request
    replies: ReplyQueue
    connection: Hashable
    """Stands for the client's connection."""
    known_connection: str = ""
    """Its name, where the gateway will tell of its end (F9)."""

    @property
    def fields(self) -> Fields:
        """The fields of the body; raises :class:`BadRequestError`."""
        return parse_body(self.message.data)

    @property
    def address(self) -> str:
        """The address in the subject; raises :class:`BadRequestError`."""
        return parse_address(self.tail)


class Verb(NamedTuple):
    """What one subject asks for."""

    name: str
    """As metrics and logs call it."""
    answer: Callable[[VerbCall], Awaitable[bytes]]
    empty: Mapping[str, Any] = {}
    """The fields of its reply when it failed (N1)."""


class ImmediateVerb(NamedTuple):
    """A verb that is answered without a task."""

    name: str
    handle: ImmediateHandler
    empty: Mapping[str, Any] = {}
    """The fields of its reply when it failed (N1)."""


class SettleVerb(NamedTuple):
    """A verb about delivered messages that answers how many; of one client, all of them keep their order."""

    name: str
    read: Callable[[str, str, Fields, str], Any]
    """Reads the request: tenant, address, body, the connection as in :class:`VerbCall`."""
    use_case: Callable[[Broker, Any, Done], None]
    counted: str
    """The field of its reply, a number."""


SETTLE_VERBS = (
    SettleVerb("ACK", requests.ack, Broker.ack_soon, "acknowledged"),
    SettleVerb("NACK", requests.nack, Broker.nack_soon, "returned"),
    SettleVerb("EXTEND", requests.extend, Broker.extend_soon, "extended"),
)


class MailboxVerbs:
    """The verbs of the current edition."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.table: Mapping[str, Verb] = {
            "MAILBOX.CREATE": Verb("CREATE", self._create, replies.NOT_CREATED),
            "MAILBOX.UPDATE.": Verb("UPDATE", self._update, {"mail_address": ""}),
            "MSG.FETCH.": Verb("FETCH", self._fetch, {"messages": []}),
            "MSG.QUERY.": Verb("QUERY", self._query, {"messages": [], "send_address": ""}),
            "MSG.DELETE.": Verb("DELETE", self._delete, {"deleted": False}),
        }
        """By the subject behind the prefix, up to the address where it has one."""

    async def _create(self, call: VerbCall) -> bytes:
        return replies.created(await self._broker.create(requests.create(call.tenant, call.fields)))

    async def _update(self, call: VerbCall) -> bytes:
        mailbox = await self._broker.update(requests.update(call.tenant, call.address, call.fields))
        return replies.success(mail_address=mailbox.address)

    async def _fetch(self, call: VerbCall) -> bytes:
        fields = call.fields
        text = fields.choice("encoding", requests.ENCODINGS) == "utf8"
        request = requests.fetch(call.tenant, call.address, fields, call.replies.budget, call.known_connection)
        found, note = await self._broker.fetch_and_note(request)
        return replies.messages(found, text=text, note=note) if note else replies.messages(found, text=text)

    async def _query(self, call: VerbCall) -> bytes:
        fields = call.fields
        text = fields.choice("encoding", requests.ENCODINGS) == "utf8"
        request = requests.query(call.tenant, call.address, fields, call.replies.budget)
        found, send_address = await self._broker.query_and_name(request)
        return replies.messages(found, text=text, headers_only=request.headers_only, send_address=send_address)

    async def _delete(self, call: VerbCall) -> bytes:
        # The subject says all; SDKs send anything as the body.
        address, msg_id = requests.address_and_id(call.tail)
        await self._broker.delete(call.tenant, address, msg_id)
        return replies.success(deleted=True)


def verb_of_part(user_of: Callable[[str], str], name: str, handler: VerbHandler, empty: Mapping[str, Any]) -> Verb:
    """Return the verb of another part: its subject has no tail. ``user_of`` returns the user of a login."""

    async def answer(call: VerbCall) -> bytes:
        request_context.caller.set(f"user {user_of(login)}" if (login := call.message.login) else "")
        request_context.connection.set(call.connection)
        return await handler(call.tenant, call.message.data, call.replies.room)

    return Verb(name, answer, empty)
