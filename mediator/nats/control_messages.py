"""Authenticates the messages between services, on subjects to which clients could publish.

A control message carries its sender, a stamp that only grows, and an HMAC over both, its subject and its body. The key
is shared by all services on one database. Messages that are forged, replayed, or older than
:data:`MAX_AGE_SECONDS` are refused.
"""

import hmac
import secrets
import struct
import time
from collections.abc import Callable
from typing import Final

ROOT: Final = "mq9ctl."
"""The prefix of all control subjects: a server without accounts can deny clients ``mq9ctl.>`` in one line."""
LIVE: Final = ROOT + "live"
"""Live sessions of wallets that were opened (D6)."""
WAKE: Final = ROOT + "wake"
"""Mailboxes that received mail (F2)."""
ACCESS: Final = ROOT + "access"
"""The allow and deny lists of the DIDComm door have changed."""
FOUND: Final = ROOT + "found"
"""Search results that are kept for their next pages (G3)."""
SEEN: Final = ROOT + "seen"
"""What each instance does, for the console of the others."""
GATEWAY: Final = ROOT + "gateway."
"""To one gateway, which client is which tenant; its name follows (A6)."""
TENANTS: Final = ROOT + "tenants"
"""Tenants of the database have changed."""
ASKED: Final = ROOT + "asked"
"""Searches that were answered, for those who say who served them (G5)."""
SESSIONS: Final = ROOT + "sessions"
"""Sessions of operators that were ended."""
BROADCAST: Final = ROOT + "cast."
"""Broadcasts that are not stored; the tenant and the rest of the subject follow (E9)."""
SECOND_TOKENS: Final = frozenset(
    subject.split(".")[1] for subject in (LIVE, WAKE, ACCESS, FOUND, SEEN, GATEWAY, TENANTS, ASKED, SESSIONS, BROADCAST)
)

KEY_BYTES: Final = 32
MAX_AGE_SECONDS: Final = 120
"""How far a timestamp may be from the receiver's clock; the clocks of machines must agree better than that."""
MAX_SENDERS: Final = 1000

FORGED: Final = "forged"
REPLAYED: Final = "replayed"
LATE: Final = "late"

_HEAD: Final = struct.Struct(">B8sQ32s")
_VERSION: Final = 1
_MAX_AGE: Final = MAX_AGE_SECONDS * 1_000_000_000
OVERHEAD: Final = _HEAD.size
"""Bytes that sealing adds to a body."""


class ControlRefusedError(Exception):
    """A control message is refused; ``reason`` is :data:`FORGED`, :data:`REPLAYED` or :data:`LATE`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ControlSealer:
    """Seals the messages of one process, which must be sent in the order in which they were sealed."""

    def __init__(self, key: bytes, clock: Callable[[], int] = time.time_ns) -> None:
        """``key`` has :data:`KEY_BYTES` bytes; ``clock`` gives nanoseconds since the epoch."""
        self._keyed = hmac.new(key, digestmod="sha256")
        self._clock = clock
        self._sender = secrets.token_bytes(8)
        self._stamp = 0

    def seal(self, subject: str, body: bytes) -> bytes:
        """Return the payload of a control message."""
        now = self._clock()
        if now + _MAX_AGE < self._stamp:
            # The clock was far ahead and was set back: receivers would refuse all further messages of this sender.
            self._sender, self._stamp = secrets.token_bytes(8), 0
        self._stamp = max(self._stamp + 1, now)
        mac = _mac(self._keyed, subject, self._sender, self._stamp, body)
        return _HEAD.pack(_VERSION, self._sender, self._stamp, mac) + body


class ControlOpener:
    """Opens the messages of one subscription, and remembers the last timestamp of each sender."""

    def __init__(self, key: bytes, clock: Callable[[], int] = time.time_ns) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._clock = clock
        self._stamps: dict[bytes, int] = {}

    def open(self, subject: str, payload: bytes) -> bytes:
        """Return the body of a control message; raises :class:`ControlRefusedError`."""
        if len(payload) < _HEAD.size:
            raise ControlRefusedError(FORGED)
        version, sender, stamp, mac = _HEAD.unpack_from(payload)
        body = payload[_HEAD.size :]
        if version != _VERSION or not hmac.compare_digest(mac, _mac(self._keyed, subject, sender, stamp, body)):
            raise ControlRefusedError(FORGED)
        now = self._clock()
        if abs(now - stamp) > _MAX_AGE:
            raise ControlRefusedError(LATE)
        if stamp <= self._stamps.get(sender, 0):
            raise ControlRefusedError(REPLAYED)
        if sender not in self._stamps and len(self._stamps) >= MAX_SENDERS:
            # Forgotten senders are so old that their messages would be refused as late.
            self._stamps = {each: at for each, at in self._stamps.items() if now - at <= _MAX_AGE}
        self._stamps[sender] = stamp
        return body


def _mac(keyed: hmac.HMAC, subject: str, sender: bytes, stamp: int, body: bytes) -> bytes:
    # Not by hmac.digest(), which lets other threads run: to get its turn again costs more than a short message.
    name = subject.encode("utf-8", "replace")
    made = keyed.copy()
    made.update(b"%d %b %b %d %b" % (len(name), name, sender, stamp, body))
    return made.digest()
