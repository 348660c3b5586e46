"""What waits in all mailboxes: measured in small slices that rest in between, and shown as metrics and to operators."""

import asyncio
import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.mailboxes.bounds import SECOND, Quota
from mediator.mailboxes.mailbox import Kind
from mediator.mailboxes.message import Usage
from mediator.mailboxes.tables.backlog import Backlogs, GroupBacklog, MailboxBacklog
from mediator.mailboxes.transaction import Transaction
from mediator.operate.units import format_bytes

SLICE: Final = 200
"""Mailboxes of one read; with a group each they take about 3 ms."""
SPARING: Final = 25
"""A pass rests so many times what a slice took after each, and so does the next pass before it begins."""
QUICK_SECONDS: Final = 0.1
"""A pass that works no longer does not rest, and whoever asks waits for it."""
WAIT_SECONDS: Final = 1.0
KEPT: Final = 10
"""Mailboxes that are kept of each kind, at least."""
NEARLY: Final = 0.9
"""The part of a quota from which it is nearly used up."""


@dataclass(slots=True)
class BacklogTotals:
    """What a tenant's mailboxes hold, or all of them. Times are milliseconds since the epoch."""

    mailboxes: int = 0
    """Those that the quota of mailboxes counts."""
    messages: int = 0
    bytes: int = 0
    delayed: int = 0
    delayed_bytes: int = 0
    given_back: int = 0
    leased: int = 0
    dead: int = 0
    lagging: int = 0
    """Groups for which a message has waited for too long."""
    full: int = 0
    """Mailboxes at their quota."""
    waiting_since: int | None = None
    """Since when a message waits for a reader, those of wallets aside."""
    wallet_waiting_since: int | None = None

    @property
    def held(self) -> Usage:
        """What counts against a quota."""
        return Usage(self.messages + self.delayed, self.bytes + self.delayed_bytes)

    def quota_use(self, quota: Quota) -> tuple[float, str]:
        """Return the part of its fullest quota that is used, and what that is, such as ``4 of 5 messages``."""
        held = self.held
        parts = [
            (use / limit, f"{show(use)} of {show(limit)}{what}")
            for use, limit, show, what in (
                (held.messages, quota.messages, str, " messages"),
                (held.bytes, quota.bytes, format_bytes, ""),
                (self.mailboxes, quota.mailboxes, str, " mailboxes"),
            )
            if limit
        ]
        return max(parts, default=(0.0, ""))

    def add(self, mailbox: MailboxBacklog) -> None:
        """Count a mailbox."""
        self.mailboxes += mailbox.is_counted
        self.messages += mailbox.messages
        self.bytes += mailbox.bytes
        self.delayed += mailbox.delayed
        self.delayed_bytes += mailbox.delayed_bytes
        self.given_back += mailbox.given_back
        self.leased += mailbox.leased
        self.dead += mailbox.dead
        since = mailbox.waiting_since
        if since is not None and mailbox.kind is Kind.MEDIATION:
            self.wallet_waiting_since = min(since, self.wallet_waiting_since or since)
        elif since is not None:
            self.waiting_since = min(since, self.waiting_since or since)


class _Worst:
    """Keeps those with the highest rank."""

    def __init__(self, kept: int, rank: Callable[[MailboxBacklog], float]) -> None:
        self._kept = kept
        self._rank = rank
        self._found: list[MailboxBacklog] = []

    def add(self, mailbox: MailboxBacklog) -> None:
        self._found.append(mailbox)
        if len(self._found) >= 10 * self._kept:
            self._found = self.all()

    def all(self) -> list[MailboxBacklog]:
        return heapq.nlargest(self._kept, self._found, key=self._rank)


@dataclass(slots=True)
class Backlog:
    """What one pass found."""

    began_at: int
    """Milliseconds since the epoch."""
    total: BacklogTotals = field(default_factory=BacklogTotals)
    tenants: dict[str, BacklogTotals] = field(default_factory=dict)
    deepest: Sequence[MailboxBacklog] = ()
    """The mailboxes with the most messages, first."""
    longest_waiting: Sequence[MailboxBacklog] = ()
    most_dead: Sequence[MailboxBacklog] = ()
    lagging: Sequence[tuple[MailboxBacklog, GroupBacklog]] = ()
    """Groups that lag, the longest first."""
    fullest: Sequence[tuple[MailboxBacklog, float]] = ()
    """Mailboxes whose quota is nearly used up or more, with the part of it."""
    worked_seconds: float = 0.0
    ended: float = 0.0
    """By the steady clock."""


class BacklogMeter:
    """Measures when it is asked, but never more than :data:`SPARING` allows. Used on the event loop."""

    def __init__(self, broker: Broker, lag_minutes: int, kept: int) -> None:
        """``lag_minutes``: how long a message may wait for a group; 0: for ever. ``kept``: mailboxes of each kind."""
        self._broker = broker
        self._lag = lag_minutes * 60 * SECOND or inf
        self._kept = max(kept, KEPT)
        self.latest: Backlog | None = None
        self._pass: asyncio.Task[None] | None = None

    async def current(self) -> Backlog | None:
        """Return what the last pass found; begin another if it is time, and wait for it where that takes a moment.

        None: no pass has come to its end.
        """
        latest = self.latest
        if self._pass is None and (
            latest is None or time.monotonic() - latest.ended >= latest.worked_seconds * SPARING
        ):
            self._pass = asyncio.create_task(self._measure(), name="backlog")
        if self._pass is not None and (latest is None or latest.worked_seconds <= QUICK_SECONDS):
            await asyncio.wait([self._pass], timeout=WAIT_SECONDS)
        return self.latest

    async def close(self) -> None:
        """End the pass that is running."""
        if self._pass is not None:
            self._pass.cancel()
            await asyncio.gather(self._pass, return_exceptions=True)

    async def _measure(self) -> None:
        try:
            # What is wrong with the store is for the health check to say.
            with suppress(MediatorError):
                self.latest = await self._go_through()
        finally:
            self._pass = None

    async def _go_through(self) -> Backlog:
        found = Backlog(self._broker.clock())
        tenants: defaultdict[str, BacklogTotals] = defaultdict(BacklogTotals)
        quota = self._broker.bounds.mailbox
        deepest = _Worst(self._kept, lambda mailbox: mailbox.messages)
        longest = _Worst(self._kept, lambda mailbox: -(mailbox.waiting_since or inf))
        dead = _Worst(self._kept, lambda mailbox: mailbox.dead)
        fullest: list[tuple[MailboxBacklog, float]] = []
        lagging: list[tuple[MailboxBacklog, GroupBacklog]] = []
        after = 0
        while True:
            begun = time.perf_counter()
            mailboxes = await self._broker.read(partial(_read_slice, after))
            if not mailboxes:
                break
            after = mailboxes[-1].id
            for mailbox in mailboxes:
                totals = tenants[mailbox.tenant]
                late = [group for group in mailbox.groups if self._lags(group, found.began_at)]
                full = _use_of_mailbox(mailbox, quota)
                for each in (found.total, totals):
                    each.add(mailbox)
                    each.lagging += len(late)
                    each.full += full >= 1
                lagging += [(mailbox, group) for group in late]
                if mailbox.messages:
                    deepest.add(mailbox)
                if mailbox.waiting_since is not None and mailbox.kind is not Kind.MEDIATION:
                    longest.add(mailbox)
                if mailbox.dead:
                    dead.add(mailbox)
                if full >= NEARLY:
                    fullest.append((mailbox, full))
            fullest = heapq.nlargest(self._kept, fullest, key=lambda pair: pair[1])
            lagging = heapq.nsmallest(self._kept, lagging, key=lambda pair: pair[1].waiting_since or 0)
            spent = time.perf_counter() - begun
            found.worked_seconds += spent
            if found.worked_seconds > QUICK_SECONDS:
                await asyncio.sleep(spent * SPARING)
        found.tenants = dict(tenants)
        found.deepest, found.longest_waiting, found.most_dead = deepest.all(), longest.all(), dead.all()
        found.fullest, found.lagging = fullest, lagging
        found.ended = time.monotonic()
        return found

    def _lags(self, group: GroupBacklog, now: int) -> bool:
        return group.waiting_since is not None and now - group.waiting_since >= self._lag


def _read_slice(after: int, tx: Transaction, now: int) -> list[MailboxBacklog]:
    return tx.table(Backlogs).read_slice(after, SLICE, now)


def _use_of_mailbox(mailbox: MailboxBacklog, quota: Quota) -> float:
    """Return the part of its fullest quota that a mailbox has used."""
    messages = (mailbox.messages + mailbox.delayed) / quota.messages if quota.messages else 0.0
    size = (mailbox.bytes + mailbox.delayed_bytes) / quota.bytes if quota.bytes else 0.0
    return max(messages, size)


class BacklogSeries(Collector):
    """The last pass as series; may be collected on any thread."""

    def __init__(
        self, meter: BacklogMeter, quota_of: Callable[[str], Quota], tenants: Collection[str], mailboxes: int
    ) -> None:
        """``tenants`` have series of their own, which may become more, and so many of the worst ``mailboxes``."""
        self._meter = meter
        self._quota_of = quota_of
        self._tenants = tenants
        self._mailboxes = mailboxes

    def collect(self) -> Iterator[Metric]:
        """Return the series, for the library; none before the first pass has ended."""
        backlog = self._meter.latest
        if backlog is None:
            return
        now = time.time()
        yield from self._of_all(backlog, now)
        if self._tenants:
            yield from self._by_tenant(backlog, now)
        if self._mailboxes:
            yield from self._worst(backlog, now)

    def _of_all(self, backlog: Backlog, now: float) -> Iterator[Metric]:
        total = backlog.total
        uses = [held.quota_use(self._quota_of(tenant))[0] for tenant, held in backlog.tenants.items()]
        yield GaugeMetricFamily(
            "mediator_backlog_age_seconds",
            "Time since the backlog was measured: what is stored, waits, is delayed, leased or dead. All instances on "
            "one database measure the same.",
            value=now - backlog.began_at / 1000,
        )
        yield GaugeMetricFamily("mediator_stored_messages", "Messages that can be fetched.", value=total.messages)
        yield GaugeMetricFamily("mediator_stored_bytes", "Bytes of messages that can be fetched.", value=total.bytes)
        yield GaugeMetricFamily(
            "mediator_delayed_messages", "Messages sent with a delay that are not due yet.", value=total.delayed
        )
        yield GaugeMetricFamily(
            "mediator_given_back_messages",
            "Messages that groups gave back with a delay that is not over, counted for each group.",
            value=total.given_back,
        )
        yield GaugeMetricFamily(
            "mediator_leased_messages", "Messages under a lease, counted for each group.", value=total.leased
        )
        yield GaugeMetricFamily(
            "mediator_dead_messages",
            "Messages that were delivered as often as their group allows, without an ACK; counted for each group.",
            value=total.dead,
        )
        ages = GaugeMetricFamily(
            "mediator_oldest_waiting_seconds",
            "How long a message has waited for a reader, at most: since it came, or since a lease of it ended without "
            "an ACK. Readers are groups, or who reads a mailbox `until_ack` without one; wallets are apart.",
            labels=["reader"],
        )
        ages.add_metric(["group"], _age(total.waiting_since, now))
        ages.add_metric(["wallet"], _age(total.wallet_waiting_since, now))
        yield ages
        yield GaugeMetricFamily(
            "mediator_lagging_groups",
            "Groups for which a message has waited for `lag_minutes` or longer.",
            value=total.lagging,
        )
        yield GaugeMetricFamily("mediator_full_mailboxes", "Mailboxes at their quota.", value=total.full)
        yield GaugeMetricFamily(
            "mediator_quota_used_ratio",
            "The part of its fullest quota of messages, bytes or mailboxes that the fullest tenant has used.",
            value=max(uses, default=0.0),
        )

    def _by_tenant(self, backlog: Backlog, now: float) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "mediator_tenant_held_messages",
            "Messages that a tenant's mailboxes hold, delayed ones too.",
            labels=["tenant"],
        )
        size = GaugeMetricFamily(
            "mediator_tenant_held_bytes", "Bytes that a tenant's mailboxes hold.", labels=["tenant"]
        )
        delayed = GaugeMetricFamily(
            "mediator_tenant_delayed_messages", "Messages of a tenant that are not due yet.", labels=["tenant"]
        )
        leased = GaugeMetricFamily(
            "mediator_tenant_leased_messages", "Messages of a tenant under a lease.", labels=["tenant"]
        )
        dead = GaugeMetricFamily("mediator_tenant_dead_messages", "Dead messages of a tenant.", labels=["tenant"])
        lagging = GaugeMetricFamily("mediator_tenant_lagging_groups", "Groups of a tenant that lag.", labels=["tenant"])
        oldest = GaugeMetricFamily(
            "mediator_tenant_oldest_waiting_seconds",
            "How long a message of a tenant has waited for a reader, at most, mail of wallets aside.",
            labels=["tenant"],
        )
        used = GaugeMetricFamily(
            "mediator_tenant_quota_used_ratio",
            "The part of its fullest quota that a tenant has used.",
            labels=["tenant"],
        )
        for tenant in list(self._tenants):
            its = backlog.tenants.get(tenant, BacklogTotals())
            for family, value in (
                (held, its.held.messages),
                (size, its.held.bytes),
                (delayed, its.delayed),
                (leased, its.leased),
                (dead, its.dead),
                (lagging, its.lagging),
                (oldest, _age(its.waiting_since, now)),
                (used, its.quota_use(self._quota_of(tenant))[0]),
            ):
                family.add_metric([tenant], value)
        yield from (held, size, delayed, leased, dead, lagging, oldest, used)

    def _worst(self, backlog: Backlog, now: float) -> Iterator[Metric]:
        max_mailboxes = self._mailboxes
        messages = GaugeMetricFamily(
            "mediator_mailbox_messages", "Messages of the mailboxes that hold most, by number.", labels=["mailbox"]
        )
        size = GaugeMetricFamily(
            "mediator_mailbox_bytes", "Bytes of the mailboxes that hold most messages.", labels=["mailbox"]
        )
        oldest = GaugeMetricFamily(
            "mediator_mailbox_oldest_waiting_seconds",
            "How long a message has waited for a reader, at most, in the mailboxes where that is longest.",
            labels=["mailbox"],
        )
        dead = GaugeMetricFamily(
            "mediator_mailbox_dead_messages",
            "Dead messages of the mailboxes that hold most of them.",
            labels=["mailbox"],
        )
        for mailbox in backlog.deepest[:max_mailboxes]:
            messages.add_metric([f"id:{mailbox.id}"], mailbox.messages)
            size.add_metric([f"id:{mailbox.id}"], mailbox.bytes)
        for mailbox in backlog.longest_waiting[:max_mailboxes]:
            oldest.add_metric([f"id:{mailbox.id}"], _age(mailbox.waiting_since, now))
        for mailbox in backlog.most_dead[:max_mailboxes]:
            dead.add_metric([f"id:{mailbox.id}"], mailbox.dead)
        yield from (messages, size, oldest, dead)


def _age(since: int | None, now: float) -> float:
    return 0.0 if since is None else max(0.0, now - since / 1000)
