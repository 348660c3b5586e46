"""Sessions of the console: sealed cookies, whose key is never in the database, and the sessions that were ended.

A sign-out ends a session at all instances that share the database, and over restarts.
"""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from cryptography.fernet import Fernet, InvalidToken

from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.cleanup.collector import CleanupStep, SliceResult
from mediator.errors import BusyError
from mediator.mailboxes.bounds import DAY
from mediator.mailboxes.session import Table
from mediator.operate.scheduler import CoalescingTask
from mediator.store.base import Transaction

SESSION_SECONDS = 12 * 3600
TOPIC: Final = "sessions"
LOOK_SECONDS: Final = 2
"""Between two looks for sign-outs at other instances whose announcement was lost."""
MAX_ENDED: Final = 10_000
"""Sessions that are kept; beyond, all that began as early as the first of them are over."""
_ALL_BEFORE: Final = ""
"""In place of a digest: all sessions are over that would end at this time or before."""


@dataclass(frozen=True, slots=True)
class OperatorSession:
    """Whoever signed in, either by a token or through the provider; what that allows now, the settings say."""

    name: str
    csrf: str
    """What its forms send back."""
    token: str = ""
    """The fingerprint of the token."""
    provider: str = ""
    """The fingerprint of the provider and its client."""
    claims: tuple[str, ...] = ()
    """The values of the claim that gives roles."""
    ends_at: int = 0
    """When it ends by itself, in milliseconds since the epoch."""

    @property
    def digest(self) -> str:
        """Names it where others may read."""
        return hashlib.sha256(self.csrf.encode()).hexdigest()


class CookieSealer:
    """Encrypts and authenticates what browsers keep for the console."""

    def __init__(self, key: bytes, clock: Callable[[], float] = time.time) -> None:
        """``key`` must not be in the database, whose readers could make sessions; ``clock`` returns Unix seconds."""
        self._key = hashlib.sha256(b"operators' sessions " + key).digest()
        self._fernet = Fernet(base64.urlsafe_b64encode(self._key))
        self._clock = clock

    def seal(self, value: Any) -> str:
        """Return a value of JSON as a cookie."""
        return self._fernet.encrypt_at_time(orjson.dumps(value), int(self._clock())).decode()

    def open(self, cookie: str, seconds: int) -> Any:
        """Return the value of a cookie that was sealed at most so many seconds ago; None if it is none."""
        try:
            return orjson.loads(self._fernet.decrypt_at_time(cookie, seconds, int(self._clock())))
        except (InvalidToken, ValueError):
            return None

    def seal_session(self, **fields: Any) -> str:
        """Return the cookie of a new session."""
        return self.seal({"csrf": secrets.token_urlsafe(24), **fields})

    def open_session(self, cookie: str) -> OperatorSession | None:
        """Return the session of a cookie; None when its time is over, or it is none of ours.

        Whether a sign-out ended it, :class:`mediator.operate.sessions.EndedSessions` knows.
        """
        value = self.open(cookie, SESSION_SECONDS)
        if not isinstance(value, dict) or "csrf" not in value:
            return None
        ends_at = (self._fernet.extract_timestamp(cookie) + SESSION_SECONDS) * 1000
        return OperatorSession(**{**value, "claims": tuple(value.get("claims", ())), "ends_at": ends_at})

    def fingerprint(self, *secret: str) -> str:
        """Return what stands for a secret: equal for equal ones, and useless without the key."""
        return hmac.new(self._key, "\0".join(secret).encode(errors="surrogateescape"), "sha256").hexdigest()


class EndedSessionTable(Table):
    """The sessions in SQL, by a digest each, with the time at which they would have ended by themselves."""

    _ADD = (
        "INSERT INTO ended_session (digest, ends_at) VALUES (?, ?) ON CONFLICT (digest) DO UPDATE"
        " SET ends_at = excluded.ends_at WHERE ended_session.ends_at < excluded.ends_at"
    )

    def add(self, digest: str, ends_at: int) -> None:
        """Keep a session; where there are too many, those that end first make way for one row that ends them all."""
        self._execute(self._ADD, (digest, ends_at))
        excess = int(self._session.one("SELECT count(*) FROM ended_session")[0]) - MAX_ENDED
        if excess > 0:
            sql = "SELECT ends_at FROM ended_session ORDER BY ends_at LIMIT 1 OFFSET ?"
            (before,) = self._session.one(sql, (excess,))
            self._execute("DELETE FROM ended_session WHERE ends_at <= ?", (before,))
            self._execute(self._ADD, (_ALL_BEFORE, before))

    def all(self) -> dict[str, int]:
        """Return the times by the digests."""
        return {row[0]: row[1] for row in self._execute("SELECT digest, ends_at FROM ended_session")}

    def forget(self, until: int, limit: int) -> int:
        """Remove at most ``limit`` that would have ended before a time; return how many."""
        old = "SELECT digest FROM ended_session WHERE ends_at < ? ORDER BY ends_at LIMIT ?"
        gone = self._execute(f"DELETE FROM ended_session WHERE digest IN ({old}) RETURNING digest", (until, limit))
        return len(list(gone))


class OldEndedSessions(CleanupStep):
    """Forgets ended sessions whose cookies would have expired by now."""

    name = "ended_sessions"

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Forget at most ``limit`` of them."""
        count = tx.table(EndedSessionTable).forget(now, limit)
        return SliceResult(count, count >= limit, {self.name: count})


class EndedSessions:
    """Those that this instance knows. Used on the event loop."""

    def __init__(self, broker: Broker, announcer: Announcer | None = None) -> None:
        self.changed: Callable[[], None] = lambda: None
        """Called when more sessions have ended, also at other instances."""
        self._broker = broker
        self._announcer = announcer
        self._ended: dict[str, int] = {}
        self._unwritten: dict[str, int] = {}
        """Those that the store has not taken yet."""
        self._task = CoalescingTask("ended-sessions", self.look)

    async def open(self) -> None:
        """Read the table, and listen to the other instances; :meth:`look` is to be called regularly."""
        self._learn(await self._broker.read(lambda tx, _now: tx.table(EndedSessionTable).all()))
        if self._announcer is not None:
            await self._announcer.listen(lambda _data: self._task.call())

    async def close(self) -> None:
        """Look no more."""
        await self._task.stop()

    def has(self, digest: str, ends_at: int) -> bool:
        """Whether a session was ended; ``ends_at`` is when it would end by itself, in milliseconds since the epoch."""
        return digest in self._ended or ends_at <= self._ended.get(_ALL_BEFORE, -1)

    async def end(self, digest: str, ends_at: int) -> None:
        """End a session: here at once, whatever happens; at the others, and for the time after a restart, on return.

        Raises :class:`MediatorError` when the store does not take it; :meth:`look` then tries again.
        """
        if len(self._unwritten) >= MAX_ENDED:
            raise BusyError(f"{MAX_ENDED} sign-outs wait for the store")
        self._unwritten[digest] = ends_at
        self._learn({digest: ends_at})
        await self.look()

    async def look(self) -> None:
        """Write what waits to be written, and learn what ended at other instances."""
        waiting = dict(self._unwritten)
        if not waiting and self._broker.alone:
            return

        def work(tx: Transaction, _now: int) -> dict[str, int]:
            table = tx.table(EndedSessionTable)
            for digest, ends_at in waiting.items():
                table.add(digest, ends_at)
            return table.all()

        if not waiting:
            self._learn(await self._broker.read(work))
            return
        self._learn(await self._broker.write(work, when_full=True))
        for digest in waiting:
            self._unwritten.pop(digest, None)
        if self._announcer is not None:
            await self._announcer.publish(b"")

    def _learn(self, more: Mapping[str, int]) -> None:
        # Only ever adds: what was read before another look may be taken over after it.
        new = {digest: ends_at for digest, ends_at in more.items() if ends_at > self._ended.get(digest, -1)}
        if not new:
            return
        ended = self._ended | new
        # A day's grace, as the clock may be set back.
        over = max(ended.get(_ALL_BEFORE, -1), self._broker.clock() - DAY)
        self._ended = {digest: at for digest, at in ended.items() if at > over or digest == _ALL_BEFORE}
        self.changed()
