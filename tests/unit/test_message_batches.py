"""What one subscription gets of messages read for many: in order, once, as much as its window holds (E6)."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.gateway.feed import LiveFeed, push_batch
from mediator.gateway.subscription import InFlightCounter, MessageBatch, Subscription, encode_push
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.message import HIDDEN_ID
from mediator.mailboxes.pushing import WINDOW, WINDOW_BYTES, Cursor, LaneRun, Window, lane_runs
from mediator.mailboxes.rows import StoredMessage
from mediator.nats.frames import encode_message
from mediator.nats.subjects import PlainSubject

LANE = st.sampled_from(LANES)


class Client:
    """A client that keeps what it is pushed."""

    def __init__(self, sid: bytes = b"1", *, bare: bool = False, full: bool = False) -> None:
        self.sid = sid
        self.bare = bare
        self.full = full
        self.frames: list[bytes] = []

    def write(self, _to: Subscription, pushes: Sequence[bytes]) -> None:
        self.frames += pushes


def subscription(to: Client, lanes: Sequence[Lane] = LANES, marks: Sequence[int] = (-1,) * 4) -> Subscription:
    made = Subscription(to.sid, "", PlainSubject(), "", to.write, lambda _: to.full, bare=to.bare)
    made.subjects = {lane: lane.name.lower().encode() for lane in lanes}
    made.in_flight = InFlightCounter(lambda _count: None)
    made.cursor = Cursor(lanes, list(marks))
    return made


def batch(*messages: StoredMessage) -> MessageBatch:
    return MessageBatch(messages)


def message(
    msg_id: int,
    lane: Lane = Lane.NORMAL,
    payload: bytes = b"x",
    *,
    key: str | None = None,
    tags: str | None = None,
    extra: bytes | None = None,
) -> StoredMessage:
    return StoredMessage(msg_id, lane.value, len(payload), 1, None, key, tags, None, extra, payload, 0)


@pytest.mark.rule("E6", "E7")
@given(
    lanes=st.lists(LANE, min_size=1, unique=True),
    marks=st.lists(st.integers(-1, 8), min_size=4, max_size=4),
    batches=st.lists(st.lists(st.tuples(LANE, st.sampled_from([1, 300_000, 700_000, WINDOW_BYTES + 1])), max_size=6)),
    confirmed=st.integers(0, 4),
)
def test_one_gets_what_it_wants_as_far_as_there_is_room(
    lanes: list[Lane], marks: list[int], batches: list[list[tuple[Lane, int]]], confirmed: int
) -> None:
    client = Client()
    served = subscription(client, lanes, marks)
    expected: list[bytes] = []
    reached, unconfirmed = list(marks), list[int]()
    msg_id = 0
    for sizes in batches:
        messages = []
        for lane, size in sizes:
            messages.append(message(msg_id, lane, bytes(size)))
            msg_id += 1
        room = True
        for one in messages:
            if one.lane not in lanes or one.msg_id <= reached[one.lane]:
                continue
            room = not unconfirmed or (sum(unconfirmed) + one.size <= WINDOW_BYTES and len(unconfirmed) < WINDOW)
            room = room and sum(unconfirmed) < WINDOW_BYTES
            if not room:
                break
            unconfirmed.append(one.size)
            reached[one.lane] = one.msg_id
            headers, payload = encode_push(one)
            expected.append(encode_message(one.lane.name.lower().encode(), b"1", payload, headers))
        assert push_batch(served, batch(*messages)) is room
        assert client.frames == expected
        assert served.cursor.marks == reached
        assert served.window.count == len(unconfirmed)
        taken = min(confirmed, len(unconfirmed))
        total = len(expected) - len(unconfirmed) + taken
        assert sum(len(run.ids) for run in served.window.confirm(total)) == taken
        del unconfirmed[:taken]


@pytest.mark.rule("E6")
def test_who_sees_it_alike_shares_a_frame() -> None:
    shared = batch(message(0), message(1))
    first, same, other, bare = Client(), Client(), Client(b"2"), Client(bare=True)
    for client in (first, same, other, bare):
        assert push_batch(subscription(client), shared)
    assert first.frames[0] is same.frames[0]
    assert other.frames[0] == first.frames[0].replace(b" 1 ", b" 2 ", 1)
    assert bare.frames[0].startswith(b"MSG normal 1 1\r\n")


@pytest.mark.rule("E6")
def test_each_push_of_a_message_with_headers_is_recorded() -> None:
    recorded: list[StoredMessage] = []
    with_headers = message(1, extra=b'{"h":{"traceparent":"x"}}')
    traced = batch(message(0), with_headers, message(2))
    for served in (subscription(Client()), subscription(Client()), subscription(Client(), marks=(0,) * 4)):
        served.record = recorded.append
        push_batch(served, traced)
    assert recorded == [with_headers] * 3


@pytest.mark.rule("E6", "E7")
def test_a_client_that_does_not_read_misses_nothing() -> None:
    client = Client(full=True)
    served = subscription(client)
    assert not push_batch(served, batch(message(0)))
    client.full = False
    assert push_batch(served, batch(message(0)))
    assert len(client.frames) == 1


@pytest.mark.rule("E7", "E9")
async def test_room_that_broadcasts_had_taken_is_used(monkeypatch: Any) -> None:
    nobody = cast(Any, None)
    feed = LiveFeed(nobody, asyncio.Semaphore(), nobody, ("", ""), 1, asyncio.Event(), lambda: None)
    read: list[object] = []

    async def nothing_new(*how: object) -> None:
        read.append(how)

    monkeypatch.setattr(feed, "_read", nothing_new)
    served = subscription(Client())
    served.publishers = (feed,)
    # A broadcast that is not stored, in the same window.
    assert served.window.offer([LaneRun(Lane.NORMAL, (HIDDEN_ID,), (600_000,))], 1, 600_000)
    assert not push_batch(served, batch(message(0, payload=bytes(600_000))))
    served.in_flight.add(1)
    served.confirm(1)
    await asyncio.sleep(0)
    assert len(read) == 1


@pytest.mark.rule("E6")
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("sid", [b"1", b"%d%%"])
def test_a_plain_message_has_the_frame_that_any_would_have(lane: Lane, sid: bytes) -> None:
    client = Client(sid)
    served = subscription(client)
    served.subjects = dict.fromkeys(LANES, b"a%b.%s")
    messages = [
        message(number, lane, payload) for number, payload in ((0, b""), (9, b"\0%d"), (10, b"x"), (2**53, b"y"))
    ]
    messages += [message(2**53 + 1, lane, key="k"), message(2**53 + 2, lane, tags="t,u")]
    messages.append(message(2**53 + 3, lane, extra=b'{"h":{"a":"b"},"r":"r","d":"d"}'))
    assert push_batch(served, batch(*messages))
    blocks = [encode_push(each) for each in messages]
    assert client.frames == [encode_message(b"a%b.%s", sid, payload, headers) for headers, payload in blocks]


@pytest.mark.rule("E7")
@given(
    pushed=st.lists(st.lists(st.tuples(LANE, st.integers(0, 9)), min_size=1, max_size=5), max_size=6),
    confirms=st.lists(st.integers(0, 9), max_size=6),
)
def test_a_window_confirms_in_the_order_of_the_pushes(
    pushed: list[list[tuple[Lane, int]]], confirms: list[int]
) -> None:
    window, waiting, total = Window(), [], 0
    for sizes in pushed:
        made = [message(len(waiting) + at, lane, bytes(size)) for at, (lane, size) in enumerate(sizes)]
        assert window.offer(lane_runs(made), len(made), sum(each.size for each in made))
        waiting += [((each.lane, each.msg_id), each.size) for each in made]
    for more in confirms:
        count = min(more, len(waiting))
        total += count
        confirmed = window.confirm(total)
        items = [item for run in confirmed for item in zip(run.items, run.sizes, strict=True)]
        assert items == waiting[:count]
        del waiting[:count]
        assert window.count == len(waiting)
        assert [item for run in window.waiting for item in run.items] == [item for item, _ in waiting]
        assert window.room_bytes == WINDOW_BYTES - sum(size for _, size in waiting)
