"""MSG.QUERY and MSG.DELETE (Q1, Q2, F7)."""

import pytest

from mediator.errors import NoSuchMailboxError, NoSuchMessageError
from mediator.mailboxes.events import EventType
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import ITEM_COST
from tests.harness.broker import GROUP, HOUR, SECOND, START, Broker

DEAD = {"dead_for": GROUP}


@pytest.fixture
def broker(broker: Broker) -> Broker:
    broker.create()
    return broker


def kill(broker: Broker) -> None:
    """Make every message dead for the group."""
    broker.take(ack_wait=SECOND, max_deliver=1, num_msgs=1000, budget=1 << 30)
    broker.advance(SECOND)


@pytest.mark.rule("Q1")
def test_messages_come_in_ascending_id_whatever_their_lane(broker: Broker) -> None:
    for lane in (Lane.LOW, Lane.CRITICAL, Lane.NORMAL, Lane.URGENT):
        broker.send(lane=lane)
    assert broker.shown() == [0, 1, 2, 3]


@pytest.mark.rule("Q1")
@pytest.mark.parametrize("options", [{}, DEAD])
def test_the_newest_limit_messages(broker: Broker, options: dict[str, str]) -> None:
    for _ in range(150):
        broker.send()
    kill(broker)
    assert broker.shown(**options) == list(range(50, 150))
    assert broker.shown(limit=3, **options) == [147, 148, 149]
    assert broker.shown(limit=1000, **options) == list(range(150))


@pytest.mark.rule("Q1")
@pytest.mark.parametrize("options", [{}, DEAD])
def test_before_id_pages_back(broker: Broker, options: dict[str, str]) -> None:
    for _ in range(10):
        broker.send()
    kill(broker)
    broker.delete(4)
    pages, before = [], None
    while page := broker.shown(limit=4, before_id=before, **options):
        pages.append(page)
        before = page[0]
    assert pages == [[6, 7, 8, 9], [1, 2, 3, 5], [0]]
    assert broker.shown(before_id=0, **options) == []


@pytest.mark.rule("Q1")
@pytest.mark.parametrize("options", [{}, DEAD])
@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        ({"key": "k"}, [2]),
        ({"key": "K"}, []),
        ({"tags": ("a",)}, [0, 2, 3]),
        ({"tags": ("a", "b")}, [2, 3]),
        ({"tags": ("b", "a")}, [2, 3]),
        ({"tags": ("a", "nope")}, []),
        ({"tags": ("A",)}, []),
        ({"since": START + SECOND}, [2, 3, 4]),
        ({"since": START + SECOND + 1}, [4]),
        ({"since": START + HOUR}, []),
        ({"key": "k", "tags": ("b",)}, [2]),
        ({"key": "k", "since": START + 2 * SECOND}, []),
        ({"tags": ("a",), "since": START + SECOND, "before_id": 3}, [2]),
        ({"key": "k", "before_id": 2}, []),
    ],
)
def test_filters_combine_with_and(
    broker: Broker, options: dict[str, str], wanted: dict[str, object], ids: list[int]
) -> None:
    broker.send(tags=("a",))
    broker.send(key="other", tags=("ab", "c"))
    broker.advance(SECOND)
    broker.send(key="k", tags=("a", "b"))
    broker.send(tags=("b", "c", "a"))
    broker.advance(SECOND)
    broker.send()
    kill(broker)
    assert broker.shown(**options, **wanted) == ids


@pytest.mark.rule("Q1")
@pytest.mark.parametrize("options", [{}, DEAD])
def test_a_limit_counts_what_fits_the_filter(broker: Broker, options: dict[str, str]) -> None:
    for number in range(30):
        broker.send(tags=("rare",) if number % 10 == 0 else ("common",))
    kill(broker)
    assert broker.shown(limit=2, tags=("rare",), **options) == [10, 20]


@pytest.mark.rule("Q1", "N7")
@pytest.mark.parametrize("options", [{}, DEAD])
def test_the_newest_stay_where_the_byte_budget_cuts(broker: Broker, options: dict[str, str]) -> None:
    for size in (10, 50_000, 10, 20_000, 10_000):
        broker.send(b"x" * size, tags=("t",))
    kill(broker)
    assert broker.shown(budget=1, **options) == [4]
    assert broker.shown(budget=15_000, **options) == [4]
    assert broker.shown(budget=60_000, **options) == [2, 3, 4]
    assert broker.shown(budget=60_000, tags=("t",), **options) == [2, 3, 4]
    assert broker.shown(budget=60_000, before_id=2, **options) == [1]
    assert broker.shown(budget=200_000, **options) == [0, 1, 2, 3, 4]


@pytest.mark.rule("Q1", "N7")
def test_without_payloads_only_the_heads_count_to_the_budget(broker: Broker) -> None:
    for _ in range(5):
        broker.send(b"x" * 50_000, headers={"h": "y" * 1000})
    [message] = broker.query(limit=1)
    assert message.max_encoded_head_size == 2 * (message.size - 50_000) + ITEM_COST
    assert broker.shown(budget=3 * message.max_encoded_head_size, headers_only=True) == [2, 3, 4]
    assert broker.shown(budget=3 * message.max_encoded_head_size - 1, headers_only=True) == [3, 4]
    assert broker.shown(budget=3 * message.max_encoded_head_size) == [4]


@pytest.mark.rule("Q1", "F7")
def test_dead_messages_are_those_of_the_named_group(broker: Broker) -> None:
    for _ in range(3):
        broker.send()
    kill(broker)
    broker.send()
    broker.take("other", ack_wait=SECOND)
    assert broker.shown(**DEAD) == [0, 1, 2]
    assert [message.deliveries for message in broker.query(**DEAD)] == [1, 1, 1]
    assert broker.shown(dead_for="other") == broker.shown(dead_for="nobody") == []
    assert broker.shown() == [0, 1, 2, 3]


@pytest.mark.rule("Q1", "F7")
@pytest.mark.parametrize("fetched", [True, False])
def test_no_dead_message_is_shown_that_is_gone(broker: Broker, fetched: bool) -> None:
    broker.send()
    broker.send(key="k")
    broker.send(ttl=2 * SECOND)
    broker.send()
    kill(broker)
    if fetched:
        broker.take()
    broker.delete(0)
    broker.send(key="k")
    broker.advance(SECOND)
    assert broker.shown(**DEAD) == [3]


@pytest.mark.rule("Q1")
def test_a_query_moves_no_group(broker: Broker) -> None:
    for _ in range(3):
        broker.send()
    assert broker.take(num_msgs=1) == [0]
    assert broker.take("leased", num_msgs=1, ack_wait=SECOND) == [0]
    broker.query()
    broker.query(dead_for=GROUP)
    broker.ack(2)
    assert broker.take() == [0, 1, 2]
    assert broker.take("leased") == [1, 2]
    assert broker.take("new") == [0, 1, 2]


@pytest.mark.rule("Q1", "S5")
def test_expired_messages_are_neither_shown_nor_counted(broker: Broker) -> None:
    for number in range(6):
        broker.send(ttl=SECOND if number % 2 else None)
    broker.advance(SECOND)
    assert broker.shown(limit=2) == [2, 4]


@pytest.mark.rule("Q2")
def test_delete_removes_one_message_for_good(broker: Broker) -> None:
    for _ in range(3):
        broker.send(b"12345")
    assert broker.take("leased", ack_wait=SECOND) == [0, 1, 2]
    broker.delete(1)
    assert broker.shown() == broker.take() == broker.take(None) == [0, 2]
    broker.advance(SECOND)
    assert broker.take("leased") == [0, 2]
    mailbox = broker.mailbox()
    assert (mailbox.messages, mailbox.bytes) == (2, 10)
    assert broker.told(EventType.DELETED) == [1]


@pytest.mark.rule("Q2", "N3")
@pytest.mark.parametrize("msg_id", [0, 3, -1, 10**18])
def test_delete_of_what_is_not_there(broker: Broker, msg_id: int) -> None:
    broker.send()
    broker.send()
    broker.delete(0)
    with pytest.raises(NoSuchMessageError, match=r"^message not found$"):
        broker.delete(msg_id)
    assert broker.shown() == [1]
    assert broker.mailbox().messages == 1


@pytest.mark.rule("Q1", "Q2")
def test_a_mailbox_that_does_not_exist(broker: Broker) -> None:
    for verb in (lambda: broker.query("nowhere"), lambda: broker.delete(0, "nowhere")):
        with pytest.raises(NoSuchMailboxError, match=r"^mailbox nowhere does not exist$"):
            verb()
