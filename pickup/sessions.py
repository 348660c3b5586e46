"""Sessions: mail pushed to holders over their sockets, live mode and implicit pickup (D6, D7)."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from mediator.broker import WAKE_KEY_BYTES, Broker
from mediator.errors import BusyError, LiveModeError, MediatorError, NotEnrolledError
from mediator.mailboxes.bounds import DAY
from mediator.mediation import taking
from mediator.mediation.records import Connection
from mediator.mediation.taking import Status
from mediator.store.base import Transaction
from pickup.dispatch import Call, Channel
from pickup.live_leases import LiveLeases
from pickup.message import MessageType, Reply
from pickup.meters import Meters
from pickup.protocols.messagepickup import delivery

BATCH = 10
"""Messages in one push."""
BATCH_BYTES = 64 * 1024
"""Payload bytes in one push, one message at least: what a socket that reads slowly keeps in memory."""
LOOK_SECONDS = 60.0
"""A session looks this often unasked: a wake-up from another instance may be lost."""
RETRY_SECONDS = 0.5
"""Wait after the first failure of a push; it doubles up to :data:`LOOK_SECONDS`."""
MAX_SESSIONS = 100_000

_ANNOUNCEMENT = struct.Struct(f">{WAKE_KEY_BYTES}sQ")
_MAX_INSTANCE = 256

log = structlog.get_logger("didcomm.sessions")


class Sealer(Protocol):
    """Seals what is pushed; the post does."""

    async def seal(self, connection: Connection, reply: Reply) -> bytes:
        """Seal a message for a connection, from the identity it knows."""


class Announcer(Protocol):
    """Tells the instances that share a database; what is lost is not repeated."""

    async def publish(self, data: bytes) -> None:
        """Tell all instances."""

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        """Call ``heard`` with what is told, on the event loop."""


class _GoneError(Exception):
    """The channel, or the holder's mailbox, is not there any more."""


@dataclass(slots=True, eq=False)
class _Session:
    connection: Connection
    channel: Channel
    type: MessageType | None
    """The version and prefix to push with; None: bare envelopes (implicit pickup)."""
    cursor: int
    key: bytes
    stamp: int
    leases: LiveLeases
    task: "asyncio.Task[None] | None" = None

    @property
    def place(self) -> tuple[str, str]:
        place = self.connection.place
        assert place is not None, "who has no mailbox has no session"
        return place


class Sessions:
    """At most one session a holder; the newest wins, on this instance and on others."""

    def __init__(
        self,
        broker: Broker,
        sealer: Sealer,
        meters: Meters,
        *,
        live_lease: int,
        instance: str,
        announcer: Announcer | None = None,
    ) -> None:
        """``live_lease`` is how long what went out on a live session does not come again, in milliseconds (D6)."""
        self._broker = broker
        self._sealer = sealer
        self._meters = meters
        self._instance = instance.encode()[:_MAX_INSTANCE]
        self._announcer = announcer
        self._live_lease = live_lease
        self._of: dict[int, _Session] = {}
        self._keyed: dict[bytes, _Session] = {}
        self._on: dict[Channel, set[_Session]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._latest = 0
        self._closing = False
        meters.live.set_function(lambda: len(self._of))

    async def open(self) -> None:
        """Listen to the other instances."""
        if self._announcer is not None:
            await self._announcer.listen(self._heard)

    async def live(self, call: Call, on: bool) -> Status:
        """Turn live mode on or off for the caller's channel and return what waits, for the ``status`` (D6).

        Pushing begins when the answer has gone out on the channel, in the version and prefix of the call's message.
        Raises :class:`LiveModeError` where the channel cannot carry it, :class:`NotEnrolledError` without mediation.
        """
        connection, channel = call.enrolled(), call.channel
        if not on:
            session = self._of.get(connection.no)
            if session is not None and session.channel is channel:
                self._end(session)
            return await self._broker.read(lambda tx, now: taking.status(tx, connection, None, now))
        if not channel.persistent:
            raise LiveModeError
        self._has_room(connection)
        status, cursor = await self._broker.read(lambda tx, now: taking.open_live(tx, connection, now))

        async def begin(answered: bool) -> None:
            # Without a way back for the status there is none for mail.
            if answered:
                self._begin(connection, channel, call.message.type, cursor)

        call.after.append(begin)
        return status

    async def implicit(self, call: Call) -> None:
        """Push bare envelopes, the backlog first, for as long as the channel lives (D7); nothing on HTTP."""
        connection, channel = call.enrolled(), call.channel
        session = self._of.get(connection.no)
        if not channel.persistent or (session is not None and session.channel is channel):
            return
        self._has_room(connection)

        async def begin(_answered: bool) -> None:
            self._begin(connection, channel, None, 0)

        call.after.append(begin)

    def pushes_to(self, connection: Connection, channel: Channel) -> bool | None:
        """Whether live mode is on for the holder, on a socket for that very one: ``live_delivery`` of a ``status``.

        None: not on this instance, and a request over HTTP does not say whether on another.
        """
        session = self._of.get(connection.no)
        if session is not None and session.type is not None:
            return session.channel is channel or not channel.persistent
        return None if self._announcer is not None and not channel.persistent else False

    @asynccontextmanager
    async def leases(self, connection: Connection) -> AsyncIterator[LiveLeases]:
        """Lock the leases of the holder's live session for this block, and give them (D6).

        Without a session on this instance there are none, and what is taken is not kept.
        """
        session = self._of.get(connection.no)
        leases = LiveLeases(0) if session is None or session.type is None else session.leases
        async with leases.lock:
            yield leases

    def has(self, connection_no: int) -> bool:
        """Whether the holder has a session on this instance, on whatever channel."""
        return connection_no in self._of

    async def left(self, channel: Channel) -> None:
        """End what runs on a channel that is gone."""
        for session in list(self._on.get(channel, ())):
            self._end(session)

    async def close(self) -> None:
        """End all sessions; what was pushed and not acknowledged stays queued."""
        self._closing = True
        for session in list(self._of.values()):
            self._end(session)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _has_room(self, connection: Connection) -> None:
        if len(self._of) >= MAX_SESSIONS and connection.no not in self._of:
            raise BusyError(f"{MAX_SESSIONS} holders have sessions already")

    def _begin(self, connection: Connection, channel: Channel, type: MessageType | None, cursor: int) -> None:
        if self._closing:
            return
        before = self._of.get(connection.no)
        if before is not None:
            self._end(before)
        self._latest = max(self._latest + 1, self._broker.clock())
        key = self._broker.wake_key(("session", str(connection.no)))
        leases = LiveLeases(self._live_lease, start=cursor)
        session = _Session(connection, channel, type, cursor, key, self._latest, leases)
        self._of[connection.no] = self._keyed[key] = session
        self._on.setdefault(channel, set()).add(session)
        session.task = asyncio.create_task(self._run(session), name="didcomm-session")
        self._tasks.add(session.task)
        session.task.add_done_callback(self._tasks.discard)

    def _end(self, session: _Session) -> None:
        if self._of.get(session.connection.no) is session:
            del self._of[session.connection.no], self._keyed[session.key]
        others = self._on.get(session.channel, set())
        others.discard(session)
        if not others:
            self._on.pop(session.channel, None)
        if session.task is not None and session.task is not asyncio.current_task():
            session.task.cancel()

    def _heard(self, data: bytes) -> None:
        """End the session of a holder that has begun a newer one on another instance."""
        if not _ANNOUNCEMENT.size < len(data) <= _ANNOUNCEMENT.size + _MAX_INSTANCE:
            return
        key, stamp = _ANNOUNCEMENT.unpack_from(data)
        instance = data[_ANNOUNCEMENT.size :]
        if instance == self._instance or stamp > self._broker.clock() + DAY:
            return
        # Stamps follow what was heard, so that the newer session wins although the instances' clocks differ.
        self._latest = max(self._latest, stamp)
        session = self._keyed.get(key)
        if session is not None and (stamp, instance) > (session.stamp, self._instance):
            self._end(session)

    async def _run(self, session: _Session) -> None:
        try:
            if self._announcer is not None:
                await self._announcer.publish(_ANNOUNCEMENT.pack(session.key, session.stamp) + self._instance)
            await self._push_all(session)
        except (_GoneError, NotEnrolledError):
            pass
        finally:
            self._end(session)

    async def _push_all(self, session: _Session) -> None:
        push = self._push_bare if session.type is None else self._push_delivery
        pause = RETRY_SECONDS
        with self._broker.watching(session.place) as woken:
            while True:
                woken.clear()
                try:
                    while await push(session):
                        pause = RETRY_SECONDS
                    await self._rest(session, woken)
                except (_GoneError, NotEnrolledError):
                    raise
                except Exception as error:
                    # A session that ended here would look healthy to its holder and deliver nothing.
                    code = error.code if isinstance(error, MediatorError) else MediatorError.code
                    log.warning(
                        "cannot push",
                        connection=session.connection.no,
                        code=code,
                        exc_info=not isinstance(error, MediatorError),
                    )
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LOOK_SECONDS)

    async def _rest(self, session: _Session, woken: asyncio.Event) -> None:
        """Wait until something may have come."""
        while not woken.is_set():
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await woken.wait()
            except TimeoutError:
                if await self._broker.read(lambda tx, _now: _has_mail(tx, session)):
                    return

    async def _push_delivery(self, session: _Session) -> bool:
        """Push one ``delivery`` of what arrived; its messages stay queued until they are acknowledged (D6).

        They are leased to the session meanwhile. When a lease ends nothing is pushed again: who has not acknowledged
        sees it in the next ``status``, and asks.
        """
        connection, cursor = session.connection, session.cursor
        async with session.leases.lock:
            leased = session.leases.leased(self._broker.clock())
            messages, behind = await self._broker.write(
                lambda tx, now: taking.arrived(tx, connection, cursor, BATCH, BATCH_BYTES, now, leased),
                session.place,
                when_full=True,
            )
            session.leases.take(messages, self._broker.clock())
        if not messages:
            session.cursor = behind
            return False
        assert session.type is not None
        assert connection.mailbox_no is not None
        try:
            sealed = await self._sealer.seal(connection, delivery(session.type, connection.mailbox_no, messages))
            if not await session.channel.send(sealed, connection.generation):
                raise _GoneError
        except BaseException:
            session.leases.release([message.msg_id for message in messages])
            raise
        session.cursor = behind
        self._meters.delivered("live", len(messages))
        return True

    async def _push_bare(self, session: _Session) -> bool:
        """Push envelopes as they are, and remove them once the transport says that they were read (D7)."""
        connection, channel = session.connection, session.channel
        messages = await self._broker.write(
            lambda tx, now: taking.deliver(tx, connection, BATCH, None, BATCH_BYTES, now), session.place, when_full=True
        )
        if not messages:
            return False
        for message in messages:
            if not await channel.send(message.payload, connection.generation):
                raise _GoneError
        if not await channel.confirmed():
            raise _GoneError
        ids = [message.msg_id for message in messages]
        await self._broker.write(
            lambda tx, now: taking.acknowledge(tx, connection, ids, now), session.place, when_full=True
        )
        self._meters.delivered("implicit", len(messages))
        return True


def _has_mail(tx: Transaction, session: _Session) -> bool:
    mailbox = tx.mailboxes.find(*session.place)
    if mailbox is None or mailbox.no != session.connection.mailbox_no:
        raise NotEnrolledError
    return mailbox.messages > 0 and (session.type is None or mailbox.next_id > session.cursor)
