"""The verbs of the current edition: how each is read, which use case it calls, what it replies (M, S, F, K, Q).

The broadcasts of the gateway (E9), the older editions (:mod:`.editions`) and the parts bring verbs of their own.
"""

import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from mediator import request_context
from mediator.broker import Broker
from mediator.errors import BadRequestError, UnavailableError
from mediator.fields import Fields, parse_body
from mediator.mailboxes.address import parse_address, writable_address
from mediator.mailboxes.message import HIDDEN_ID, Draft
from mediator.mailboxes.sending import Send
from mediator.nats import protocol
from mediator.nats.admission import ReplyQueue
from mediator.nats.client import Request
from mediator.store.writer import Done

UNKNOWN = "UNKNOWN"
"""What metrics call requests to no verb."""
ReplyRoom = Callable[[], int]
"""Returns how many bytes a reply may have; raises :class:`BusyError` while too many are under way."""
SendListener = Callable[[str, Hashable, str], None]
"""Takes the tenant, the connection and the address of a message that was stored."""
VerbHandler = Callable[[str, bytes, ReplyRoom], Awaitable[bytes]]
"""A verb of another part: takes the tenant, the body as it came and the room for a reply, and returns the reply."""


class PendingRequest:
    """A request, from its arrival at the door to its reply."""

    __slots__ = (
        "connection",
        "connection_name",
        "empty",
        "message",
        "replies",
        "sent_to",
        "size",
        "started",
        "tail",
        "tenant",
        "verb",
    )

    def __init__(self, message: Request, replies: ReplyQueue) -> None:
        self.message = message
        self.size = len(message.data)
        """Bytes of its body."""
        self.replies = replies
        self.started = time.perf_counter()
        self.verb = UNKNOWN
        """As metrics and logs call it."""
        self.empty: Mapping[str, Any] = {}
        """The fields of its reply when it failed (N1)."""
        self.tail = ""
        """What follows the verb in the subject: an address, an address and a msg_id, or nothing."""
        self.tenant = ""
        self.connection: Hashable = ""
        """Stands for the client's connection."""
        self.connection_name = ""
        """Its name, where no client can have forged it; for a verb that is a task, where its end will be told (F9)."""
        self.sent_to = ""
        """The address that a message is stored for."""

    @property
    def fields(self) -> Fields:
        """The fields of the body; raises :class:`BadRequestError`."""
        return parse_body(self.message.data)


class Verb(NamedTuple):
    """What one subject asks for; each request is a task."""

    name: str
    """As metrics and logs call it."""
    answer: Callable[[PendingRequest], Awaitable[bytes]]
    empty: Mapping[str, Any] = {}
    """The fields of its reply when it failed (N1)."""


class StoreVerb(NamedTuple):
    """A verb that is read and queued for the group commit at once, and answered by a callback: no request is a task.

    Those of one client keep their order.
    """

    name: str
    submit: Callable[[PendingRequest, Done], None]
    """Must not wait."""
    reply: bytes
    """Its reply, with a place for the number that is the outcome."""
    empty: Mapping[str, Any]
    """As in :class:`Verb`."""


def send_verb(submit: Callable[[PendingRequest, Done], None]) -> StoreVerb:
    """Return a verb that stores a message; ``submit`` sets ``sent_to``."""
    return StoreVerb("SEND", submit, b'{"error":"","msg_id":%d}', {"msg_id": HIDDEN_ID})


class MailboxVerbs:
    """The verbs of the current edition but for BATCH, whose messages the door admits one by one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.table: Mapping[str, Verb | StoreVerb] = {
            "MAILBOX.CREATE": Verb("CREATE", self._create, protocol.NOT_CREATED),
            "MAILBOX.UPDATE.": Verb("UPDATE", self._update, {"mail_address": ""}),
            "MSG.FETCH.": Verb("FETCH", self._fetch, {"messages": []}),
            "MSG.QUERY.": Verb("QUERY", self._query, {"messages": [], "send_address": ""}),
            "MSG.DELETE.": Verb("DELETE", self._delete, {"deleted": False}),
            "MSG.ACK.": StoreVerb("ACK", self._ack, b'{"error":"","acknowledged":%d}', {"acknowledged": 0}),
            "MSG.NACK.": StoreVerb("NACK", self._nack, b'{"error":"","returned":%d}', {"returned": 0}),
            "MSG.EXTEND.": StoreVerb("EXTEND", self._extend, b'{"error":"","extended":%d}', {"extended": 0}),
            "MSG.SEND.": send_verb(self._send),
        }
        """By the subject behind the prefix, up to the address where it has one."""

    async def _create(self, pending: PendingRequest) -> bytes:
        return protocol.encode_created(await self._broker.create(protocol.read_create(pending.tenant, pending.fields)))

    async def _update(self, pending: PendingRequest) -> bytes:
        request = protocol.read_update(pending.tenant, parse_address(pending.tail), pending.fields)
        return protocol.encode_success(mail_address=(await self._broker.update(request)).address)

    async def _fetch(self, pending: PendingRequest) -> bytes:
        request, text = protocol.read_fetch(
            pending.tenant, parse_address(pending.tail), pending.fields, pending.replies.budget, pending.connection_name
        )
        found = await self._broker.fetch(request)
        if found.note:
            return protocol.encode_messages(found.messages, text=text, note=found.note)
        return protocol.encode_messages(found.messages, text=text)

    async def _query(self, pending: PendingRequest) -> bytes:
        request, text = protocol.read_query(
            pending.tenant, parse_address(pending.tail), pending.fields, pending.replies.budget
        )
        found, send_address = await self._broker.query_and_name(request)
        return protocol.encode_messages(found, text=text, headers_only=request.headers_only, send_address=send_address)

    async def _delete(self, pending: PendingRequest) -> bytes:
        # The subject says all; SDKs send anything as the body.
        address, msg_id = protocol.address_and_id(pending.tail)
        await self._broker.delete(pending.tenant, address, msg_id)
        return protocol.encode_success(deleted=True)

    # Stored without a task.

    def _send(self, pending: PendingRequest, done: Done) -> None:
        message = pending.message
        pending.sent_to = writable_address(pending.tail)
        draft = protocol.read_draft(message.data, message.headers)
        self._broker.send_soon(Send(pending.tenant, pending.sent_to, draft), done)

    def _ack(self, pending: PendingRequest, done: Done) -> None:
        name = pending.connection_name
        known = name if name and self._broker.tracks(name) else ""
        self._broker.ack_soon(
            protocol.read_ack(pending.tenant, parse_address(pending.tail), pending.fields, known), done
        )

    def _nack(self, pending: PendingRequest, done: Done) -> None:
        self._broker.nack_soon(protocol.read_nack(pending.tenant, parse_address(pending.tail), pending.fields), done)

    def _extend(self, pending: PendingRequest, done: Done) -> None:
        self._broker.extend_soon(
            protocol.read_extend(pending.tenant, parse_address(pending.tail), pending.fields), done
        )


def verb_of_part(user_of: Callable[[str], str], name: str, handler: VerbHandler, empty: Mapping[str, Any]) -> Verb:
    """Return the verb of another part: its subject has no tail. ``user_of`` returns the user of a login."""

    async def answer(pending: PendingRequest) -> bytes:
        request_context.caller.set(f"user {user_of(login)}" if (login := pending.message.login) else "")
        request_context.connection.set(pending.connection)
        return await handler(pending.tenant, pending.message.data, pending.replies.room)

    return Verb(name, answer, empty)


class PendingBatch:
    """The messages of one BATCH on their way to the store (S8)."""

    def __init__(self, messages: Sequence[Draft | BadRequestError], done: Callable[[list[Any]], None]) -> None:
        """``done`` is called with the msg_id of each message, or its error, when the last of them is known."""
        self._outcomes: list[Any] = list(messages)
        self._done = done
        self._waiting = 0

    def send(self, submit: Callable[[Draft, Done], None]) -> None:
        """Submit the messages in their order.

        The first that finds no room is refused together with all that follow, so that none overtakes it; if none was
        taken before it, its :class:`UnavailableError` is raised.
        """
        full: UnavailableError | None = None
        for number, draft in enumerate(self._outcomes):
            if not isinstance(draft, Draft):
                continue
            try:
                if full is None:
                    submit(draft, partial(self._submitted, number))
                    self._waiting += 1
            except UnavailableError as error:
                if not self._waiting:
                    raise
                full = error
            if full is not None:
                self._outcomes[number] = full
        if not self._waiting:
            self._done(self._outcomes)

    def _submitted(self, number: int, outcome: Any) -> None:
        self._outcomes[number] = outcome
        self._waiting -= 1
        if not self._waiting:
            self._done(self._outcomes)
