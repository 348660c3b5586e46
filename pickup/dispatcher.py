"""Gives every opened message to the handler of its protocol.

A handler is a coroutine ``(InboundRequest) -> Sequence[ReplyMessage]``. A :class:`MediatorError` it raises is answered
by a problem report when the sender is known (D12). To add a protocol, call :meth:`Dispatcher.register`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import structlog

from mediator.errors import BadRequestError, MediatorError, NotEnrolledError, UnsupportedMessageError
from pickup.broker import MediationBroker
from pickup.channels import AfterReply, TransportChannel
from pickup.dids.document import DidResolver
from pickup.dids.identities import OwnIdentities
from pickup.dids.own_dids import OWN_PATH_TENANT
from pickup.envelope import Envelopes, OpenedEnvelope
from pickup.live_sessions import LiveSessions
from pickup.message import DidcommMessage, Json, MessageType, ReplyMessage
from pickup.metrics import DidcommMetrics
from pickup.rules import replays
from pickup.rules.records import Connection, Generation
from pickup.rules.replays import CLOCK_SKEW, SeenEnvelope

REPORT_FAMILY = "report-problem"
REPORT = "problem-report"
REPORT_NAMES = frozenset({REPORT, "problem_report"})
"""The second is written by older agents."""
_FIELD_COMMENT = "{1}: {2}"
REPORT_COMMENTS = {
    "e.m.live-mode-not-supported": "Connection does not support Live Delivery",
    "e.p.did": "The DID is unusable: {1}",
    "e.p.me": "Internal error: {1}",
    "e.p.me.res": "A required resource is unavailable: {1}",
    "e.p.me.res.net": "A server of somebody else cannot be reached: {1}",
    "e.p.me.res.rate": "Too many messages: {1}",
    "e.p.me.res.storage": "There is no room: {1}",
    "e.p.me.res.storage.message_too_big": _FIELD_COMMENT,
    "e.p.msg": _FIELD_COMMENT,
    "e.p.msg.unsupported": _FIELD_COMMENT,
    "e.p.req.denied": "The request is denied: {1}",
    "e.p.req.invitation": "An open invitation is needed: {1}",
    "e.p.trust.crypto": _FIELD_COMMENT,
    "e.p.trust.not-enrolled": "The sender is not enrolled: {1}",
}
"""The comment of each code, the same each time, so that peers can translate it (DIDComm v2.1 §problem-reports).

``{1}`` and ``{2}`` are the field with what is wrong about it, ``{1}`` alone is the reason.
"""


def is_report(type: MessageType) -> bool:
    """Whether a message is a problem report of any protocol; reports are never answered."""
    return type.name in REPORT_NAMES


def report_problem(message: DidcommMessage, error: MediatorError) -> ReplyMessage:
    """Write the report for a refused message, in the form of its generation."""
    prefix = message.type.prefix
    if message.generation is Generation.V1:
        type = MessageType(prefix, REPORT_FAMILY, 1, 0, REPORT)
        body = {"description": {"code": error.problem, "en": str(error)}}
        return ReplyMessage(type, body, thid=message.thread, pthid=message.id)
    type = MessageType(prefix, REPORT_FAMILY, 2, 0, REPORT)
    return ReplyMessage(type, explain(error), pthid=message.thread, ack=[message.id])


def explain(error: MediatorError) -> Json:
    """Return code, comment and args of an error as v2 writes them."""
    comment = REPORT_COMMENTS[error.problem]
    if comment == _FIELD_COMMENT:
        field, _, problem = str(error).partition(": ")
        return {"code": error.problem, "comment": comment, "args": [field, problem]}
    if "{1}" in comment:
        return {"code": error.problem, "comment": comment, "args": [str(error)]}
    return {"code": error.problem, "comment": comment}


EMPTY = "empty"
"""Family and name of the message that carries headers alone."""


@dataclass(slots=True)
class DidcommContext:
    """The services of the DIDComm door, which every handler may use."""

    mediation: MediationBroker
    resolver: DidResolver
    envelopes: Envelopes
    identities: OwnIdentities
    sessions: LiveSessions
    metrics: DidcommMetrics
    public_url: str
    """URL of this door over HTTP; with ws in place of http for WebSocket."""
    max_envelope: int
    """Bytes of the largest envelope that is accepted."""
    dispatcher: "Dispatcher"

    def own_did(self) -> str:
        """Return the DID for new wallets of the default tenant, which ``GET /didcomm/did`` answers with."""
        return self.identities.current(OWN_PATH_TENANT).v2_did


@dataclass(slots=True)
class InboundRequest:
    """One message, its sender, and what a handler may use."""

    context: DidcommContext
    tenant: str
    envelope: OpenedEnvelope
    """Replies are sealed for its sender as written, such as a did:peer:4 in its long form."""
    message: DidcommMessage
    """What the envelope holds."""
    caller: str | None
    """Canonical DID (v2) or key (v1) that sealed it; None: anonymous (D8)."""
    connection: Connection | None
    channel: TransportChannel
    mediation: MediationBroker
    """The use cases. For a message that is handled once, the first change stores its envelope too (D13)."""
    repeated: bool = False
    """This envelope was handled before: it comes from a transport that retries, or from an attacker (D13).

    It gets its reply, but changes nothing that another message may have changed since.
    """
    after: list[AfterReply] = field(default_factory=list)

    def connected(self) -> Connection:
        """Return the caller's connection; :class:`NotEnrolledError` for a stranger (D8)."""
        if self.connection is None:
            raise NotEnrolledError("the sender is not connected")
        return self.connection

    def enrolled(self) -> Connection:
        """Return the caller's connection; :class:`NotEnrolledError` when it has no mediation (D8)."""
        if self.connection is None or self.connection.mailbox_id is None:
            raise NotEnrolledError
        return self.connection

    def reply(
        self, name: str, body: Json | None = None, *, pthid: str | None = None, decorators: Json | None = None
    ) -> ReplyMessage:
        """Return a reply in the protocol, the prefix and the thread of the message."""
        type, thread = self.message.type.named(name), self.message.thread
        return ReplyMessage(type, body or {}, thid=thread, pthid=pthid, decorators=decorators or {})


Handler = Callable[[InboundRequest], Awaitable[Sequence[ReplyMessage]]]

Version = tuple[int, int]
"""Major and minor."""

log = structlog.get_logger("didcomm.dispatch")


@dataclass(frozen=True, slots=True)
class _Registration:
    handler: Handler
    newest: int
    """The highest minor version of its major one."""
    generations: AbstractSet[Generation]
    anonymous: bool
    once: bool


@dataclass(frozen=True, slots=True, order=True)
class ProtocolVersion:
    """One version of a protocol that is spoken here."""

    family: str
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.family}/{self.major}.{self.minor}"


class Dispatcher:
    """Finds the handler of each message type."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int, str], _Registration] = {}
        self._spoken: set[ProtocolVersion] = set()

    def register(
        self,
        family: str,
        versions: AbstractSet[Version],
        names: Mapping[str, Handler],
        *,
        generations: AbstractSet[Generation],
        anonymous: bool = False,
        once: AbstractSet[str] = frozenset(),
    ) -> None:
        """Set the handlers of a protocol, by the names of its messages.

        ``anonymous``: also messages without a sender; those are never answered. ``once`` names the messages that hand
        out, remove or re-route mail: their envelopes are stored with the handler's first change,
        which must come before anything that a replay must not repeat (D13). Raises ValueError when a message already
        has a handler, or ``once`` names an unknown message.
        """
        if not once <= names.keys():
            raise ValueError(f"{family} has no handler for {sorted(once - names.keys())}")
        for major in {major for major, _ in versions}:
            newest = max(minor for of, minor in versions if of == major)
            for name, handler in names.items():
                if (family, major, name) in self._entries:
                    raise ValueError(f"{family}/{major}.{newest}/{name} is registered already")
                self._entries[family, major, name] = _Registration(
                    handler, newest, generations, anonymous, name in once
                )
        self._spoken |= {ProtocolVersion(family, major, minor) for major, minor in versions}

    def protocols(self) -> list[ProtocolVersion]:
        """Return all versions that are spoken, in order."""
        return sorted(self._spoken)

    async def handle(self, request: InboundRequest) -> list[ReplyMessage]:
        """Handle a message and return the replies, at most one of them a problem report (D12).

        An anonymous sender gets no reply: errors are raised. So is :class:`ReplayedError`.
        """
        message, type = request.message, request.message.type
        try:
            entry = self._entries.get((type.family, type.major, type.name))
            if entry is None or type.minor > entry.newest or message.generation not in entry.generations:
                raise UnsupportedMessageError(str(type))
            if request.caller is None and not entry.anonymous:
                raise NotEnrolledError("the message is anonymous")
            if message.expires_time is not None:
                check_expiry(request)
            if entry.once and not request.repeated and request.caller is not None:
                seen, shared = _seen_envelope(request, request.caller), request.mediation
                request.mediation = MediationBroker(shared.broker, shared.rules, envelope=seen, shared=shared)
            replies = await entry.handler(request)
        except MediatorError as error:
            if request.caller is None:
                raise
            return self.refuse(request, error)
        return [] if request.caller is None else _acknowledged(message, list(replies))

    def refuse(self, request: InboundRequest, error: MediatorError) -> list[ReplyMessage]:
        """Return the problem report about a refused message, none for one that is a report itself."""
        log.debug("message refused", code=error.code, generation=request.message.generation.value)
        if is_report(request.message.type):
            # A report in reply to a report could go on for ever.
            return []
        request.context.metrics.reported(error.code)
        return [report_problem(request.message, error)]


def _acknowledged(message: DidcommMessage, replies: list[ReplyMessage]) -> list[ReplyMessage]:
    """Add the acknowledgement that a message asks for (DIDComm v2.1 §ACKs, RFC 0317).

    A mediator acknowledges no forward, and a message that is only an acknowledgement itself, or a report, gets none:
    that could go on for ever.
    """
    type = message.type
    if not message.please_ack or type.name == "forward" or is_report(type):
        return replies
    if replies:
        # In v1 every reply is an acknowledgement of itself (RFC 0015 §implicit acks).
        replies[0].ack = (*replies[0].ack, message.id)
    elif type.name != "ack" and "ack" not in message.raw:
        if message.generation is Generation.V1:
            done = MessageType(type.prefix, "notification", 1, 0, "ack")
            return [ReplyMessage(done, {"status": "OK"}, thid=message.thread)]
        empty = MessageType(type.prefix, EMPTY, 1, 0, EMPTY)
        return [ReplyMessage(empty, thid=message.thread, ack=[message.id])]
    return replies


def check_expiry(request: InboundRequest) -> None:
    """Refuse a message that expired more than some minutes ago, but no forward: its sender must learn nothing (D9)."""
    expires = request.message.expires_time
    if expires is None or request.message.type.name == "forward":
        return
    now = request.mediation.clock()
    if expires * 1000 + CLOCK_SKEW <= now:
        raise BadRequestError("expires_time", f"must be in the future; it is {now // 1000} here, got {expires}")


def _seen_envelope(request: InboundRequest, caller: str) -> SeenEnvelope:
    """Return what is stored of a request with a known sender; BadRequestError when it is too old for that."""
    message = request.message
    created, expires = message.created_time, message.expires_time
    envelope = SeenEnvelope(
        tenant=request.tenant,
        sender=caller,
        kind=f"{message.type.family}/{message.type.name}",
        digest=request.envelope.digest,
        created_at=None if created is None else created * 1000,
        expire_at=None if expires is None else expires * 1000 + CLOCK_SKEW,
    )
    if created is not None:
        replays.check_age(envelope, request.mediation.clock())
    return envelope


async def no_reply(_request: InboundRequest) -> Sequence[ReplyMessage]:
    """Reply nothing: to the last message of a handshake, to a response, or to a problem report."""
    return ()
