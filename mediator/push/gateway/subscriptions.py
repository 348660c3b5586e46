"""The subscriptions to stored mail of a gateway: counted, opened at their sources, tried again, ended (E6, E7)."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final

import structlog

from mediator.config.sections import PushSettings
from mediator.errors import BusyError, MediatorError, QuotaExceededError, UnavailableError
from mediator.nats import subjects
from mediator.push.gateway.session import GatewaySubscription
from mediator.push.sources import StoredMailSource
from mediator.push.subscriber import InFlightCounter, SubscriptionRequest, log_failure

ANSWER_SECONDS: Final = 2.0
"""Seconds that a client's PONG waits for a subscription to open."""
CONFIRM_SECONDS: Final = 1.0
"""How long :meth:`Subscriptions.close` waits for clients to confirm what was pushed to them."""

log = structlog.get_logger("push")


class Subscriptions:
    """All that this instance serves."""

    def __init__(
        self,
        sources: Mapping[type[subjects.Subject], StoredMailSource],
        settings: PushSettings,
        in_flight: InFlightCounter,
        clock: Callable[[], float],
        limit_of: Callable[[str], int] | None = None,
    ) -> None:
        """``sources`` serve subscriptions by the kind of their subject; ``clock`` gives seconds that never go back.

        ``limit_of`` returns how many a tenant may have, 0: any number; without it, all may have as many.
        """
        self._limit_of = limit_of or (lambda _tenant: settings.tenant_subscriptions)
        self._sources = sources
        self._settings = settings
        self._in_flight = in_flight
        self._clock = clock
        self._tenants: dict[GatewaySubscription, str] = {}
        """The tenant of each subscription that is open or opening."""
        self._of_tenant: Counter[str] = Counter()
        self._unanswered: dict[GatewaySubscription, None] = {}
        """In the order in which they were made."""
        self._failed: set[GatewaySubscription] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False

    @property
    def count(self) -> int:
        """How many subscriptions are open."""
        return len(self._tenants)

    def count_of(self, tenant: str) -> int:
        """Return how many of them are a tenant's."""
        return self._of_tenant[tenant]

    @property
    def waiting(self) -> int:
        """How many could not be opened yet."""
        return len(self._unanswered)

    def start(self) -> None:
        """Start pushing."""
        for source in self._sources.values():
            source.start()

    def add(self, subscription: GatewaySubscription) -> None:
        """Take note of a new subscription, to answer for it after a while."""
        subscription.since = self._clock()
        self._unanswered[subscription] = None

    def open(self, subscription: GatewaySubscription, tenant: str) -> None:
        """Open a subscription; its session is told."""
        if self._leaving:
            return
        if (excess := self._excess(tenant)) is not None:
            asyncio.get_running_loop().call_soon(subscription.session.refuse, subscription, str(excess))
            return
        self._tenants[subscription] = tenant
        self._of_tenant[tenant] += 1
        self._soon(self._open(subscription, tenant))

    def end(self, subscription: GatewaySubscription, how: str) -> None:
        """End a subscription: ``unsub``, ``drained`` or ``broken``."""
        self._unanswered.pop(subscription, None)
        self._failed.discard(subscription)
        self._forget(subscription)
        if subscription.served is not None:
            subscription.served.close(how)

    def watch(self) -> None:
        """Release the PONGs that waited too long, and try again to open what could not be opened."""
        last = self._clock() - ANSWER_SECONDS
        for subscription in self._unanswered:
            if subscription.since > last:
                break
            subscription.session.answered(subscription)
        failed, self._failed = self._failed, set()
        for subscription in failed:
            if subscription.session.tenant is not None:
                self.open(subscription, subscription.session.tenant)

    async def close(self, seconds: float) -> None:
        """Push no more; end everything once clients have confirmed what they got, or a moment has passed."""
        self._leaving = True
        for source in self._sources.values():
            source.pause()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._in_flight.idle.wait(), min(seconds, CONFIRM_SECONDS))
        for subscription in list(self._tenants):
            self.end(subscription, "drained")
        for source in self._sources.values():
            await source.close(seconds)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(log_failure(work), name="push-open")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, subscription: GatewaySubscription, tenant: str) -> None:
        session = subscription.session
        subject = subjects.classify(subscription.subject)
        try:
            request = SubscriptionRequest(tenant, subject, subscription.queue, session.python, subscription)
            served = await self._sources[type(subject)].open(request)
        except UnavailableError as error:
            log.warning("subscription not opened", error=str(error))
            self._try_again(subscription)
            return
        except MediatorError as error:
            session.refuse(subscription, str(error))
            return
        except Exception:
            self._try_again(subscription)
            raise
        self._unanswered.pop(subscription, None)
        session.accept(subscription, served)

    def _try_again(self, subscription: GatewaySubscription) -> None:
        if subscription in self._tenants:
            self._forget(subscription)
            self._failed.add(subscription)

    def _excess(self, tenant: str) -> MediatorError | None:
        """Return why one more subscription is too many, or None."""
        settings = self._settings
        if len(self._tenants) >= settings.max_subscriptions:
            return BusyError(f"{settings.max_subscriptions} subscriptions are open")
        use, limit = self.count_of(tenant), self._limit_of(tenant)
        return QuotaExceededError("subscriptions of the tenant", limit, use) if limit and use >= limit else None

    def _forget(self, subscription: GatewaySubscription) -> None:
        tenant = self._tenants.pop(subscription, None)
        if tenant is not None:
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
