"""Pushes mail to holders over their sockets: live mode (RFC 0685) and implicit pickup (RFC 0212) (D6, D7)."""

import asyncio
import itertools
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from mediator.announcer import Announcer
from mediator.broker import WAKE_KEY_BYTES
from mediator.errors import BusyError, LiveModeError, MediatorError, NotEnrolledError
from mediator.mailboxes.bounds import DAY
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.rows import StoredMessage
from pickup.broker import MediationBroker
from pickup.channels import AfterReply, TransportChannel
from pickup.message import Attachment, Json, MessageType, ReplyMessage
from pickup.metrics import DidcommMetrics
from pickup.rules import message_queue
from pickup.rules.message_queue import QueueStatus, attachment_id
from pickup.rules.records import Connection, Generation

RETURN_ROUTE = {"~transport": {"return_route": "all"}}
"""The decorator of every v1 message of message pickup (RFC 0685)."""
MAX_LEASED = 1000
"""Leases of one session, about 100 KiB; beyond that the oldest end early, and their mail may come twice."""


class LiveLeases:
    """The unacknowledged mail of one session. It lives in memory only: the leases end with the session."""

    def __init__(self, span: int, start: int = 0) -> None:
        """``span`` is how long a lease lasts, in milliseconds; 0 turns leases off.

        ``start`` is the first msg_id that came while live mode was on. Older mail is never leased: it is delivered on
        request only, again and again until it is acknowledged (D2).
        """
        self.lock = asyncio.Lock()
        """Hold it from reading the leases until new ones are added, so that each message goes out once."""
        self._span = span
        self._start = start
        self._since: dict[int, int] = {}
        """When each lease began, the oldest first."""

    def leased(self, now: int) -> Collection[int]:
        """Return the leased msg_ids at ``now``, in milliseconds since the epoch."""
        for msg_id, since in list(self._since.items()):
            # A lease that begins in the future was taken before the clock was set back, and would last too long.
            if since <= now < since + self._span:
                break
            del self._since[msg_id]
        return frozenset(self._since)

    def take(self, messages: Sequence[StoredMessage], now: int) -> None:
        """Lease messages that are about to be sent."""
        for message in messages:
            if self._span and message.msg_id >= self._start:
                self._since.pop(message.msg_id, None)
                self._since[message.msg_id] = now
        for msg_id in list(itertools.islice(self._since, max(0, len(self._since) - MAX_LEASED))):
            del self._since[msg_id]

    def release(self, ids: Collection[int]) -> None:
        """End leases: the messages were acknowledged, or could not be sent."""
        for msg_id in ids:
            self._since.pop(msg_id, None)


BATCH = 10
"""Messages in one push."""
BATCH_BYTES = 64 * 1024
"""Payload bytes in one push, or one larger message: what a slow socket keeps in memory."""
LOOK_SECONDS = 60.0
"""How often a session checks for mail without a wake-up, which another instance may have lost."""
RETRY_SECONDS = 0.5
"""Wait after a failed push; it doubles up to :data:`LOOK_SECONDS`."""
MAX_SESSIONS = 100_000

_ANNOUNCEMENT = struct.Struct(f">{WAKE_KEY_BYTES}sQ")
_MAX_INSTANCE = 256

log = structlog.get_logger("didcomm.sessions")


def delivery(
    type: MessageType,
    mailbox_id: int,
    messages: Sequence[StoredMessage],
    *,
    thid: str | None = None,
    body: Json | None = None,
) -> ReplyMessage:
    """Write a ``delivery`` in the version and prefix of ``type``; one that is pushed has no thread (D3, D6)."""
    attached = [Attachment(attachment_id(mailbox_id, message.msg_id), message.payload) for message in messages]
    return ReplyMessage(type.named("delivery"), body or {}, attached, thid=thid, decorators=RETURN_ROUTE)


class ReplySealer(Protocol):
    """Seals what is pushed; :class:`~pickup.receiver.ReplySender` does."""

    async def seal(self, connection: Connection, reply: ReplyMessage) -> bytes:
        """Seal a message for a connection, from the identity it knows."""


class _GoneError(Exception):
    """The channel is closed."""


@dataclass(slots=True, eq=False)
class _Session:
    connection: Connection
    channel: TransportChannel
    type: MessageType | None
    """A message type of the protocol version and prefix to push with; None: bare envelopes (implicit pickup)."""
    cursor: int
    key: bytes
    stamp: int
    leases: LiveLeases
    pushed: int = 0
    task: "asyncio.Task[None] | None" = None

    @property
    def mailbox_key(self) -> MailboxKey:
        key = self.connection.mailbox_key
        assert key is not None, "a session needs a mailbox"
        return key


class SessionView(NamedTuple):
    """What an operator sees of a session."""

    connection: Connection
    since: int
    """When it began, in milliseconds."""
    live: bool
    """Live mode, else implicit pickup."""
    pushed: int
    """Messages."""
    client: str


class LiveSessions:
    """At most one session for each holder; the newest wins, on all instances."""

    def __init__(
        self,
        mediation: MediationBroker,
        sealer: ReplySealer,
        metrics: DidcommMetrics,
        *,
        live_lease: int,
        instance: str,
        announcer: Announcer | None = None,
    ) -> None:
        """``live_lease`` is how long pushed mail is leased to its session, in milliseconds (D6)."""
        self._mediation = mediation
        self._broker = mediation.broker
        self._sealer = sealer
        self._metrics = metrics
        self._instance = instance.encode()[:_MAX_INSTANCE]
        self._announcer = announcer
        self._live_lease = live_lease
        self._of: dict[int, _Session] = {}
        self._keyed: dict[bytes, _Session] = {}
        self._on: dict[TransportChannel, set[_Session]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._latest = 0
        self._closing = False
        metrics.live.set_function(lambda: len(self._of))

    async def open(self) -> None:
        """Listen to the other instances."""
        if self._announcer is not None:
            await self._announcer.listen(self._heard)

    async def live(
        self, connection: Connection, channel: TransportChannel, type: MessageType, after: list[AfterReply]
    ) -> QueueStatus:
        """Turn live mode on for a channel, and return the status to reply with (D6).

        Pushing begins once the reply went out on the channel, which ``after`` announces, in the version and prefix of
        ``type``. Raises :class:`LiveModeError` where the channel cannot carry it, :class:`NotEnrolledError` without
        mediation.
        """
        if not channel.persistent:
            raise LiveModeError
        self._check_room(connection)
        status, cursor = await self._mediation.open_live(connection)

        async def begin(answered: bool) -> None:
            # If the status could not be sent, mail cannot be either.
            if answered:
                self._begin(connection, channel, type, cursor)

        after.append(begin)
        return status

    def end_live(self, connection: Connection, channel: TransportChannel) -> None:
        """Turn live mode off, if it is on for this channel (D6)."""
        session = self._of.get(connection.id)
        if session is not None and session.channel is channel:
            self._end(session)

    def implicit(self, connection: Connection, channel: TransportChannel, after: list[AfterReply]) -> None:
        """Push bare envelopes, the backlog first, until the channel closes (D7); does nothing on HTTP."""
        session = self._of.get(connection.id)
        if not channel.persistent or (session is not None and session.channel is channel):
            return
        self._check_room(connection)

        async def begin(_answered: bool) -> None:
            self._begin(connection, channel, None, 0)

        after.append(begin)

    def pushes_to(self, connection: Connection, channel: TransportChannel) -> bool | None:
        """Whether live mode is on for the holder: ``live_delivery`` of a ``status``; on a socket, for that socket.

        None: unknown, since over HTTP another instance may have the session.
        """
        session = self._of.get(connection.id)
        if session is not None and session.type is not None:
            return session.channel is channel or not channel.persistent
        return None if self._announcer is not None and not channel.persistent else False

    def leases(self, connection: Connection) -> LiveLeases:
        """Return the leases of the holder's live session (D6).

        Without a live session on this instance there are none, and new ones are not kept.
        """
        session = self._of.get(connection.id)
        return LiveLeases(0) if session is None or session.type is None else session.leases

    @property
    def count(self) -> int:
        """How many holders have a session on this instance."""
        return len(self._of)

    def has(self, connection_id: int) -> bool:
        """Whether the holder has a session on this instance."""
        return connection_id in self._of

    def list(self, tenant: str, skip: int, limit: int) -> tuple[list[SessionView], int]:
        """Return sessions of a tenant on this instance, the newest first, and how many it has; "" is all tenants."""
        found = [one for one in reversed(self._of.values()) if not tenant or one.connection.tenant == tenant]
        shown = [
            SessionView(one.connection, one.stamp, one.type is not None, one.pushed, one.channel.client)
            for one in found[skip : skip + limit]
        ]
        return shown, len(found)

    def rotated(self, connection: Connection) -> None:
        """Push to a connection's new DID from now on (D14)."""
        session = self._of.get(connection.id)
        if session is not None:
            session.connection = connection

    def end(self, which: Callable[[Connection], bool]) -> set[TransportChannel]:
        """End the sessions of these connections, and return their channels; unacknowledged mail stays queued."""
        ended = [session for session in self._of.values() if which(session.connection)]
        for session in ended:
            self._end(session)
        return {session.channel for session in ended}

    async def left(self, channel: TransportChannel) -> None:
        """End the sessions of a closed channel."""
        for session in list(self._on.get(channel, ())):
            self._end(session)

    async def close(self) -> None:
        """End all sessions; unacknowledged mail stays queued."""
        self._closing = True
        for session in list(self._of.values()):
            self._end(session)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check_room(self, connection: Connection) -> None:
        if len(self._of) >= MAX_SESSIONS and connection.id not in self._of:
            raise BusyError(f"{MAX_SESSIONS} holders have sessions already")

    def _begin(self, connection: Connection, channel: TransportChannel, type: MessageType | None, cursor: int) -> None:
        if self._closing:
            return
        before = self._of.get(connection.id)
        if before is not None:
            self._end(before)
        self._latest = max(self._latest + 1, self._mediation.clock())
        key = self._broker.wake_key(("session", str(connection.id)))
        leases = LiveLeases(self._live_lease, start=cursor)
        session = _Session(connection, channel, type, cursor, key, self._latest, leases)
        self._of[connection.id] = self._keyed[key] = session
        self._on.setdefault(channel, set()).add(session)
        session.task = asyncio.create_task(self._run(session), name="didcomm-session")
        self._tasks.add(session.task)
        session.task.add_done_callback(self._tasks.discard)

    def _end(self, session: _Session) -> None:
        if self._of.get(session.connection.id) is session:
            del self._of[session.connection.id], self._keyed[session.key]
        others = self._on.get(session.channel, set())
        others.discard(session)
        if not others:
            self._on.pop(session.channel, None)
        if session.task is not None and session.task is not asyncio.current_task():
            session.task.cancel()

    def _heard(self, data: bytes) -> None:
        """End the session of a holder that began a newer one on another instance."""
        if not _ANNOUNCEMENT.size < len(data) <= _ANNOUNCEMENT.size + _MAX_INSTANCE:
            return
        key, stamp = _ANNOUNCEMENT.unpack_from(data)
        instance = data[_ANNOUNCEMENT.size :]
        if instance == self._instance or stamp > self._mediation.clock() + DAY:
            return
        # Stamps follow those received, so that the newer session wins although clocks differ.
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
        with self._broker.watching(session.mailbox_key) as woken:
            while True:
                woken.clear()
                try:
                    while await push(session):
                        pause = RETRY_SECONDS
                    await self._wait(session, woken)
                except (_GoneError, NotEnrolledError):
                    raise
                except Exception as error:
                    # If the session ended here, its holder would wait on a socket that delivers nothing.
                    code = error.code if isinstance(error, MediatorError) else MediatorError.code
                    log.warning(
                        "cannot push mail",
                        connection=session.connection.id,
                        code=code,
                        exc_info=not isinstance(error, MediatorError),
                    )
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LOOK_SECONDS)

    async def _wait(self, session: _Session, woken: asyncio.Event) -> None:
        """Wait until mail may have arrived."""
        while not woken.is_set():
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await woken.wait()
            except TimeoutError:
                if await self._mediation.read(
                    lambda tx, now: message_queue.has_arrived(tx, session.connection, session.cursor, now)
                ):
                    return

    async def _push_delivery(self, session: _Session) -> bool:
        """Push one ``delivery`` of new mail, which stays queued until it is acknowledged (D6).

        The messages are leased to the session meanwhile. After a lease they are not pushed again: the holder sees them
        in the next ``status`` and requests them.
        """
        connection, cursor = session.connection, session.cursor
        async with session.leases.lock:
            leased = session.leases.leased(self._mediation.clock())
            messages, behind = await self._mediation.next_arrived(connection, cursor, BATCH, BATCH_BYTES, leased)
            session.leases.take(messages, self._mediation.clock())
        if not messages:
            session.cursor = behind
            return False
        assert session.type is not None
        mailbox_id = connection.mailbox_id
        assert mailbox_id is not None
        try:
            if self._announcer is not None and connection.generation is Generation.V2:
                # At another instance the peer may have rotated its DID.
                connection = await self._mediation.get_connection(connection.id) or connection
                session.connection = connection
            sealed = await self._sealer.seal(connection, delivery(session.type, mailbox_id, messages))
            if not await session.channel.send(sealed, connection.generation):
                raise _GoneError
        except BaseException:
            session.leases.release([message.msg_id for message in messages])
            raise
        session.cursor = behind
        session.pushed += len(messages)
        self._metrics.delivered("live", len(messages))
        return True

    async def _push_bare(self, session: _Session) -> bool:
        """Push bare envelopes, and remove them once the transport confirms that they were read (D7)."""
        connection, channel = session.connection, session.channel
        messages = await self._mediation.deliver(connection, BATCH, BATCH_BYTES, confirm_batch=False)
        if not messages:
            return False
        for message in messages:
            if not await channel.send(message.payload, connection.generation):
                raise _GoneError
        if not await channel.confirmed():
            raise _GoneError
        ids = [message.msg_id for message in messages]
        await self._mediation.confirm(connection, ids)
        session.pushed += len(messages)
        self._metrics.delivered("implicit", len(messages))
        return True
