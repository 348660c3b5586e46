"""Who may use the door, and how much: allow and deny lists, and message rates of addresses and connections."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_network

import structlog
from aiohttp import web
from multidict import MultiMapping

from mediator.announcer import Announcer
from mediator.errors import DeniedError, MediatorError, RateLimitedError
from mediator.http.connections import Address, ClientAddresses, group
from pickup.broker import MediationBroker
from pickup.metrics import DidcommMetrics
from pickup.rules import granting
from pickup.rules.names import canonical
from pickup.rules.records import AccessRule, Connection, Verdict
from pickup.rules.tables import MediationTransaction

LOOK_SECONDS = 30.0
"""How often the database is read for changes of other instances whose announcement was lost."""

log = structlog.get_logger("didcomm.access")


class AccessLists:
    """Says who is denied. Names become part of the rules of mediation; of several networks, the smallest decides."""

    def __init__(self, mediation: MediationBroker, announcer: Announcer | None = None) -> None:
        self._mediation = mediation
        self._announcer = announcer
        self._configured = mediation.rules.allowed
        self._rules: Sequence[AccessRule] = ()
        self._networks: dict[tuple[int, int], dict[int, Verdict]] = {}
        """By IP version and bits of the prefix, the longest first: verdicts by the prefix as a number."""
        self._renewing = asyncio.Lock()
        self._announced = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.changed: Callable[[], Awaitable[None]] | None = None
        """Called after every change, also of another instance: closes what is denied by now."""

    async def open(self) -> None:
        """Read the lists, and listen to the other instances."""
        await self._renew()
        if self._announcer is not None:
            await self._announcer.listen(self._heard)
            self._tasks.add(asyncio.create_task(self._follow(), name="didcomm-access-lists"))

    async def close(self) -> None:
        """Stop renewing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _heard(self, _data: bytes) -> None:
        self._announced.set()

    async def _follow(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._announced.wait()
            self._announced.clear()
            await self._reload()

    async def _reload(self) -> None:
        """Read the lists again; if the database cannot be read, try again later."""
        try:
            await self._renew()
        except MediatorError as error:
            log.warning("cannot read the allow and deny lists", code=error.code)

    async def _renew(self) -> None:
        async with self._renewing:
            rules = await self._mediation.read(lambda tx, _now: tx.access_rules.all())
            if rules == self._rules:
                return
            self._rules = rules
            names: dict[Verdict, set[str]] = {Verdict.ALLOW: set(), Verdict.DENY: set()}
            networks: dict[tuple[int, int], dict[int, Verdict]] = {}
            for rule in rules:
                if canonical(rule.name) is not None:
                    names[rule.verdict].add(rule.name)
                    continue
                network = ip_network(rule.name)
                prefix = int(network.network_address) >> (network.max_prefixlen - network.prefixlen)
                networks.setdefault((network.version, network.prefixlen), {})[prefix] = rule.verdict
            self._networks = dict(sorted(networks.items(), reverse=True))
            self._mediation.rules = replace(
                self._mediation.rules,
                allowed=self._configured | names[Verdict.ALLOW],
                denied=frozenset(names[Verdict.DENY]),
            )
            if self.changed is not None:
                await self.changed()

    def rules(self, verdict: Verdict) -> list[AccessRule]:
        """Return one list, the oldest first."""
        return [rule for rule in self._rules if rule.verdict is verdict]

    async def add(self, verdict: Verdict, name: str, note: str) -> AccessRule:
        """Put a name on a list; raises as :func:`granting.parse_name` and :func:`granting.add_access_rule`."""
        name = granting.parse_name(name)

        def work(tx: MediationTransaction, now: int) -> AccessRule:
            rule = AccessRule(name, verdict, note, now)
            granting.add_access_rule(tx, rule)
            return rule

        rule = await self._mediation.write(work)
        await self._announce()
        return rule

    async def remove(self, verdict: Verdict, name: str) -> str:
        """Take a name off a list, and return it; raises as :func:`granting.remove_access_rule`."""
        name = granting.parse_name(name)
        await self._mediation.write(
            lambda tx, _now: granting.remove_access_rule(tx, name, verdict), even_when_full=True
        )
        await self._announce()
        return name

    async def _announce(self) -> None:
        await self._reload()
        if self._announcer is not None:
            await self._announcer.publish(b"")

    def verdict(self, address: Address) -> Verdict | None:
        """Return what the smallest network on a list that has the address says; None: it is on none."""
        number = int(address)
        for (version, bits), prefixes in self._networks.items():
            if version == address.version:
                found = prefixes.get(number >> (address.max_prefixlen - bits))
                if found is not None:
                    return found
        return None

    def denies(self, caller: str | None, connection: Connection | None) -> bool:
        """Whether a canonical caller, or the peer of a connection, is denied."""
        rules = self._mediation.rules
        if not rules.denied:
            return False
        return caller in rules.denied or (connection is not None and granting.is_denied(rules, connection))


MAX_BUCKETS = 100_000
"""Buckets that are not full; above it, the ones that were used longest ago count as full."""


class RateLimiter:
    """Buckets of ``rate * burst`` tokens, which get ``rate`` a second; a full one is not kept.

    A bucket is kept as the time at which it will be full.
    """

    def __init__(
        self, rate: float, burst: float, *, max_buckets: int = MAX_BUCKETS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``rate`` is in messages a second, ``burst`` in seconds."""
        self._interval = 1 / rate
        self._burst = max(burst, self._interval)
        self._max_buckets = max_buckets
        self._clock = clock
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        """Return how many buckets are kept."""
        return len(self._full_at)

    def acquire(self, key: Hashable) -> float:
        """Take a token; 0, or in how many seconds there is one, and none is taken."""
        now = self._clock()
        full_at = max(self._full_at.get(key, now), now) + self._interval
        wait = full_at - now - self._burst
        # A rounding error must not refuse the last token.
        if wait > 1e-9:
            return wait
        self._set_bucket(key, full_at, now)
        return 0

    def reserve(self, key: Hashable) -> float:
        """Take a token in any case, and return in how many seconds it is there."""
        now = self._clock()
        full_at = max(self._full_at.get(key, now), now) + self._interval
        self._set_bucket(key, full_at, now)
        return max(0.0, full_at - now - self._burst)

    def _set_bucket(self, key: Hashable, full_at: float, now: float) -> None:
        self._full_at[key] = full_at
        self._full_at.move_to_end(key)
        # The oldest are usually full by now.
        for _ in range(2):
            oldest, at = next(iter(self._full_at.items()))
            if at <= now or len(self._full_at) > self._max_buckets:
                del self._full_at[oldest]


class AddressGate:
    """The first thing that a POST, a WebSocket and each of its frames pass."""

    def __init__(
        self, addresses: ClientAddresses, access: AccessLists, limiter: RateLimiter | None, metrics: DidcommMetrics
    ) -> None:
        """``limiter``: of messages from one address; allowed networks have no limit."""
        self._addresses = addresses
        self._access = access
        self._limiter = limiter
        self._metrics = metrics

    def admit(self, peer: Address | None, headers: MultiMapping[str]) -> None:
        """Count one message; raises :class:`DeniedError` and :class:`RateLimitedError`."""
        address = self._addresses.of(peer, headers)
        if address is None:
            return
        verdict = self._access.verdict(address)
        if verdict is Verdict.DENY:
            raise DeniedError
        if self._limiter is not None and verdict is None:
            wait = self._limiter.acquire(group(address))
            if wait:
                self._metrics.limited("address")
                raise RateLimitedError("address", math.ceil(wait))

    def find(self, request: web.Request) -> Address | None:
        """Return the address that a request comes from."""
        return self._addresses.of_request(request)

    def denies(self, address: Address | None) -> bool:
        """Whether the operator denies the address."""
        return address is not None and self._access.verdict(address) is Verdict.DENY

    def reserve(self, address: Address | None) -> float:
        """Count one frame; return the seconds until the next one may be read."""
        if self._limiter is None or address is None or self._access.verdict(address) is not None:
            return 0
        wait = self._limiter.reserve(group(address))
        if wait:
            self._metrics.limited("address")
        return wait
