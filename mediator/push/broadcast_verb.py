"""The verb BROADCAST: stores persistent broadcasts, and publishes others to all instances (E9)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nats.errors import Error as NatsError

from mediator.broker import Broker
from mediator.errors import BadRequestError, UnavailableError
from mediator.fields import printable
from mediator.mailboxes import sending
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Draft, Message
from mediator.nats import control_messages, replies, requests
from mediator.nats.connection import NatsConnection
from mediator.nats.editions.publishing import PERSIST, flag, persist_in
from mediator.nats.subjects import MAX_PATTERN
from mediator.nats.verbs import Verb, VerbCall
from mediator.push.encoding import EncodedMessage

PREFIX: Final = "BROADCAST."
"""What the subjects of broadcasts begin with, behind that of all verbs."""
_UNSUPPORTED: Final = ("mq9-key", "mq9-delay", "mq9-send-at", "mq9-storage")
"""Headers that ask for what a broadcast cannot do."""


@dataclass(frozen=True, slots=True)
class PublishedBroadcast:
    """A broadcast that was read."""

    name: str
    """The rest of its subject."""
    draft: Draft
    kept: bool

    def body(self) -> bytes:
        """Return the body of the frame that pushes it when it is not stored."""
        draft = self.draft
        # Clients see a message without an id; its times are not shown.
        message = Message(
            HIDDEN_ID, Lane.NORMAL, draft.payload, draft.size, 0, 0, None, None, draft.tags, draft.headers,
            reply_to=draft.reply_to,
        )  # fmt: skip
        return EncodedMessage(message).body(python=False)


class BroadcastVerb:
    """Answers it for one connection."""

    def __init__(self, broker: Broker, connection: NatsConnection) -> None:
        self._broker = broker
        self._connection = connection
        self.verb = Verb("BROADCAST", self._answer, {"msg_id": HIDDEN_ID})

    async def _answer(self, call: VerbCall) -> bytes:
        name, message = call.tail, call.message
        broadcast = read(name, message.data, message.headers)
        if broadcast.kept:
            return replies.success(msg_id=await self._broker.keep_broadcast(call.tenant, name, broadcast.draft))
        sending.check(broadcast.draft, broadcast.draft.size, self._broker.bounds, self._broker.clock())
        try:
            subject = f"{control_messages.BROADCAST}{call.tenant}.{name}"
            await self._connection.publish([self._connection.seal(subject, broadcast.body())])
        except NatsError as error:
            raise UnavailableError(str(error) or type(error).__name__) from error
        return replies.success(msg_id=HIDDEN_ID)


def read(name: str, payload: bytes, headers: Mapping[str, str] | None) -> PublishedBroadcast:
    """Read what came on ``name``, the subject behind :data:`PREFIX`. Raises :class:`BadRequestError`."""
    _check_name(name)
    given = {header: value for header, value in (headers or {}).items() if header.lower() not in ("persist", PERSIST)}
    lowered = {header.lower(): (header, value) for header, value in (headers or {}).items()}
    for header in _UNSUPPORTED:
        if lowered.get(header, ("", ""))[1]:
            raise BadRequestError(header, "has no meaning for a broadcast")
    draft = requests.draft(payload, given)
    # Broadcasts come in their order; they have no lanes.
    draft.lane = Lane.NORMAL
    header, value = lowered.get(PERSIST, ("", ""))
    if not value:
        header, value = lowered.get("persist", ("", ""))
    kept = flag(value, header)
    return PublishedBroadcast(name, draft, bool(persist_in(payload)) if kept is None else kept)


def _check_name(name: str) -> None:
    tokens = name.split(".")
    if len(name) > MAX_PATTERN:
        raise BadRequestError("subject", f"expected at most {MAX_PATTERN} characters behind {PREFIX}")
    if len(tokens) < 2 or not all(tokens):
        raise BadRequestError("subject", f"expected {PREFIX}domain.event, got {PREFIX}{printable(name)}")
    if set(name) & {"*", ">", "#", "�"} or not name.isprintable() or " " in name:
        raise BadRequestError("subject", f"expected no wildcards and only printable characters behind {PREFIX}")
