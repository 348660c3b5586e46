"""MSG.SEND and the release of delayed mail (A3, S1–S6, N5, N7)."""

import contextlib
import sqlite3

import pytest

from mediator.errors import (
    ArchiveBacklogFullError,
    BadRequestError,
    MessageTooLargeError,
    NoSuchMailboxError,
    NoSuchMessageError,
)
from mediator.mailboxes.bounds import MAX_DEDUP_IDS, Bounds
from mediator.mailboxes.events import EventType
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.mailboxes.sending import RELEASE_BYTES
from mediator.mailboxes.transaction import Transaction
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from tests.harness.broker import BOX, DAY, HOUR, SECOND, START, TENANT, Broker


@pytest.fixture
def broker(broker: Broker) -> Broker:
    broker.create()
    return broker


def archived(broker: Broker) -> list[bytes]:
    if not isinstance(broker.store, SqliteStore):
        pytest.skip("looks into the file")
    with contextlib.closing(sqlite3.connect(broker.store.path)) as connection:
        return [payload for (payload,) in connection.execute("SELECT payload FROM outbox ORDER BY seq")]


@pytest.mark.rule("A3")
def test_ids_count_from_0_over_all_lanes(broker: Broker) -> None:
    assert [broker.send(lane=lane) for lane in (Lane.LOW, Lane.CRITICAL, Lane.NORMAL, Lane.LOW)] == [0, 1, 2, 3]


@pytest.mark.rule("A3")
def test_an_id_is_never_used_again(broker: Broker) -> None:
    broker.send()
    broker.send(key="k")
    broker.send(ttl=SECOND)
    broker.delete(0)
    assert broker.send(key="k") == 3
    broker.delete(3)
    broker.advance(SECOND)
    broker.clean_up()
    assert broker.shown() == []
    assert broker.send() == 4


@pytest.mark.rule("S1")
def test_everything_a_sender_gave_is_kept(broker: Broker) -> None:
    payload = bytes(range(256))
    broker.send(
        payload,
        lane=Lane.URGENT,
        key="k",
        tags=("a", "b"),
        headers={"X-Trace": "1", "x-größe": "ß"},
        expire_at=START + HOUR,
        dedup_id="d",
        reply_to="me.inbox",
    )
    broker.send()
    [full, empty] = broker.query()
    assert (full.payload, full.lane, full.key, full.tags) == (payload, Lane.URGENT, "k", ("a", "b"))
    assert dict(full.headers) == {"X-Trace": "1", "x-größe": "ß"}
    assert (full.expire_at, full.dedup_id, full.reply_to) == (START + HOUR, "d", "me.inbox")
    assert (full.created_at, full.sent_at) == (START, START)
    assert (empty.payload, empty.lane, empty.key, empty.tags, dict(empty.headers)) == (b"", Lane.NORMAL, None, (), {})
    assert (empty.expire_at, empty.dedup_id, empty.reply_to) == (None, None, None)


@pytest.mark.rule("N7", "A3")
def test_a_message_above_the_limit_is_refused_naming_the_limit(store: Store) -> None:
    broker = Broker(store, Bounds(max_message=1000))
    broker.create()
    assert broker.send(b"x" * 1000) == 0
    for payload, headers in ((b"x" * 1001, {}), (b"x" * 900, {"a": "b" * 100})):
        with pytest.raises(MessageTooLargeError, match=r"message_too_large.* 1000"):
            broker.send(payload, headers=headers)
    assert broker.send() == 1


@pytest.mark.rule("N5")
def test_create_time_never_goes_back_with_the_clock(broker: Broker) -> None:
    broker.send()
    broker.advance(-HOUR)
    broker.send()
    broker.send(delay=SECOND)
    broker.advance(SECOND)
    broker.release()
    broker.advance(2 * HOUR)
    broker.send()
    times = [message.created_at for message in broker.query()]
    assert times == [START, START, START, START + HOUR + SECOND]


@pytest.mark.rule("N5")
def test_create_time_survives_the_newest_message(broker: Broker) -> None:
    broker.send()
    broker.delete(0)
    broker.advance(-HOUR)
    broker.send()
    assert [message.created_at for message in broker.query()] == [START]


# S2: keys


@pytest.mark.rule("S2")
def test_the_newest_message_of_a_key_replaces_the_older(broker: Broker) -> None:
    broker.send(b"1", key="status", lane=Lane.URGENT)
    broker.send(b"other", key="other")
    broker.send(b"none")
    assert broker.send(b"2", key="status", lane=Lane.LOW) == 3
    assert [(m.msg_id, m.payload) for m in broker.query()] == [(1, b"other"), (2, b"none"), (3, b"2")]
    assert broker.take() == [1, 2, 3]
    assert broker.mailbox().messages == 3
    assert broker.told(EventType.COMPACTED) == [0]


@pytest.mark.rule("S2")
def test_a_key_takes_the_place_of_an_expired_message_too(broker: Broker) -> None:
    broker.send(b"1", key="k", ttl=SECOND)
    broker.advance(SECOND)
    broker.send(b"2", key="k")
    assert broker.shown() == [1]
    broker.advance(-SECOND)
    assert broker.shown() == [1]
    assert broker.mailbox().messages == 1


@pytest.mark.rule("S2", "A8")
def test_a_replaced_message_is_gone_even_if_leased(broker: Broker) -> None:
    broker.send(b"1", key="k")
    assert broker.take("leased", ack_wait=SECOND) == [0]
    assert broker.take("plain") == [0]
    broker.send(b"2", key="k")
    broker.advance(SECOND)
    assert broker.take("plain") == [1]
    assert broker.take("leased", ack_wait=SECOND) == [1]
    assert broker.take(None) == [1]


@pytest.mark.rule("S2", "S4")
def test_a_delayed_message_replaces_when_it_becomes_visible(broker: Broker) -> None:
    broker.send(b"1", key="k")
    broker.send(b"2", key="k", delay=SECOND)
    assert [m.payload for m in broker.query(key="k")] == [b"1"]
    broker.send(b"3", key="k")
    assert [m.payload for m in broker.query()] == [b"3"]
    broker.advance(SECOND)
    broker.release()
    assert [(m.msg_id, m.payload) for m in broker.query()] == [(2, b"2")]


@pytest.mark.rule("S2", "S4")
def test_of_two_delayed_messages_of_a_key_the_later_due_stays(broker: Broker) -> None:
    broker.send(b"late", key="k", delay=2 * SECOND)
    broker.send(b"soon", key="k", delay=SECOND)
    broker.advance(2 * SECOND)
    broker.release()
    assert [(m.msg_id, m.payload) for m in broker.query()] == [(1, b"late")]


@pytest.mark.rule("S2", "S5")
def test_what_expires_before_it_is_due_replaces_nothing(broker: Broker) -> None:
    broker.send(b"1", key="k")
    broker.send(b"2", key="k", delay=2 * SECOND, ttl=SECOND)
    broker.advance(3 * SECOND)
    broker.release()
    assert [m.payload for m in broker.query()] == [b"1"]
    assert broker.send() == 1


@pytest.mark.rule("E4", "S2")
def test_a_latest_mailbox_keeps_one_message(broker: Broker) -> None:
    broker.create("last", kind=Kind.LATEST)
    for number in range(3):
        assert broker.send(b"%d" % number, to="last", lane=Lane(number), key=str(number)) == number
    assert [(m.msg_id, m.payload) for m in broker.query("last")] == [(2, b"2")]
    broker.send(b"delayed", to="last", delay=SECOND)
    assert broker.shown("last") == [2]
    broker.advance(SECOND)
    broker.release()
    assert [(m.msg_id, m.payload) for m in broker.query("last")] == [(3, b"delayed")]
    mailbox = broker.mailbox("last")
    assert (mailbox.messages, mailbox.bytes) == (1, 7)


# S3: dedup ids


@pytest.mark.rule("S3")
def test_a_repeat_is_answered_with_the_first_id_and_not_stored(broker: Broker) -> None:
    broker.send()
    assert broker.send(b"a", dedup_id="d") == 1
    assert broker.send(b"b", dedup_id="d", lane=Lane.CRITICAL) == 1
    assert broker.send(b"c", dedup_id="d", delay=SECOND) == 1
    assert broker.send(b"a", dedup_id="D") == 2
    assert [m.payload for m in broker.query()] == [b"", b"a", b"a"]
    broker.advance(SECOND)
    broker.release()
    assert broker.shown() == [0, 1, 2]


@pytest.mark.rule("S3")
def test_a_dedup_id_belongs_to_one_mailbox(broker: Broker) -> None:
    broker.create("other")
    broker.send(to="other")
    assert broker.send(dedup_id="d") == 0
    assert broker.send(dedup_id="d", to="other") == 1


@pytest.mark.rule("S3", "S4")
def test_a_repeat_of_a_delayed_message_is_answered_minus_1(broker: Broker) -> None:
    assert broker.send(b"1", dedup_id="d", delay=SECOND) == -1
    assert broker.send(b"2", dedup_id="d", delay=SECOND) == -1
    assert broker.send(b"3", dedup_id="d") == -1
    broker.send()
    broker.advance(SECOND)
    broker.release()
    assert broker.send(b"4", dedup_id="d") == 1
    assert [m.payload for m in broker.query()] == [b"", b"1"]


@pytest.mark.rule("S3")
def test_a_dedup_id_outlives_compaction_and_ack(broker: Broker) -> None:
    broker.create("queue", retention=Retention.UNTIL_ACK)
    broker.send(dedup_id="acked", to="queue")
    broker.take(box="queue")
    broker.ack(0, box="queue")
    assert broker.shown("queue") == []
    assert broker.send(dedup_id="acked", to="queue") == 0
    broker.send(dedup_id="compacted", key="k")
    broker.send(key="k")
    assert broker.shown() == [1]
    assert broker.send(dedup_id="compacted", key="k") == 0
    assert broker.shown() == [1]


@pytest.mark.rule("S3", "Q2")
def test_a_dedup_id_ends_with_the_delete_of_its_message(broker: Broker) -> None:
    broker.send(dedup_id="d")
    broker.delete(0)
    assert broker.send(b"again", dedup_id="d") == 1
    assert broker.send(dedup_id="d") == 1


@pytest.mark.rule("S3", "S5")
def test_a_dedup_id_ends_with_the_expiry_of_its_message(broker: Broker) -> None:
    broker.send(dedup_id="ttl", ttl=SECOND)
    broker.send(dedup_id="at", expire_at=START + SECOND)
    broker.send(dedup_id="delayed", delay=5 * SECOND, ttl=SECOND)
    broker.advance(SECOND - 1)
    assert [broker.send(dedup_id=name) for name in ("ttl", "at", "delayed")] == [0, 1, -1]
    broker.advance(1)
    assert [broker.send(dedup_id=name) for name in ("ttl", "at", "delayed")] == [2, 3, 4]


@pytest.mark.rule("S3")
def test_a_dedup_id_ends_after_24_hours(broker: Broker) -> None:
    broker.send(dedup_id="d")
    broker.send(dedup_id="long", ttl=3 * DAY)
    broker.advance(DAY - 1)
    broker.collect()
    assert [broker.send(dedup_id="d"), broker.send(dedup_id="long")] == [0, 1]
    broker.advance(1)
    assert [broker.send(dedup_id="d"), broker.send(dedup_id="long")] == [2, 3]


@pytest.mark.rule("S3", "Q2")
def test_deleting_an_older_message_keeps_a_reused_dedup_id(broker: Broker) -> None:
    broker.send(b"first", dedup_id="d")
    broker.advance(DAY)
    assert broker.send(b"second", dedup_id="d") == 1
    broker.delete(0)
    assert broker.send(b"a repeat", dedup_id="d") == 1


@pytest.mark.rule("S3", "S4")
def test_releasing_an_older_message_keeps_a_reused_dedup_id(broker: Broker) -> None:
    broker.send(b"first", dedup_id="d", delay=DAY + HOUR)
    broker.advance(DAY)
    assert broker.send(b"second", dedup_id="d") == 0
    broker.advance(HOUR)
    broker.release()
    assert [m.payload for m in broker.query()] == [b"second", b"first"]
    assert broker.send(b"a repeat", dedup_id="d") == 0


@pytest.mark.rule("S3")
def test_a_mailbox_remembers_100_000_dedup_ids(broker: Broker) -> None:
    broker.send(dedup_id="first")
    broker.send(dedup_id="second")

    def fill(tx: Transaction) -> None:
        mailbox = tx.mailboxes.find(TENANT, BOX)
        assert mailbox is not None
        for number in range(MAX_DEDUP_IDS - 2):
            tx.dedup_ids.add(mailbox, f"id{number}", number, broker.now + HOUR)

    broker.run(fill)
    assert MAX_DEDUP_IDS == 100_000
    assert [broker.send(dedup_id="first"), broker.send(dedup_id="second")] == [0, 1]
    assert broker.send(dedup_id="one more") == 2
    assert broker.send(dedup_id="second") == 1, "only the oldest is forgotten"
    assert broker.send(dedup_id="first") == 3


@pytest.mark.rule("S3", "N3")
def test_a_refused_message_leaves_no_dedup_id(store: Store) -> None:
    broker = Broker(store, Bounds(max_message=10))
    broker.create()
    with pytest.raises(MessageTooLargeError):
        broker.send(b"x" * 11, dedup_id="d")
    with pytest.raises(BadRequestError):
        broker.send(expire_at=START - 1, dedup_id="d")
    assert broker.send(b"x", dedup_id="d") == 0
    assert broker.shown() == [0]


# S4: delay


@pytest.mark.rule("S4", "A3")
@pytest.mark.parametrize("when", [{"delay": 5 * SECOND}, {"send_at": START + 5 * SECOND}])
def test_a_delayed_message_is_seen_nowhere_before_its_time(broker: Broker, when: dict[str, int]) -> None:
    assert broker.send(b"delayed", key="k", tags=("t",), lane=Lane.CRITICAL, **when) == -1
    assert broker.due == START + 5 * SECOND
    assert broker.next_due() == START + 5 * SECOND
    broker.advance(5 * SECOND - 1)
    broker.release()
    assert broker.take() == []
    assert broker.take(None) == []
    assert broker.shown() == []
    assert broker.shown(key="k") == []
    with pytest.raises(NoSuchMessageError):
        broker.delete(-1)
    with pytest.raises(NoSuchMessageError):
        broker.delete(0)
    mailbox = broker.mailbox()
    assert (mailbox.messages, mailbox.bytes) == (0, 0)
    assert broker.send(b"now") == 0
    broker.advance(1)
    released = broker.release()
    assert released.count == 1
    assert broker.woken == {(TENANT, BOX)}
    assert broker.take() == [1, 0]
    [message] = broker.query(key="k")
    assert (message.created_at, message.sent_at) == (START + 5 * SECOND, START)
    assert broker.next_due() is None


@pytest.mark.rule("S4")
@pytest.mark.parametrize("when", [{"delay": 0}, {"send_at": START}, {"send_at": START - DAY}, {"send_at": 1}])
def test_no_delay_and_a_past_send_at_mean_now(broker: Broker, when: dict[str, int]) -> None:
    assert broker.send(**when) == 0
    assert broker.shown() == [0]
    assert broker.due is None


@pytest.mark.rule("S4", "N3")
@pytest.mark.parametrize("delay", [0, SECOND])
@pytest.mark.parametrize("send_at", [START - SECOND, START + SECOND])
def test_delay_and_send_at_together_are_refused(broker: Broker, delay: int, send_at: int) -> None:
    with pytest.raises(BadRequestError, match=r"^mq9-(send-at|delay): "):
        broker.send(delay=delay, send_at=send_at)
    assert broker.send() == 0


@pytest.mark.rule("S4", "A3")
def test_a_backlog_is_released_in_due_order_in_slices(broker: Broker) -> None:
    broker.create("other")
    for second in (3, 1, 2, 1, 4):
        broker.send(b"%d" % second, send_at=START + second * SECOND)
    broker.send(b"2", to="other", delay=2 * SECOND)
    broker.advance(3 * SECOND)
    counts, late = [], []
    for _ in range(4):
        released = broker.release(limit=2)
        counts.append(released.count)
        late.append(released.latest)
    assert counts == [2, 2, 1, 0]
    assert late == [2 * SECOND, SECOND, 0, 0]
    assert [m.payload for m in broker.query()] == [b"1", b"1", b"2", b"3"]
    assert [m.payload for m in broker.query("other")] == [b"2"]
    assert broker.next_due() == START + 4 * SECOND


@pytest.mark.rule("S4")
def test_a_slice_holds_few_large_messages(broker: Broker) -> None:
    large = RELEASE_BYTES // 2
    for size in (large, large, 3 * RELEASE_BYTES, 1, 1):
        broker.send(bytes(size), delay=SECOND)
    broker.advance(SECOND)
    counts = []
    while (released := broker.release()).count:
        counts.append(released.count)
    assert counts == [2, 1, 2]
    assert [m.size for m in broker.query(budget=8 * RELEASE_BYTES)] == [large, large, 3 * RELEASE_BYTES, 1, 1]


@pytest.mark.rule("S4", "A8")
def test_equal_due_times_keep_the_order_of_arrival(broker: Broker) -> None:
    for number in range(5):
        broker.send(b"%d" % number, send_at=START + SECOND)
    broker.advance(SECOND)
    broker.release(limit=3)
    broker.release(limit=3)
    assert [m.payload for m in broker.query()] == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.rule("S4", "F1")
def test_a_group_from_before_gets_mail_released_later(broker: Broker) -> None:
    broker.send(delay=SECOND)
    assert broker.fetch("late").messages == []
    broker.advance(SECOND)
    broker.release()
    assert broker.take("late") == [0]


@pytest.mark.rule("S4", "M4")
def test_delayed_mail_of_a_mailbox_that_is_gone_is_dropped(broker: Broker) -> None:
    broker.create("other", ttl=SECOND)
    broker.send(to="other", delay=2 * SECOND)
    broker.send(delay=2 * SECOND)
    broker.delete_mailbox()
    broker.advance(2 * SECOND)
    broker.release()
    assert broker.next_due() is None
    assert broker.told(EventType.RELEASED) == []
    broker.create()
    assert broker.shown() == []


# S5: expiry


@pytest.mark.rule("S5", "A8")
@pytest.mark.parametrize(
    ("times", "end"),
    [
        ({"ttl": 5 * SECOND}, 5 * SECOND),
        ({"expire_at": START + 5 * SECOND}, 5 * SECOND),
        ({"ttl": 5 * SECOND, "expire_at": START + 9 * SECOND}, 5 * SECOND),
        ({"ttl": 9 * SECOND, "expire_at": START + 5 * SECOND}, 5 * SECOND),
        ({"ttl": 0, "expire_at": START + 5 * SECOND}, 5 * SECOND),
        ({"ttl": 0}, None),
    ],
)
def test_the_earlier_end_holds(broker: Broker, times: dict[str, int], end: int | None) -> None:
    broker.send(**times)
    broker.advance(5 * SECOND - 1)
    assert broker.take() == broker.take(None) == broker.shown() == [0]
    broker.advance(1)
    left = [0] if end is None else []
    assert broker.take() == broker.take(None) == broker.shown() == left
    assert broker.take("new") == left
    if end is not None:
        with pytest.raises(NoSuchMessageError):
            broker.delete(0)


@pytest.mark.rule("S5")
def test_a_ttl_counts_from_send_not_from_visibility(broker: Broker) -> None:
    broker.send(delay=3 * SECOND, ttl=5 * SECOND)
    broker.advance(3 * SECOND)
    broker.release()
    assert broker.shown() == [0]
    broker.advance(2 * SECOND)
    assert broker.shown() == []


@pytest.mark.rule("S5", "N3")
@pytest.mark.parametrize("expire_at", [START - 1, START, 1])
def test_a_past_expire_at_is_refused(broker: Broker, expire_at: int) -> None:
    with pytest.raises(BadRequestError, match=r"^mq9-expire-at: "):
        broker.send(expire_at=expire_at)
    assert broker.send() == 0


@pytest.mark.rule("S5", "A3")
@pytest.mark.parametrize("ttl", [SECOND, 2 * SECOND])
def test_what_expires_before_it_is_due_is_never_shown(broker: Broker, ttl: int) -> None:
    assert broker.send(delay=2 * SECOND, ttl=ttl) == -1
    broker.advance(2 * SECOND)
    assert broker.release().count == 1
    assert broker.take() == broker.shown() == []
    assert broker.told(EventType.EXPIRED) == [-1]
    assert broker.send() == 0, "it took no id"
    assert broker.next_due() is None


# S6: the archive


@pytest.mark.rule("S6")
def test_archived_messages_are_copied_as_they_become_visible(broker: Broker) -> None:
    broker.create("all", archive=True)
    broker.send(b"no")
    broker.send(b"header", archive=True)
    broker.send(b"mailbox", to="all")
    broker.send(b"delayed", to="all", delay=SECOND)
    broker.send(b"never", to="all", delay=SECOND, ttl=1)
    assert archived(broker) == [b"header", b"mailbox"]
    broker.delete(1)
    broker.delete_mailbox("all")
    assert archived(broker) == [b"header", b"mailbox"]


@pytest.mark.rule("S6")
def test_the_outbox_is_bounded_and_counts_what_is_delayed(store: Store) -> None:
    broker = Broker(store, Bounds(archive_limit=3))
    broker.create(archive=True)
    broker.create("plain")
    broker.send(b"1")
    broker.send(b"2", delay=SECOND, dedup_id="d")
    broker.send(b"3", to="plain", archive=True)
    for to, archive, delay in ((BOX, False, None), ("plain", True, None), (BOX, False, SECOND)):
        with pytest.raises(ArchiveBacklogFullError, match="archive_backlog_full"):
            broker.send(to=to, archive=archive, delay=delay, dedup_id="refused")
    assert broker.send(b"2", dedup_id="d") == -1, "a repeat stores nothing and is answered"
    assert broker.send(to="plain", dedup_id="refused") == 1
    broker.advance(SECOND)
    broker.release()
    assert archived(broker) == [b"1", b"3", b"2"]
    assert broker.shown() == [0, 1]


@pytest.mark.rule("A3")
def test_a_mailbox_that_does_not_exist_takes_nothing(broker: Broker) -> None:
    with pytest.raises(NoSuchMailboxError, match=r"^mailbox nowhere does not exist$"):
        broker.send(to="nowhere")
    with pytest.raises(NoSuchMailboxError):
        broker.send(to="nowhere", delay=SECOND)
    assert broker.next_due() is None


@pytest.mark.rule("F2")
def test_a_visible_message_wakes_its_mailbox_and_no_other(broker: Broker) -> None:
    broker.create("other")
    broker.send(to="other")
    assert broker.woken == {(TENANT, "other")}
    broker.send(to="other", delay=SECOND)
    assert broker.woken == set()


@pytest.mark.rule("S4", "S5", "A8")
def test_a_clock_that_is_not_trusted_ends_no_delayed_mail(broker: Broker) -> None:
    broker.create("short", ttl=HOUR)
    broker.send(b"mail", delay=10 * SECOND, ttl=HOUR)
    broker.send(b"mail", to="short", delay=10 * SECOND)
    right = broker.now + 20 * SECOND
    broker.now += 2 * HOUR
    broker.release(trusted=False)
    assert broker.shown() == []
    broker.now = right
    assert (broker.shown(), broker.shown("short")) == ([0], [0])
    broker.send(b"mail", delay=10 * SECOND, ttl=HOUR)
    broker.now += 2 * HOUR
    broker.release()
    broker.now = right
    assert broker.shown() == [0], "with a clock that is trusted, what is over is over"
