"""Queues of tenants are served in turn, hold each number once, and are bounded at the cost of the longest."""

from registry.queues import TenantQueues


def filled(capacity: int, **waiting: range) -> TenantQueues:
    queues = TenantQueues(capacity)
    for tenant, numbers in waiting.items():
        for number in numbers:
            assert queues.add(tenant, number)
    return queues


def test_tenants_are_served_in_turn_and_each_in_its_order() -> None:
    queues = filled(100, acme=range(10), globex=range(20, 21), initech=range(30, 32))
    assert queues.take(4) == [0, 20, 30, 1]
    assert queues.add("globex", 21)
    assert queues.take(3) == [31, 2, 21]
    assert queues.take(100) == [3, 4, 5, 6, 7, 8, 9]
    assert (queues.take(1), len(queues)) == ([], 0)


def test_a_number_waits_once() -> None:
    queues = filled(2, acme=range(2))
    assert queues.add("acme", 1)
    assert queues.take(3) == [0, 1]


def test_the_longest_queue_makes_room() -> None:
    queues = filled(4, acme=range(4))
    assert not queues.add("globex", 10)
    assert not queues.add("acme", 4)
    assert len(queues) == 4
    assert queues.take(9) == [0, 10, 1, 2]
