"""Gives every opened message to the handler of its protocol; a new protocol joins by one registration.

A handler is a coroutine ``(Call) -> Sequence[Reply]``. What it raises from the tree of errors is answered with a
problem report when the sender is known (D12).
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import structlog

from mediator.errors import BadRequestError, MediatorError, NotEnrolledError, UnsupportedMessageError
from mediator.mediation import replaying
from mediator.mediation.records import Connection, Generation
from mediator.mediation.replaying import Envelope
from mediator.store.base import Transaction
from mediator.store.writer import Work
from pickup.message import Message, Reply
from pickup.problems import is_report, report

if TYPE_CHECKING:
    from pickup.office import Office

T = TypeVar("T")


class Channel(Protocol):
    """Where a message came in, and where answers may go back (D5)."""

    routes: set[str]
    """Who asked for answers on this channel for as long as it lasts: canonical callers (D5). Bounded by the post."""

    @property
    def persistent(self) -> bool:
        """Whether it can carry live mode: a WebSocket (D6)."""

    async def send(self, envelope: bytes, generation: Generation) -> bool:
        """Send an envelope; False when it could not be: the peer is gone, or HTTP has had its one answer."""

    async def confirmed(self) -> bool:
        """Wait until the peer has read what was sent, by ping and pong; False when it has not (D7)."""


class ReplayedError(Exception):
    """Ends the handling of an envelope that was taken before, here or elsewhere; nothing was changed (D13)."""


@dataclass(slots=True)
class Call:
    """One message, who sent it, and what a handler may use."""

    office: "Office"
    tenant: str
    message: Message
    me: str
    """Our DID (v2) or canonical key (v1) that the message was sealed for."""
    caller: str | None
    """Canonical DID (v2) or key (v1) that sealed it; None: anonymous (D8)."""
    sender: str | None
    """The same as it was written, the long form of a did:peer:4: what an answer is sealed for."""
    connection: Connection | None
    channel: Channel
    mark: bytes
    """Tells the envelope from all others of its sender."""
    repeated: bool = False
    """This very envelope was taken before: it comes again by a transport that tries again, or from a recorder (D13).

    It gets its answer, but changes nothing that another message may have changed since.
    """
    once: Envelope | None = None
    """Set by the dispatcher: to be remembered with the first change that the handler makes (D13)."""
    after: list[Callable[[bool], Awaitable[None]]] = field(default_factory=list)
    """Run once the answers are written: True when they went out on the channel the message came by."""

    async def write(self, work: Work[T], *, when_full: bool = False) -> T:
        """Run a change with the next commit; the caller's mailbox is locked before its connection, as everywhere.

        ``when_full`` as for :meth:`~mediator.broker.Broker.write`.
        The first change of a handler whose messages are taken once ends in :class:`ReplayedError` when this one was.
        """
        place = None if self.connection is None else self.connection.place
        envelope = self.once
        if envelope is None:
            return await self.office.broker.write(work, place, when_full=when_full)

        def first(tx: Transaction, now: int) -> tuple[T] | None:
            return replaying.once(tx, envelope, lambda: work(tx, now), now)

        done = await self.office.broker.write(first, place, when_full=when_full)
        if done is None:
            raise ReplayedError
        self.once = None
        return done[0]

    async def remember(self) -> None:
        """Note that this envelope was taken, where the handler itself writes nothing (D13)."""
        await self.write(lambda _tx, _now: None, when_full=True)

    def connected(self) -> Connection:
        """Return the caller's connection; :class:`NotEnrolledError` for a stranger (D8)."""
        if self.connection is None:
            raise NotEnrolledError("the sender is not connected")
        return self.connection

    def enrolled(self) -> Connection:
        """Return the caller's connection; :class:`NotEnrolledError` when it has no mediation (D8)."""
        if self.connection is None or self.connection.mailbox_no is None:
            raise NotEnrolledError
        return self.connection


Handler = Callable[[Call], Awaitable[Sequence[Reply]]]

Version = tuple[int, int]
"""Major and minor."""

log = structlog.get_logger("didcomm.dispatch")


@dataclass(frozen=True, slots=True)
class _Entry:
    handler: Handler
    newest: int
    """The highest minor version of its major one."""
    generations: AbstractSet[Generation]
    anonymous: bool
    once: bool


@dataclass(frozen=True, slots=True, order=True)
class Spoken:
    """One version of a protocol."""

    family: str
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.family}/{self.major}.{self.minor}"


class Dispatcher:
    """Knows the protocols."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int, str], _Entry] = {}
        self._spoken: set[Spoken] = set()

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
        """Let messages of a protocol, by their names, go to their handlers.

        ``anonymous``: also when nobody says who sent it; such are never answered. ``once`` names those that hand out,
        remove or re-route: their envelopes are remembered for good with the first :meth:`Call.write` of the handler,
        which must come before anything that a replay must not do (D13). ValueError when a message has a handler
        already, or ``once`` names none.
        """
        if not once <= names.keys():
            raise ValueError(f"{family} has no handler for {sorted(once - names.keys())}")
        for major in {major for major, _ in versions}:
            newest = max(minor for of, minor in versions if of == major)
            for name, handler in names.items():
                if (family, major, name) in self._entries:
                    raise ValueError(f"{family}/{major}.{newest}/{name} is registered already")
                self._entries[family, major, name] = _Entry(handler, newest, generations, anonymous, name in once)
        self._spoken |= {Spoken(family, major, minor) for major, minor in versions}

    def protocols(self) -> list[Spoken]:
        """Return all versions that are spoken, in order."""
        return sorted(self._spoken)

    async def handle(self, call: Call) -> list[Reply]:
        """Have a message handled and return the answers, at most one of them a problem report (D12).

        For an anonymous sender there is no answer, and what was wrong is raised; so is :class:`ReplayedError`.
        """
        try:
            entry = self._entry(call)
            _in_time(call)
            if entry.once and not call.repeated:
                call.once = _taken_once(call)
            replies = await entry.handler(call)
        except MediatorError as error:
            if call.caller is None:
                raise
            return self._refused(call, error)
        return [] if call.caller is None else list(replies)

    def _entry(self, call: Call) -> _Entry:
        message = call.message
        entry = self._entries.get((message.type.family, message.type.major, message.type.name))
        if entry is None or message.type.minor > entry.newest or message.generation not in entry.generations:
            raise UnsupportedMessageError(str(message.type))
        if call.caller is None and not entry.anonymous:
            raise NotEnrolledError("the message does not say who sent it")
        return entry

    def _refused(self, call: Call, error: MediatorError) -> list[Reply]:
        log.debug("message refused", code=error.code, generation=call.message.generation.value)
        if is_report(call.message.type):
            # An answer to a problem report may be answered with another one, without end.
            return []
        call.office.meters.reported(error.code)
        return [report(call.message, error)]


def _in_time(call: Call) -> None:
    """Refuse what its sender wants done no more, but for forwards: who is late there must not be told (D9)."""
    expires, name = call.message.expires_time, call.message.type.name
    if expires is not None and name != "forward" and expires * 1000 <= call.office.broker.clock():
        raise BadRequestError("expires_time", "expected a time in the future, got one in the past")


def _taken_once(call: Call) -> Envelope | None:
    """Return what is remembered of a call whose sender is known; BadRequestError when it is too old for that."""
    if call.caller is None:
        return None
    message = call.message
    created, expires = message.created_time, message.expires_time
    envelope = Envelope(
        tenant=call.tenant,
        sender=call.caller,
        kind=f"{message.type.family}/{message.type.name}",
        mark=call.mark,
        created_at=None if created is None else created * 1000,
        expire_at=None if expires is None else expires * 1000,
    )
    replaying.check_age(envelope, call.office.broker.clock())
    return envelope
