"""The frames of MSG.BATCH, whole and broken, and what becomes of messages that find the queue full (S8)."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mediator.errors import BadRequestError, BusyError, MediatorError
from mediator.mailboxes.message import Draft
from mediator.nats.frames import ProtocolViolationError, decode_bodies, encode_body, encode_headers
from mediator.nats.protocol import read_batch, read_draft
from mediator.nats.verbs import PendingBatch
from mediator.store.writer import Done

names = st.sampled_from(["mq9-priority", "MQ9-Key", "mq9-tags", "mq9-ttl", "Own", "other"])
values = st.sampled_from(["urgent", "low", "60", "a,b", "", "Grüße", "no\x00no"]) | st.text("ab:; ", max_size=5)
payloads = st.binary(max_size=40) | st.sampled_from([b"\r\n", b"0 0\r\n\r\n", b"NATS/1.0\r\n\r\n", b"12 12\r\n"])
T = TypeVar("T")
messages = st.tuples(st.dictionaries(names, values.map(str.strip), max_size=4), payloads)


def attempt(read: Callable[..., T], *given: Any) -> T | BadRequestError:
    """Return what was read, or why it could not be."""
    try:
        return read(*given)
    except BadRequestError as error:
        return error


def shown(found: Draft | BadRequestError) -> object:
    """Make two errors alike if they say the same."""
    return str(found) if isinstance(found, BadRequestError) else found


@pytest.mark.rule("S8", "S1")
@given(st.lists(messages, min_size=1, max_size=20))
@settings(deadline=None)
def test_each_message_means_what_send_means_by_it(sent: list[tuple[dict[str, str], bytes]]) -> None:
    bodies = [(encode_headers(headers), payload) for headers, payload in sent]
    body = b"".join(encode_body(*each) for each in bodies)
    assert list(decode_bodies(body, 20)) == bodies
    for (headers, payload), found in zip(sent, read_batch(body, 1 << 20), strict=True):
        assert shown(found) == shown(attempt(read_draft, payload, headers))


@pytest.mark.rule("S8", "N3")
@given(
    st.lists(
        st.sampled_from([b"0 0\r\n", b"\r\n", b"12 14\r\n", b"NATS/1.0\r\n", b"\r\n\r\n", b"a:b\r\n", b"9 0\r\n", b"x"])
        | st.binary(max_size=6),
        max_size=12,
    ).map(b"".join)
)
@settings(max_examples=100, deadline=None)
@example(b"")
@example(b"0 999999999\r\n")
@example(b"0 " + b"9" * 5000 + b"\r\n")
@example(b"-1 0\r\n\r\n")
@example(b"0  0\r\n\r\n")
def test_any_bytes_are_read_as_they_stand_or_refused_by_number(body: bytes) -> None:
    found = []
    with suppress(ProtocolViolationError):
        found += decode_bodies(body, 1000)
        assert b"".join(encode_body(*each) for each in found) == body


GOOD = encode_body(encode_headers({"own": "x"}), b"payload")


@pytest.mark.rule("S8", "N3")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (b"x", "a line with the bytes"),
        (b"0\r\n\r\n", "a line with the bytes"),
        (b"0 0\n\r\n", "a line with the bytes"),
        (b"00 0\r\n\r\n", "a line with the bytes"),
        (b"0 1000000000\r\n", "a line with the bytes"),
        (b"12 4\r\nNATS/1.0\r\n\r\n\r\n", "no more bytes of headers"),
        (b"0 3\r\nfour\r\n", "a line break after 3 bytes"),
        (b"0 4\r\nfour", "a line break after 4 bytes"),
        (b"0 4000\r\nfour\r\n", "a line break after 4000 bytes"),
        (b"4 4\r\na:b\n\r\n", "headers that begin with the line NATS/1.0"),
        (b"10 10\r\nNATS/1.0\r\n\r\n", "headers that begin with the line NATS/1.0"),
        (b"16 16\r\nNATS/1.0 503\r\n\r\n\r\n", "headers that begin with the line NATS/1.0"),
    ],
)
@pytest.mark.parametrize("before", [0, 3])
def test_a_broken_frame_is_named(before: int, wrong: bytes, said: str) -> None:
    with pytest.raises(BadRequestError, match=re.escape(f"message {before}: expected {said}")):
        read_batch(GOOD * before + wrong, 1 << 20)


@pytest.mark.rule("S8", "N7")
def test_a_server_whose_replies_are_small_takes_fewer() -> None:
    assert len(read_batch(GOOD * 60, 61 * 1024)) == 60
    with pytest.raises(BadRequestError, match="message 61: expected at most 61 messages"):
        read_batch(GOOD * 62, 61 * 1024)


class Queue:
    """A queue with so much room, which may get more meanwhile."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[tuple[bytes, Done]] = []

    def submit(self, message: Draft, done: Done) -> None:
        self.room -= 1
        if self.room == -1:
            raise BusyError("full")
        self.taken.append((message.payload, done))


@pytest.mark.rule("S8", "A9")
def test_a_message_refused_as_busy_is_not_overtaken() -> None:
    queue, told = Queue(2), list[list[Any]]()
    bad = BadRequestError("field", "bad")
    batch = PendingBatch([bad, *(Draft(b"%d" % no) for no in range(4)), bad], told.append)
    batch.send(queue.submit)
    assert [payload for payload, _ in queue.taken] == [b"0", b"1"]
    for msg_id, (_, done) in reversed(list(enumerate(queue.taken))):
        assert told == []
        done(msg_id)
    (outcomes,) = told
    assert list(map(str, outcomes)) == [
        "field: bad", "0", "1", "server busy: full", "server busy: full", "field: bad",
    ]  # fmt: skip
    assert isinstance(outcomes[3], MediatorError)


@pytest.mark.rule("S8", "A9")
def test_a_batch_that_finds_no_room_at_all_is_refused_whole() -> None:
    told = list[list[Any]]()
    with pytest.raises(BusyError):
        PendingBatch([BadRequestError("field", "bad"), Draft(b"")], told.append).send(Queue(0).submit)
    assert told == []
