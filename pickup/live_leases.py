"""Leases of a live session: mail on its way to its holder is neither counted nor delivered again (D6)."""

import asyncio
import itertools
from collections.abc import Collection, Sequence

from mediator.mailboxes.message import Message

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

    def take(self, messages: Sequence[Message], now: int) -> None:
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
