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
from mediator.mediation.records import Connection, Generation
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
    repeated: bool = False
    """This very envelope came before: by a transport that tries again, or from who listened on the way.

    It gets its answer, but changes nothing that another message may have changed since.
    """
    after: list[Callable[[bool], Awaitable[None]]] = field(default_factory=list)
    """Run once the answers are written: True when they went out on the channel the message came by."""

    async def write(self, work: Work[T]) -> T:
        """Run a change with the next commit; the caller's mailbox is locked before its connection, as everywhere."""
        place = None if self.connection is None else self.connection.place
        return await self.office.broker.write(work, place)

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
    ) -> None:
        """Let messages of a protocol, by their names, go to their handlers.

        ``anonymous``: also when nobody says who sent it; such are never answered. ValueError when a message has a
        handler already.
        """
        for major in {major for major, _ in versions}:
            newest = max(minor for of, minor in versions if of == major)
            for name, handler in names.items():
                if (family, major, name) in self._entries:
                    raise ValueError(f"{family}/{major}.{newest}/{name} is registered already")
                self._entries[family, major, name] = _Entry(handler, newest, generations, anonymous)
        self._spoken |= {Spoken(family, major, minor) for major, minor in versions}

    def protocols(self) -> list[Spoken]:
        """Return all versions that are spoken, in order."""
        return sorted(self._spoken)

    async def handle(self, call: Call) -> list[Reply]:
        """Have a message handled and return the answers, at most one of them a problem report (D12).

        For an anonymous sender there is no answer, and what was wrong is raised.
        """
        try:
            handler = self._entry(call).handler
            _in_time(call)
            replies = await handler(call)
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
        raise BadRequestError("expires_time", "expected a time to come, got one that is past")
