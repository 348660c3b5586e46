"""Forwards what rules copied: a task for each rule reads its mailbox, and waits for the confirmations (C7).

Which copies are confirmed is in the database, by the rules of :mod:`mediator.mailboxes.forwarding`; nothing here
outlives the process.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Protocol, TypeVar

import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError, NoSuchMailboxError
from mediator.mailboxes import forwarding
from mediator.mailboxes.bounds import SECOND
from mediator.mailboxes.copy_rule import UNREAD, CopyRule, ForwardState
from mediator.mailboxes.forwarding import Attempt, Batch
from mediator.mailboxes.mailbox import MailboxKey
from mediator.store.writer import Work

LOOK_SECONDS: Final = 1.0
"""Between two looks for rules that came or went, which read nothing."""
SHARED_LOOK_SECONDS: Final = 5.0
"""The same where other instances change rules too: each look is a small transaction."""
IDLE_SECONDS: Final = 10.0
"""Between two looks for mail of which no wake-up told."""
STORE_SECONDS: Final = 5.0
"""Before another try where the store refused."""
LAG_SECONDS: Final = 15

T = TypeVar("T")

log = structlog.get_logger("forwarder")


class Target(Protocol):
    """Where copies go."""

    max_batch: int
    """Copies of one batch."""
    max_delay: int
    """Milliseconds between two attempts, at most."""

    async def send(self, rule: CopyRule, batch: Batch) -> Attempt:
        """Send copies in their order, and wait for the confirmation of each; raises nothing.

        It takes less than the lease of a batch.
        """


class Forwarder:
    """Runs a task for each rule that forwards. Used on the event loop."""

    def __init__(self, broker: Broker, jetstream: Target, webhook: Target) -> None:
        self._broker = broker
        self._rules = broker.copy_rules
        self._jetstream = jetstream
        self._webhook = webhook
        self._seen: object = None
        self._tasks: dict[CopyRule, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._watch = asyncio.create_task(self._follow_rules(), name="forwarder")

    async def close(self) -> None:
        """Stop; what is on its way comes again after a restart."""
        tasks = [*self._tasks.values(), *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def measure(self) -> None:
        """Measure how far the confirmations are behind."""
        for rule in list(self._tasks):
            with suppress(MediatorError):
                lag = await self._broker.read(lambda tx, now, rule=rule: forwarding.measure_lag(tx, rule, now))  # type: ignore[misc]
                if rule in self._tasks:
                    self._state(rule).lag = lag

    async def _follow_rules(self) -> None:
        while True:
            if self._rules.revision == UNREAD or not self._broker.alone:
                # The rules are read by the transaction that asks for them; another instance may have changed some.
                with suppress(MediatorError):
                    await self._broker.write(lambda tx, _now: tx.copy_rules.of(""), even_when_full=True)
            if self._rules.by_tenant is not self._seen:
                self._seen = self._rules.by_tenant
                self._adjust(set(self._choose()))
            await asyncio.sleep(LOOK_SECONDS if self._broker.alone else SHARED_LOOK_SECONDS)

    def _choose(self) -> Iterator[CopyRule]:
        """Yield one rule for each mailbox from which copies go on: with two, each would miss what the other took (C7).

        Rules of the settings, which nobody compares with those of the database, come first.
        """
        rules = [rule for some in self._rules.by_tenant.values() for rule in some if rule.forwards]
        for ended in self._rules.forwarding.keys() - {(rule.tenant, rule.name) for rule in rules}:
            del self._rules.forwarding[ended]
        taken = dict[MailboxKey, str]()
        for rule in sorted(rules, key=lambda rule: not rule.configured):
            other = taken.setdefault((rule.tenant, rule.to_address), rule.name)
            if other == rule.name:
                yield rule
            else:
                self._state(rule).problem = f"rule {other} forwards from the same mailbox"

    def _adjust(self, rules: set[CopyRule]) -> None:
        for rule in self._tasks.keys() - rules:
            self._tasks.pop(rule).cancel()
        for rule in rules - self._tasks.keys():
            self._tasks[rule] = asyncio.create_task(self._forward_all(rule), name=f"forward {rule.name}")

    def _state(self, rule: CopyRule) -> ForwardState:
        return self._rules.forwarding[rule.tenant, rule.name]

    async def _forward_all(self, rule: CopyRule) -> None:
        if self._broker.alone:
            with suppress(MediatorError):
                await self._write(rule, lambda tx, now: forwarding.release(tx, rule, now))
        with self._broker.watching((rule.tenant, rule.to_address)) as woken:
            while True:
                try:
                    await self._forward(rule, self._jetstream if rule.to_subject else self._webhook, woken)
                except NoSuchMailboxError:
                    # The error names the mailbox, which not everybody may know who sees the rule (A7).
                    self._state(rule).problem = "the mailbox for copies does not exist"
                    await asyncio.sleep(STORE_SECONDS)
                except MediatorError as error:
                    self._state(rule).problem = str(error)
                    await asyncio.sleep(STORE_SECONDS)
                except Exception:
                    log.exception("copies not forwarded", rule=rule.name, tenant=rule.tenant)
                    await asyncio.sleep(STORE_SECONDS)

    async def _forward(self, rule: CopyRule, target: Target, woken: asyncio.Event) -> None:
        """Forward one batch, or wait for one."""
        woken.clear()
        bounds = self._broker.bounds
        batch = await self._write(rule, lambda tx, now: forwarding.lease_batch(tx, bounds, rule, target.max_batch, now))
        if batch.retry_at is not None:
            rest = (batch.retry_at - self._broker.clock()) / SECOND
            await asyncio.sleep(min(max(rest, 0.001), IDLE_SECONDS))
        elif not batch.copies:
            self._state(rule).problem = ""
            with suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), IDLE_SECONDS)
        else:
            attempt = await target.send(rule, batch)
            deliveries = max(copy.message.deliveries for copy in batch.copies)
            delay = min(SECOND << min(deliveries - 1, 20), target.max_delay) if attempt.problem else 0
            await self._write(rule, lambda tx, now: forwarding.settle(tx, rule, batch, attempt, delay, now))
            state = self._state(rule)
            state.problem = attempt.problem
            state.forwarded += len(attempt.confirmed)
            state.failed += len(batch.copies) - len(attempt.confirmed) - len(attempt.untried)

    async def _write(self, rule: CopyRule, work: Work[T]) -> T:
        return await self._broker.write(work, (rule.tenant, rule.to_address), even_when_full=True)
