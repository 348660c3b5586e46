"""The clean-up's passes, slice by slice, for the scheduler and for the clean-up on its own (M1, S3, S5, F7)."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, fields

import structlog

from mediator.agents import collecting as agents
from mediator.agents.ports import SeenPlace as AgentPlace
from mediator.agents.records import Liveness
from mediator.broker import Broker
from mediator.errors import UnavailableError
from mediator.housekeeping.clock import ClockWatch, steady_clock
from mediator.housekeeping.slices import Slice
from mediator.mailboxes import abandoned, collecting
from mediator.mailboxes.collecting import Collected
from mediator.mailboxes.planning import Finding, plan
from mediator.mailboxes.ports import LeasePlace
from mediator.mediation import forgetting, replaying
from mediator.mediation.ports import SeenPlace
from mediator.metrics import Metrics
from mediator.store.base import Transaction

SLICE_SECONDS = 0.002
"""From the beginning of a slice's transaction to its end on disk: for so long senders wait behind it."""
LEASE_ROUND = 3600 * 1000
"""Milliseconds after which all ended leases are looked at again: a message may go after its lease was looked at."""
EXAMPLES = 5
"""How many of each kind a dry run names."""
CLOCKS_APART = 1000
"""Milliseconds by which the clocks of instances may differ without a lease being passed over until the next round."""

_log = structlog.get_logger("cleanup")


@dataclass(frozen=True, slots=True)
class _Done:
    """What one slice did."""

    removed: Collected
    count: int
    """How much the slice had to do with, removed or not."""
    more: bool
    leases_after: LeasePlace | None = None
    unseen_after: SeenPlace | None = None
    silent_after: AgentPlace | None = None


_Step = Callable[[Transaction, int, int], _Done]


class Collector:
    """Runs passes, one at a time, and none while the clock is not to be trusted. Used on the event loop."""

    def __init__(
        self,
        wall: int,
        forget_after: int,
        liveness: Liveness,
        metrics: Metrics | None = None,
        *,
        keep_groups: int = 0,
    ) -> None:
        """``wall`` is the time now, taken as right.

        After ``forget_after`` milliseconds connections that nobody uses are forgotten; 0: never. ``liveness`` says
        which agents are gone for long. ``keep_groups``: milliseconds after which queue groups without members are
        forgotten; 0: never.
        """
        self._forget_after = forget_after
        self._liveness = liveness
        self._keep_groups = keep_groups
        self._watch = ClockWatch(wall, steady_clock())
        self._metrics = metrics
        self._turn = asyncio.Lock()
        self._steps: dict[str, tuple[_Step, Slice]] = {
            name: (step, Slice(SLICE_SECONDS))
            for name, step in (
                ("connections", self._unused_connections),
                ("agents", self._silent_agents),
                ("removed_agents", _removed_agents),
                ("expired", _expired_mailboxes),
                ("messages", _expired_messages),
                ("retired", _retired_mailboxes),
                ("dedup_ids", _dedup_ids),
                ("replays", _replays),
                ("leases", self._ended_leases),
                ("groups", self._abandoned_groups),
            )
        }
        self._unseen_after = forgetting.FIRST
        self._silent_after = agents.FIRST
        self._leases_after = _FIRST_LEASE
        self._leases_since = steady_clock()
        self.last: Counter[str] = Counter()
        """What the last pass removed."""

    @property
    def paused(self) -> str | None:
        """Why nothing is collected, None while it is."""
        if not self._watch.paused:
            return None
        return (
            f"expiry is paused: the clock jumped {self._watch.ahead / 3_600_000:.1f} h ahead; set it back, "
            "or confirm that it is right with `mediator cleanup --confirm-clock`"
        )

    def trusts(self, now: int) -> bool:
        """Whether things may expire at this time; from any thread."""
        return self._watch.trusts(now, steady_clock())

    def look(self, wall: int) -> None:
        """Compare the clocks, and pause or go on."""
        was = self._watch.paused
        self._watch.look(wall, steady_clock())
        self._say(was)

    def confirm(self, wall: int) -> int:
        """Take the clock as right; returns how many milliseconds it stood ahead."""
        was, ahead = self._watch.paused, self._watch.ahead
        self._watch.confirm(wall, steady_clock())
        self._say(was)
        return ahead

    def _say(self, was: bool) -> None:
        if self._watch.paused and not was:
            _log.error("expiry paused: the clock jumped ahead", seconds=self._watch.ahead // 1000, why=self.paused)
        elif was and not self._watch.paused:
            _log.warning("expiry goes on")
        if self._metrics is not None:
            self._metrics.expiry_paused.set(self._watch.paused)

    async def run(self, broker: Broker) -> Counter[str]:
        """Remove what can go until there is no more, and return how much of each kind.

        Raises :class:`UnavailableError` when the clock jumped, or when the store cannot be written.
        """
        async with self._turn:
            self.look(broker.clock())
            if self.paused:
                raise UnavailableError(self.paused)
            total: Counter[str] = Counter()
            self._begin_lease_round(broker.clock())
            self._unseen_after = forgetting.FIRST
            self._silent_after = agents.FIRST
            # In turn, so that a million expired messages do not keep an expired mailbox waiting.
            waiting = deque(self._steps)
            while waiting:
                name = waiting.popleft()
                done = await self._slice(broker, *self._steps[name])
                if done is None:
                    self.look(broker.clock())
                    raise UnavailableError(self.paused or "the clock was moved during the clean-up")
                self._count(name, done.removed, total)
                if done.leases_after is not None:
                    self._leases_after = done.leases_after
                if done.unseen_after is not None:
                    self._unseen_after = done.unseen_after
                if done.silent_after is not None:
                    self._silent_after = done.silent_after
                if done.more:
                    waiting.append(name)
                if name in _RETIRING and done.count and "retired" not in waiting:
                    waiting.append("retired")
            self.last = total
            if total:
                _log.debug("cleaned up", **total)
            return total

    async def _slice(self, broker: Broker, step: _Step, size: Slice) -> _Done | None:
        """Run one slice; None: the clock is not to be trusted."""

        def work(tx: Transaction, now: int) -> tuple[_Done, float] | None:
            if not self.trusts(now):
                return None
            begun = time.perf_counter()
            return step(tx, now, size.limit), begun

        outcome = await broker.chore(work, when_full=True)
        if outcome is None:
            return None
        done, begun = outcome
        size.took(done.count, time.perf_counter() - begun)
        return done

    def _count(self, name: str, removed: Collected, total: Counter[str]) -> None:
        for field in fields(removed):
            count = getattr(removed, field.name)
            if not count:
                continue
            # A mailbox whose TTL is over gives back its address first; it is counted once, when it is gone.
            if name != "expired":
                total[field.name] += count
                if self._metrics is not None:
                    self._metrics.removed(field.name, count)

    def _begin_lease_round(self, wall: int) -> None:
        steady = steady_clock()
        if steady - self._leases_since >= LEASE_ROUND or self._leases_after.until > wall:
            self._leases_after, self._leases_since = _FIRST_LEASE, steady

    async def plan(self, broker: Broker) -> list[Finding]:
        """Say what :meth:`run` would remove now, and why; nothing is changed."""
        return await broker.read(
            lambda tx, now: [
                *plan(tx, now, EXAMPLES),
                *forgetting.plan(tx, self._forget_after, now, EXAMPLES),
                *agents.plan(tx, self._liveness, now, EXAMPLES),
                *abandoned.plan(tx, self._keep_groups, now, EXAMPLES),
            ]
        )

    def _unused_connections(self, tx: Transaction, now: int, limit: int) -> _Done:
        removed, after = forgetting.forget(tx, self._forget_after, self._unseen_after, now, limit)
        return _Done(removed, removed.total, more=after is not None, unseen_after=after)

    def _silent_agents(self, tx: Transaction, now: int, limit: int) -> _Done:
        removed, after = agents.collect(tx, self._liveness, self._silent_after, now, limit)
        return _Done(removed, removed.total, more=after is not None, silent_after=after)

    def _abandoned_groups(self, tx: Transaction, now: int, limit: int) -> _Done:
        return _full(abandoned.forget(tx, self._keep_groups, now, limit), limit)

    def _ended_leases(self, tx: Transaction, now: int, limit: int) -> _Done:
        removed, after = collecting.ended_leases(tx, self._leases_after, now, limit)
        if after is None:
            return _Done(removed, removed.total, more=False, leases_after=LeasePlace(now - CLOCKS_APART, 0, 0))
        return _Done(removed, limit, more=True, leases_after=after)


_FIRST_LEASE = LeasePlace(-1, 0, 0)
_RETIRING = frozenset({"connections", "expired"})
"""Steps whose mailboxes are retired, and removed by another step."""


def _expired_messages(tx: Transaction, now: int, limit: int) -> _Done:
    return _full(collecting.expired_messages(tx, now, limit), limit)


def _expired_mailboxes(tx: Transaction, now: int, limit: int) -> _Done:
    return _full(collecting.expired_mailboxes(tx, now, limit), limit)


def _dedup_ids(tx: Transaction, now: int, limit: int) -> _Done:
    return _full(collecting.dedup_ids(tx, now, limit), limit)


def _replays(tx: Transaction, now: int, limit: int) -> _Done:
    # Nobody misses an envelope that is too old to be taken again, so it is not counted.
    forgotten = replaying.forget(tx, now, limit)
    return _Done(Collected(), forgotten, more=forgotten >= limit)


def _retired_mailboxes(tx: Transaction, now: int, limit: int) -> _Done:
    # A mailbox is dropped by the slice that finds it empty, so only one that did nothing is the last.
    removed = collecting.retired_mailboxes(tx, now, limit)
    return _Done(removed, removed.total, more=removed.total > 0)


def _removed_agents(tx: Transaction, now: int, limit: int) -> _Done:
    # Nobody misses what followers were told long ago, so it is not counted.
    forgotten = agents.forget(tx, now, limit)
    return _Done(Collected(), forgotten, more=forgotten >= limit)


def _full(removed: Collected, limit: int) -> _Done:
    """A slice that was not full is the last: what expires meanwhile is left to the next pass, and costs no commit."""
    return _Done(removed, removed.total, more=removed.total >= limit)
