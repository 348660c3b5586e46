"""Bounds per mailbox and tenant on messages, bytes, rate and mailboxes (S7, M1); off unless configured.

Expired messages do not count, whether the clean-up has removed them or not.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mediator.errors import QuotaExceededError
from mediator.mailboxes.appending import remove
from mediator.mailboxes.bounds import Quota
from mediator.mailboxes.events import EventType
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Usage
from mediator.mailboxes.transaction import Transaction

REFRESH = 10_000
"""Milliseconds for which the summed use of a tenant is believed; only what is sent here is added meanwhile."""
RECHECK = 1_000
"""Milliseconds after which a tenant that stands at its bound is summed again."""
MAX_BUCKETS = 100_000
EXPIRED_SLICE = 100
"""Expired messages that are removed together where a mailbox has no room, so that the next SENDs find some."""
EXPIRED_SLICES = 10
"""How often that is done for one SEND, at most."""


@dataclass(slots=True)
class _Bucket:
    """A token bucket, counted in thousandths of a message."""

    tokens: int
    at: int
    spent: int = 0
    """Messages that were let through."""


@dataclass(slots=True)
class _TenantUse:
    messages: int
    bytes: int
    at: int


class Quotas:
    """Decides whether one more message may be stored. Used inside transactions, by one thread at a time."""

    def __init__(self, mailbox: Quota, tenant: Quota) -> None:
        self._mailbox = mailbox
        self._tenant = tenant
        self._buckets: OrderedDict[int | str, _Bucket] = OrderedDict()
        self._tenants: dict[str, _TenantUse] = {}
        self._own: Mapping[str, Quota] = {}
        self._off = not (mailbox.on_sending or tenant.on_sending)
        self.trusts: Callable[[int], bool] = lambda now: True
        """Whether the clock is trusted at this time to expire messages."""
        self.on_refused: list[Callable[[str], object]] = []
        """Each is called with the tenant of a message that is refused."""

    def set_tenants(self, own: Mapping[str, Quota]) -> None:
        """Bound these tenants each by its own quota instead of the one for all; on any thread."""
        self._own = own
        self._off = not any(quota.on_sending for quota in (self._mailbox, self._tenant, *own.values()))

    def of(self, tenant: str) -> Quota:
        """Return the quota of a tenant."""
        return self._own.get(tenant, self._tenant)

    def sent(self, tenant: str) -> int | None:
        """Return how many messages a tenant sent since it was first counted; None: its rate is not; on any thread."""
        bucket = self._buckets.get(tenant)
        return None if bucket is None else bucket.spent

    def admit_mailbox(self, tx: Transaction, tenant: str, now: int) -> None:
        """Raise :class:`QuotaExceededError` when a tenant may have no further mailbox."""
        if limit := self.of(tenant).mailboxes:
            _hold("mailboxes of the tenant", limit, tx.mailboxes.count(tenant, now), 1)

    def admit(self, tx: Transaction, mailbox: Mailbox, size: int, now: int, *, by_operator: bool = False) -> None:
        """Count a message of ``size`` bytes in, or raise :class:`QuotaExceededError` naming limit and use.

        Of a client's message that is refused, those are told who watch; an operator is told by the error.
        """
        if self._off:
            return
        try:
            self._admit(tx, mailbox, size, now)
        except QuotaExceededError:
            if not by_operator:
                for told in self.on_refused:
                    told(mailbox.tenant)
            raise

    def admit_copy(self, tx: Transaction, mailbox: Mailbox, size: int, now: int) -> None:
        """Do as :meth:`admit` for a copy by rule: nobody sent it, so no rate bounds it, and nobody is told (C3)."""
        if not self._off:
            self._admit(tx, mailbox, size, now, rated=False)

    def take_back(self, tenant: str, size: int) -> None:
        """Count out what was admitted and is not stored after all; it counts as sent for the rate."""
        use = self._tenants.get(tenant)
        if use is not None:
            use.messages -= 1
            use.bytes -= size

    def _admit(self, tx: Transaction, mailbox: Mailbox, size: int, now: int, *, rated: bool = True) -> None:
        quota = self._mailbox
        if quota.messages or quota.bytes:
            waiting = tx.delays.usage(mailbox, now)
            self.make_room(tx, mailbox, quota.messages, quota.bytes, waiting, size, now)
            _hold("messages in the mailbox", quota.messages, mailbox.messages + waiting.messages, 1)
            _hold("bytes in the mailbox", quota.bytes, mailbox.bytes + waiting.bytes, size)
        tenant = self.of(mailbox.tenant)
        use = self._use(tx, mailbox.tenant, tenant, size, now)
        rates = rated and [
            self._rate("messages a second to the mailbox", quota, mailbox.id, now),
            self._rate("messages a second in the tenant", tenant, mailbox.tenant, now),
        ]
        for bucket in rates or ():
            if bucket is not None:
                bucket.tokens -= 1000
                bucket.spent += 1
        if use is not None:
            use.messages += 1
            use.bytes += size

    def make_room(
        self, tx: Transaction, mailbox: Mailbox, messages: int, total: int, waiting: Usage, size: int, now: int
    ) -> bool:
        """Remove what has expired in a mailbox while it has no room for ``size`` bytes more; return whether it has.

        ``messages`` and ``total`` bytes are what it may hold together with what is ``waiting``; 0 is off.
        """
        for _ in range(EXPIRED_SLICES):
            if _fits(messages, mailbox.messages + waiting.messages, 1) and _fits(
                total, mailbox.bytes + waiting.bytes, size
            ):
                return True
            expired = tx.messages.expired_in(mailbox, now, EXPIRED_SLICE) if self.trusts(now) else []
            if not expired:
                break
            remove(tx, mailbox, expired, now, EventType.EXPIRED)
        return False

    def _use(self, tx: Transaction, tenant: str, quota: Quota, size: int, now: int) -> _TenantUse | None:
        if not (quota.messages or quota.bytes):
            return None
        use = self._tenants.get(tenant)
        if use is not None:
            full = (quota.messages and use.messages + 1 > quota.messages) or (
                quota.bytes and use.bytes + size > quota.bytes
            )
            if now - use.at > (RECHECK if full else REFRESH) or now < use.at:
                use = None
        if use is None:
            summed = tx.mailboxes.usage(tenant, now)
            use = self._tenants[tenant] = _TenantUse(summed.messages, summed.bytes, now)
        _hold("messages in the tenant", quota.messages, use.messages, 1)
        _hold("bytes in the tenant", quota.bytes, use.bytes, size)
        return use

    def _rate(self, what: str, quota: Quota, who: int | str, now: int) -> _Bucket | None:
        limit = quota.rate
        if not limit:
            return None
        max_tokens = (quota.burst or limit) * 1000
        bucket = self._buckets.get(who)
        if bucket is None:
            bucket = self._buckets[who] = _Bucket(max_tokens, now)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(who)
        bucket.tokens = min(max_tokens, bucket.tokens + max(0, now - bucket.at) * limit)
        bucket.at = now
        if bucket.tokens < 1000:
            raise QuotaExceededError(what, limit, limit)
        return bucket


def _fits(limit: int, use: int, more: int) -> bool:
    return not limit or use + more <= limit


def _hold(what: str, limit: int, use: int, more: int) -> None:
    if not _fits(limit, use, more):
        raise QuotaExceededError(what, limit, use)
