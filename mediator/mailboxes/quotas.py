"""Bounds per mailbox and tenant on messages, bytes and rate (S7); off unless configured."""

from collections import OrderedDict
from dataclasses import dataclass

from mediator.errors import QuotaExceededError
from mediator.mailboxes.bounds import Quota
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.ports import Transaction

REFRESH = 10_000
"""Milliseconds for which the summed use of a tenant is believed; only what is sent here is added meanwhile."""
RECHECK = 1_000
"""Milliseconds after which a tenant that stands at its bound is summed again."""
MAX_BUCKETS = 100_000


@dataclass(slots=True)
class _Bucket:
    """A token bucket of one second's worth, counted in thousandths of a message."""

    tokens: int
    at: int


@dataclass(slots=True)
class _TenantUse:
    messages: int
    bytes: int
    at: int


class Quotas:
    """Says whether one more message may be kept. Used inside transactions, by one thread at a time."""

    def __init__(self, mailbox: Quota, tenant: Quota) -> None:
        self._mailbox = mailbox
        self._tenant = tenant
        self._buckets: OrderedDict[int | str, _Bucket] = OrderedDict()
        self._tenants: dict[str, _TenantUse] = {}

    def admit(self, tx: Transaction, mailbox: Mailbox, size: int, now: int) -> None:
        """Count a message of ``size`` bytes in, or raise :class:`QuotaExceededError` naming limit and use."""
        quota = self._mailbox
        if quota.messages or quota.bytes:
            waiting = tx.delays.usage(mailbox)
            _hold("messages in the mailbox", quota.messages, mailbox.messages + waiting.messages, 1)
            _hold("bytes in the mailbox", quota.bytes, mailbox.bytes + waiting.bytes, size)
        use = self._use(tx, mailbox.tenant, size, now)
        rates = [
            self._rate("messages a second to the mailbox", quota.rate, mailbox.no, now),
            self._rate("messages a second in the tenant", self._tenant.rate, mailbox.tenant, now),
        ]
        for bucket in rates:
            if bucket is not None:
                bucket.tokens -= 1000
        if use is not None:
            use.messages += 1
            use.bytes += size

    def _use(self, tx: Transaction, tenant: str, size: int, now: int) -> _TenantUse | None:
        quota = self._tenant
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
            summed = tx.mailboxes.usage(tenant)
            use = self._tenants[tenant] = _TenantUse(summed.messages, summed.bytes, now)
        _hold("messages in the tenant", quota.messages, use.messages, 1)
        _hold("bytes in the tenant", quota.bytes, use.bytes, size)
        return use

    def _rate(self, what: str, limit: int, who: int | str, now: int) -> _Bucket | None:
        if not limit:
            return None
        bucket = self._buckets.get(who)
        if bucket is None:
            bucket = self._buckets[who] = _Bucket(limit * 1000, now)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(who)
        bucket.tokens = min(limit * 1000, bucket.tokens + max(0, now - bucket.at) * limit)
        bucket.at = now
        if bucket.tokens < 1000:
            raise QuotaExceededError(what, limit, limit)
        return bucket


def _hold(what: str, limit: int, use: int, more: int) -> None:
    if limit and use + more > limit:
        raise QuotaExceededError(what, limit, use)
