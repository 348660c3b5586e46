"""The operator's allow and deny lists as each instance applies them: in memory, and renewed from the database."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_network

import structlog

from mediator.announcer import Announcer
from mediator.errors import MediatorError
from mediator.http.connections import Address
from pickup.broker import MediationBroker
from pickup.rules import granting
from pickup.rules.names import canonical
from pickup.rules.records import AccessRule, Connection, Verdict

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
            self._tasks.add(asyncio.create_task(self._look_often(), name="didcomm-access-lists"))

    async def close(self) -> None:
        """Stop renewing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _heard(self, _data: bytes) -> None:
        self._announced.set()

    async def _look_often(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._announced.wait()
            self._announced.clear()
            await self._look()

    async def _look(self) -> None:
        """Read the lists again; a database that cannot be read is looked at again later."""
        try:
            await self._renew()
        except MediatorError as error:
            log.warning("cannot read the allow and deny lists", code=error.code)

    async def _renew(self) -> None:
        async with self._renewing:
            rules = await self._mediation.list_access_rules()
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
        """Put a name on a list; raises as :func:`access.parse_name` and :func:`access.add`."""
        rule = await self._mediation.add_access_rule(AccessRule(granting.parse_name(name), verdict, note, 0))
        await self._announce()
        return rule

    async def remove(self, verdict: Verdict, name: str) -> str:
        """Take a name off a list, and return it; raises as :func:`access.parse_name` and :func:`access.remove`."""
        name = granting.parse_name(name)
        await self._mediation.remove_access_rule(name, verdict)
        await self._announce()
        return name

    async def _announce(self) -> None:
        await self._look()
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

    def denies(self, names: Iterable[str | None]) -> bool:
        """Whether one of these canonical names is denied."""
        return not self._mediation.rules.denied.isdisjoint(names)

    def denies_connection(self, connection: Connection) -> bool:
        """Whether the peer of a connection is denied."""
        return granting.is_denied(self._mediation.rules, connection)
