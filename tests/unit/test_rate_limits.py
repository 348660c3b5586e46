"""Token buckets, and whose address is counted behind proxies."""

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from multidict import CIMultiDict

from mediator.http.connections import ClientAddresses
from pickup.access import RateLimiter

PEER = ip_address("10.0.0.1")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_allows_its_burst_and_then_its_rate():
    clock = Clock()
    limiter = RateLimiter(5, 2, clock=clock)
    assert [limiter.acquire("a") for _ in range(10)] == [0] * 10
    assert limiter.acquire("a") == pytest.approx(0.2)
    assert limiter.acquire("b") == 0
    clock.now += 0.2
    assert limiter.acquire("a") == 0
    assert limiter.acquire("a") == pytest.approx(0.2)
    clock.now += 60
    assert [limiter.acquire("a") for _ in range(10)] == [0] * 10
    assert limiter.acquire("a") > 0


def test_reserved_tokens_are_paid_back_before_others_are_taken():
    clock = Clock()
    limiter = RateLimiter(1, 1, clock=clock)
    assert [limiter.reserve("a") for _ in range(4)] == [0, 1, 2, 3]
    assert limiter.acquire("a") == 4
    clock.now += 3.5
    assert limiter.acquire("a") == pytest.approx(0.5)


def test_full_buckets_are_dropped_and_their_number_is_bounded():
    clock = Clock()
    limiter = RateLimiter(1, 5, max_buckets=100, clock=clock)
    for number in range(1000):
        limiter.acquire(number)
        assert len(limiter) <= 100
    clock.now += 1000
    for number in range(60):
        limiter.acquire(number)
    assert len(limiter) == 60
    assert all(limiter.acquire(999) == 0 for _ in range(5))


@pytest.mark.parametrize(
    ("header", "value", "found"),
    [
        ("X-Forwarded-For", "203.0.113.9", "203.0.113.9"),
        ("X-Forwarded-For", "198.51.100.1, 203.0.113.9", "203.0.113.9"),
        ("X-Forwarded-For", "198.51.100.1, 203.0.113.9, 10.0.0.7", "203.0.113.9"),
        ("X-Forwarded-For", "10.0.0.9, 10.0.0.7", "10.0.0.9"),
        ("X-Forwarded-For", "203.0.113.9, nonsense, 10.0.0.7", "10.0.0.7"),
        ("X-Forwarded-For", "203.0.113.9:4711", "203.0.113.9"),
        ("X-Forwarded-For", "[2001:db8::1]:4711", "2001:db8::1"),
        ("X-Forwarded-For", "::ffff:203.0.113.9", "203.0.113.9"),
        ("X-Forwarded-For", "", "10.0.0.1"),
        ("Forwarded", 'proto=https;For="[2001:db8::1]:80";by=10.0.0.1', "2001:db8::1"),
        ("Forwarded", "for=198.51.100.1, for=203.0.113.9", "203.0.113.9"),
        ("Forwarded", "for=unknown", "10.0.0.1"),
        ("Forwarded", "for=_hidden, for=10.0.0.7", "10.0.0.7"),
    ],
)
def test_the_last_address_before_trusted_proxies_is_found(header: Any, value: str, found: str):
    addresses = ClientAddresses([ip_network("10.0.0.0/24")], header)
    assert str(addresses.of(PEER, CIMultiDict({header: value}))) == found


def test_headers_of_strangers_are_not_believed():
    claims = CIMultiDict({"X-Forwarded-For": "198.51.100.1", "Forwarded": "for=198.51.100.2"})
    assert ClientAddresses().of(PEER, claims) == PEER
    assert ClientAddresses([ip_network("10.9.0.0/16")]).of(PEER, claims) == PEER
    assert ClientAddresses([ip_network("10.0.0.0/8")], "Forwarded").of(PEER, claims) == ip_address("198.51.100.2")
    several = CIMultiDict([("X-Forwarded-For", "198.51.100.1"), ("X-Forwarded-For", "203.0.113.9")])
    assert str(ClientAddresses([ip_network("10.0.0.0/8")]).of(PEER, several)) == "203.0.113.9"
