"""Leases of a live session: mail that is on its way to its holder, and is not counted or handed out meanwhile (D6)."""

import asyncio
import itertools
from collections.abc import Collection, Sequence

from mediator.mailboxes.message import Message

MAX_LEASED = 1000
"""Messages of one session, about 100 KiB at most; beyond them the oldest leases end early, and those may come again."""


class LiveLeases:
    """What one session handed out and its holder has not acknowledged yet; nothing outlives the session."""

    def __init__(self, span: int, start: int = 0) -> None:
        """``span`` is how long a lease lasts, in milliseconds; 0: there are none.

        ``start`` is the msg_id from which on mail came while live mode was on. What was there before is never leased:
        it goes out on request alone, and comes again until it is acknowledged (D2).
        """
        self.lock = asyncio.Lock()
        """Held from looking which messages are leased until those that were chosen are: each goes out once."""
        self._span = span
        self._start = start
        self._since: dict[int, int] = {}
        """When each lease began, the oldest first."""

    def leased(self, now: int) -> Collection[int]:
        """Return the msg_ids under a lease at ``now``, in milliseconds since the epoch."""
        for msg_id, since in list(self._since.items()):
            # One that seems to begin later was taken before the clock was set back, and would last too long.
            if since <= now < since + self._span:
                break
            del self._since[msg_id]
        return frozenset(self._since)

    def take(self, messages: Sequence[Message], now: int) -> None:
        """Lease messages that go out."""
        for message in messages:
            if self._span and message.msg_id >= self._start:
                self._since.pop(message.msg_id, None)
                self._since[message.msg_id] = now
        for msg_id in list(itertools.islice(self._since, max(0, len(self._since) - MAX_LEASED))):
            del self._since[msg_id]

    def release(self, ids: Collection[int]) -> None:
        """End leases: the messages were acknowledged, or did not go out after all."""
        for msg_id in ids:
            self._since.pop(msg_id, None)
