"""The frames of NATS's client protocol: what one side writes, the other reads back; anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.nats import frames
from mediator.nats.frames import ProtocolViolationError

words = st.binary(min_size=1, max_size=20).map(lambda word: word.translate(None, b" \t\r\n") or b"x")
values = st.text("abc äß-:", max_size=10).map(str.strip)
headers = st.dictionaries(st.text("abc-", min_size=1, max_size=8), values, max_size=4)


@given(headers, st.binary(max_size=40))
def test_a_body_is_read_back_as_it_was_written(given_headers: dict[str, str], payload: bytes) -> None:
    block = frames.encode_headers(given_headers)
    body = frames.encode_body(block, payload)
    assert frames.decode_body(body) == (block, payload)
    assert list(frames.decode_bodies(body * 2, 2)) == [(block, payload)] * 2
    assert frames.decode_headers(block.removeprefix(frames.VERSION)) == given_headers


@given(words, st.sampled_from([b"", b"_INBOX.x"]), st.integers(0, 99), st.integers(0, 99))
def test_a_message_line_is_read_by_its_single_spaces(subject: bytes, reply: bytes, head: int, size: int) -> None:
    address = b"%b 7 %b" % (subject, reply + b" " if reply else b"")
    assert frames.decode_message_line(b"MSG %b%d" % (address, size)) == (7, subject, reply, 0, size)
    assert frames.decode_message_line(b"HMSG %b%d %d" % (address, head, size)) == (7, subject, reply, head, size)


@given(words, words, headers, st.binary(max_size=40))
def test_a_written_message_is_read_back(subject: bytes, sid: bytes, given_headers: dict[str, str], data: bytes) -> None:
    block = frames.encode_headers(given_headers)
    written = frames.encode_message(subject, sid, data, block), frames.encode_message(subject, sid, data)
    for frame, head in zip(written, (block, b""), strict=True):
        found = frames.message_pattern().match(frame)
        assert found is not None
        assert frame[found.end() :] == head + data + b"\r\n"
        assert int(found[1]) == len(head) + len(data)


@pytest.mark.parametrize(("most", "frame"), [(0, b"UNSUB 7\r\n"), (3, b"UNSUB 7 3\r\n")])
def test_a_subscription_ends_now_or_after_so_many(most: int, frame: bytes) -> None:
    assert frames.encode_unsubscribe(b"7", most) == frame
    verb, found = frames.decode_command(frame.removesuffix(b"\n"))
    assert (verb, [frames.decode_count(word) for word in found[1:]]) == (b"UNSUB", [most] if most else [])


@pytest.mark.parametrize("line", [b"MSG", b"MSG a", b"MSG a x 1", b"MSG a 1 x", b"HMSG a 1 2", b"HMSG a 1 r 1 y"])
def test_a_malformed_message_line_is_a_violation(line: bytes) -> None:
    with pytest.raises(ProtocolViolationError):
        frames.decode_message_line(line)


def test_a_client_publish_is_read_with_its_reply() -> None:
    verb, found = frames.decode_command(b"hpub a.b\tr 12 14\r")
    assert (verb, frames.decode_publish(verb, found)) == (b"HPUB", (b"a.b", b"r", 12, 14))
    assert frames.encode_publish(b"a", b"hi") == b"PUB a 2\r\nhi\r\n"


@pytest.mark.parametrize("line", [b"PUB a", b"PUB a -1", b"PUB a 1234567890", b"HPUB a 3 2", b"PUB a b c 1", b"pub"])
def test_a_malformed_publish_is_a_violation(line: bytes) -> None:
    with pytest.raises(ProtocolViolationError):
        frames.decode_publish(*frames.decode_command(line))


def test_an_error_is_one_line_of_bounded_length() -> None:
    assert frames.encode_error("no\r\nPING " + "x" * 2000).count(b"\r\n") == 1
    assert len(frames.encode_error("x" * 2000)) == len(b"-ERR ''\r\n") + frames.MAX_ERROR
