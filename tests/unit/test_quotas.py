"""Bounds on messages, bytes and rate (S7)."""

from collections.abc import Callable

import pytest

from mediator.errors import ArchiveBacklogFullError, QuotaExceededError
from mediator.mailboxes import quotas
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.store.base import Store
from tests.harness.broker import DAY, HOUR, SECOND, Broker

OFF = Quota()


@pytest.fixture
def bounded(store: Store) -> Callable[..., Broker]:
    """Make a broker with two mailboxes, and one of another tenant."""

    def make(mailbox: Quota = OFF, tenant: Quota = OFF, archive_limit: int = 100) -> Broker:
        broker = Broker(store, Bounds(mailbox=mailbox, tenant=tenant, archive_limit=archive_limit))
        broker.create("a")
        broker.create("b")
        broker.create("a", tenant="other")
        return broker

    return make


@pytest.mark.rule("S7")
def test_bounds_are_off_by_default(broker: Broker) -> None:
    broker.create("a")
    for _ in range(5000):
        broker.send(b"x" * 100, to="a")
    assert broker.send(to="a") == 5000


@pytest.mark.rule("S7")
@pytest.mark.parametrize("last", [{}, {"delay": SECOND}])
def test_messages_of_a_mailbox(bounded: Callable[..., Broker], last: dict[str, int]) -> None:
    broker = bounded(mailbox=Quota(messages=3))
    broker.send(to="a")
    broker.send(to="a", delay=SECOND)
    broker.send(to="a", dedup_id="d", **last)
    with pytest.raises(QuotaExceededError, match=r"^quota_exceeded: messages in the mailbox, limit 3, in use 3$"):
        broker.send(to="a")
    with pytest.raises(QuotaExceededError):
        broker.send(to="a", delay=SECOND)
    assert broker.send(to="a", dedup_id="d") == (-1 if last else 1), "a repeat stores nothing"
    assert broker.send(to="b") == 0
    broker.delete(0, "a")
    broker.send(to="a")


@pytest.mark.rule("S7")
def test_bytes_of_a_mailbox(bounded: Callable[..., Broker]) -> None:
    broker = bounded(mailbox=Quota(bytes=100))
    broker.send(b"x" * 60, to="a")
    broker.send(b"x" * 30, to="a", delay=SECOND)
    with pytest.raises(QuotaExceededError, match=r"bytes in the mailbox, limit 100, in use 90$"):
        broker.send(b"x" * 11, to="a")
    with pytest.raises(QuotaExceededError):
        broker.send(b"x" * 5, to="a", headers={"a": "bc"})
    broker.send(b"x" * 10, to="a")


@pytest.mark.rule("S7", "A8")
def test_what_was_accepted_delayed_is_released_at_the_bound(bounded: Callable[..., Broker]) -> None:
    broker = bounded(mailbox=Quota(messages=1, bytes=10, rate=1), tenant=Quota(messages=1, bytes=10, rate=1))
    assert broker.send(b"x", to="a", delay=SECOND) == -1
    broker.advance(SECOND)
    broker.release()
    assert broker.shown("a") == [0]


@pytest.mark.rule("S7")
def test_messages_of_a_tenant_over_its_mailboxes(bounded: Callable[..., Broker]) -> None:
    broker = bounded(tenant=Quota(messages=3))
    broker.send(to="a")
    broker.send(to="b")
    broker.send(to="b")
    with pytest.raises(QuotaExceededError, match=r"^quota_exceeded: messages in the tenant, limit 3, in use 3$"):
        broker.send(to="a")
    assert broker.send(to="a", tenant="other") == 0
    broker.delete(0, "b")
    broker.advance(60 * SECOND)
    broker.send(to="a")
    with pytest.raises(QuotaExceededError):
        broker.send(to="a")


@pytest.mark.rule("S7")
def test_bytes_of_a_tenant_over_its_mailboxes(bounded: Callable[..., Broker]) -> None:
    broker = bounded(tenant=Quota(bytes=100))
    broker.send(b"x" * 50, to="a")
    broker.send(b"x" * 40, to="b")
    with pytest.raises(QuotaExceededError, match=r"bytes in the tenant, limit 100, in use 90$"):
        broker.send(b"x" * 11, to="a")
    broker.send(b"x" * 10, to="a")


@pytest.mark.rule("S7")
def test_a_refusal_is_believed_for_a_second_at_most(bounded: Callable[..., Broker]) -> None:
    broker = bounded(tenant=Quota(messages=1))
    broker.send(to="a")
    with pytest.raises(QuotaExceededError):
        broker.send(to="b")
    broker.delete(0, "a")
    broker.advance(SECOND + 1)
    assert broker.send(to="b") == 0


@pytest.mark.rule("S7")
def test_the_rate_of_a_mailbox(bounded: Callable[..., Broker]) -> None:
    broker = bounded(mailbox=Quota(rate=10))
    for _ in range(10):
        broker.send(to="a")
    with pytest.raises(QuotaExceededError, match="messages a second to the mailbox, limit 10"):
        broker.send(to="a")
    assert broker.send(to="b") == 0
    broker.advance(100)
    broker.send(to="a")
    with pytest.raises(QuotaExceededError):
        broker.send(to="a")
    broker.advance(3600 * SECOND)
    for _ in range(10):
        broker.send(to="a")
    with pytest.raises(QuotaExceededError):
        broker.send(to="a")


@pytest.mark.rule("S7")
def test_the_rate_of_a_tenant_over_its_mailboxes(bounded: Callable[..., Broker]) -> None:
    broker = bounded(tenant=Quota(rate=4))
    for box in ("a", "b", "a", "b"):
        broker.send(to=box)
    with pytest.raises(QuotaExceededError, match="messages a second in the tenant, limit 4"):
        broker.send(to="a")
    assert broker.send(to="a", tenant="other") == 0
    broker.advance(250)
    broker.send(to="b")


@pytest.mark.rule("S7")
def test_a_clock_that_steps_back_gives_no_more_than_the_rate(bounded: Callable[..., Broker]) -> None:
    broker = bounded(mailbox=Quota(rate=2))
    broker.send(to="a")
    broker.send(to="a")
    broker.advance(-3600 * SECOND)
    with pytest.raises(QuotaExceededError):
        broker.send(to="a")
    broker.advance(500)
    broker.send(to="a")


@pytest.mark.rule("S7", "N3")
def test_what_one_rate_refuses_is_not_counted_by_the_other(bounded: Callable[..., Broker]) -> None:
    broker = bounded(mailbox=Quota(rate=1), tenant=Quota(rate=2))
    broker.create("c")
    broker.send(to="b")
    broker.send(to="c")
    with pytest.raises(QuotaExceededError, match="in the tenant"):
        broker.send(to="a")
    broker.advance(500)
    broker.send(to="a")


@pytest.mark.rule("S7")
def test_rates_are_kept_of_those_that_sent_last(
    bounded: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MAX_BUCKETS", 2)
    broker = bounded(mailbox=Quota(rate=2))
    broker.create("c")
    for box in ("a", "b", "a", "c"):
        broker.send(to=box)
    with pytest.raises(QuotaExceededError):
        broker.send(to="a")
    broker.send(to="b")
    broker.send(to="b")


@pytest.mark.rule("S5", "S7")
@pytest.mark.parametrize("bound", [{"messages": 3}, {"bytes": 300}])
@pytest.mark.parametrize("of", ["mailbox", "tenant"])
def test_expired_mail_takes_no_room_before_the_clean_up(
    bounded: Callable[..., Broker], bound: dict[str, int], of: str
) -> None:
    broker = bounded(**{of: Quota(**bound)})
    broker.create("ends", ttl=SECOND)
    broker.send(b"x" * 100, to="a", ttl=SECOND)
    broker.send(b"x" * 100, to="a", ttl=SECOND, delay=HOUR)
    broker.send(b"x" * 100, to="ends" if of == "tenant" else "a", ttl=SECOND)
    with pytest.raises(QuotaExceededError):
        broker.send(b"x" * 100, to="a")
    broker.advance(2 * SECOND)
    sent = [broker.send(b"x" * 100, to="a") for _ in range(3)]
    assert broker.shown("a") == sent
    with pytest.raises(QuotaExceededError):
        broker.send(b"x" * 100, to="a")


@pytest.mark.rule("M1", "S5", "S7")
def test_expired_messages_return_with_an_untrusted_clock(bounded: Callable[..., Broker]) -> None:
    broker = bounded(mailbox=Quota(messages=1))
    broker.send(to="a", ttl=DAY)
    broker.quotas.trusts = lambda now: False
    broker.advance(DAY)
    with pytest.raises(QuotaExceededError):
        broker.send(to="a")
    broker.advance(-DAY)
    assert broker.shown("a") == [0]


@pytest.mark.rule("S6", "S7", "N3")
def test_what_the_archive_refuses_is_not_counted(bounded: Callable[..., Broker]) -> None:
    broker = bounded(tenant=Quota(messages=3, rate=3), archive_limit=1)
    broker.send(to="a", archive=True)
    for _ in range(5):
        with pytest.raises(ArchiveBacklogFullError):
            broker.send(to="a", archive=True)
    broker.send(to="a")
    assert broker.send(to="a") == 2


@pytest.mark.rule("S7")
def test_a_tenant_with_its_own_quota(bounded: Callable[..., Broker]) -> None:
    broker = bounded()
    broker.quotas.set_tenants({"other": Quota(messages=1), "default": Quota(rate=2, burst=3)})
    broker.send(to="a", tenant="other")
    with pytest.raises(QuotaExceededError, match="messages in the tenant, limit 1, in use 1"):
        broker.send(to="a", tenant="other")
    for _ in range(3):
        broker.send(to="a")
    with pytest.raises(QuotaExceededError, match="messages a second in the tenant, limit 2, in use 2"):
        broker.send(to="b")
    broker.advance(SECOND)
    broker.send(to="b")
    broker.send(to="b")
    with pytest.raises(QuotaExceededError):
        broker.send(to="b")
    broker.quotas.set_tenants({})
    for _ in range(10):
        broker.send(to="a", tenant="other")


@pytest.mark.rule("S7")
def test_mailboxes_of_a_tenant(bounded: Callable[..., Broker]) -> None:
    broker = bounded()
    broker.quotas.set_tenants({"default": Quota(mailboxes=3)})
    broker.create("c")
    with pytest.raises(QuotaExceededError, match="mailboxes of the tenant, limit 3, in use 3"):
        broker.create("d")
    broker.create("d", tenant="other")
