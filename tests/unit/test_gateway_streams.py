"""The frames of NATS's protocol: whatever the chunks, the same bytes; nothing hidden from what must be seen."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.push.gateway.streams import MAX_INSPECTED, MAX_LINE, ClientStream, ProtocolViolationError, ServerStream

SUBJECTS = st.text("abcz09$_.-", min_size=1, max_size=20).map(str.encode)
PAYLOADS = st.binary(max_size=60) | st.sampled_from([b"SUB a 1\r\n", b"PING\r\n", b"\r\n", b"MSG a 1 3\r\nabc\r\n"])
SIDS = st.integers(1, 99).map(lambda number: b"%d" % number)


@dataclass
class Client:
    """Notes what it is told, and hands on."""

    told: list[tuple[bytes, ...]] = field(default_factory=list)
    published: int = 0
    refused: frozenset[bytes] = frozenset()

    def connect(self, frame: bytes, options: bytes) -> bytes:
        self.told.append((b"CONNECT", options))
        return frame

    def subscribe(self, frame: bytes, subject: bytes, queue: bytes, sid: bytes) -> bytes:
        self.told.append((b"SUB", subject, queue, sid))
        return b"" if subject in self.refused else frame

    def unsubscribe(self, frame: bytes, sid: bytes, most: int) -> bytes:
        self.told.append((b"UNSUB", sid, b"%d" % most))
        return frame

    def pong(self, frame: bytes) -> bytes:
        self.told.append((b"PONG",))
        return frame

    def publishing(self) -> None:
        self.published += 1

    def may_publish(self, subject: bytes, reply: bytes) -> bool | None:
        if subject.startswith(b"$JS.API"):
            return None
        self.told.append((b"PUB", subject, reply))
        return not subject.startswith(b"$mq9.PUSH.")

    def may_contain(self, subject: bytes, body: bytes | None) -> bool:
        self.told.append((b"body", subject, b"(large)" if body is None else body))
        return body is not None and b"bad" not in body


@dataclass
class Server:
    """Notes what it is told, and hands on."""

    told: list[tuple[bytes, ...]] = field(default_factory=list)

    def info(self, frame: bytes) -> bytes:
        self.told.append((b"INFO", frame))
        return frame

    def ping(self, frame: bytes) -> bytes:
        self.told.append((b"PING",))
        return frame

    def succeeded(self, frame: bytes) -> bytes:
        self.told.append((b"+OK",))
        return frame

    def failed(self, frame: bytes) -> bytes:
        self.told.append((b"-ERR", frame))
        return frame

    def flushed(self, frame: bytes) -> bytes:
        self.told.append((b"PONG",))
        return frame

    def pushed(self, token: bytes, sid: bytes, msg_id: bytes | None, lane: bytes | None) -> bool:
        self.told.append((b"push", sid, msg_id or b"", lane or b""))
        return token != GONE


def pub(subject: bytes, payload: bytes = b"", reply: bytes = b"", head: bytes | None = None) -> bytes:
    words = [subject, *([reply] if reply else [])]
    if head is None:
        return b"PUB %b %d\r\n%b\r\n" % (b" ".join(words), len(payload), payload)
    sizes = len(head), len(head) + len(payload)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (b" ".join(words), *sizes, head, payload)


@st.composite
def publishes(draw: st.DrawFn) -> bytes:
    head = draw(st.none() | st.binary(max_size=20).map(lambda text: b"NATS/1.0\r\n" + text + b"\r\n\r\n"))
    reply = draw(st.just(b"") | SUBJECTS)
    return pub(draw(SUBJECTS), draw(PAYLOADS), reply, head)


CLIENT_FRAMES = st.one_of(
    publishes(),
    st.builds(lambda sid, subject: b"SUB %b %b\r\n" % (subject, sid), SIDS, SUBJECTS),
    st.builds(lambda sid, subject: b"sub\t%b  workers \t%b\n" % (subject, sid), SIDS, SUBJECTS),
    st.builds(lambda sid: b"UNSUB %b\r\n" % sid, SIDS),
    st.builds(lambda sid: b"UNSUB %b 5\r\n" % sid, SIDS),
    st.sampled_from([b"PING\r\n", b"pong\r\n", b'CONNECT {"verbose":false}\r\n', b"Pub  a\t3\r\nxyz\r\n"]),
    PAYLOADS.map(lambda body: pub(b"$JS.API.STREAM.CREATE.s", body)),
)


def message(subject: bytes, sid: bytes, payload: bytes, reply: bytes = b"", head: bytes | None = None) -> bytes:
    words = [subject, sid, *([reply] if reply else [])]
    if head is None:
        return b"MSG %b %d\r\n%b\r\n" % (b" ".join(words), len(payload), payload)
    sizes = len(head), len(head) + len(payload)
    return b"HMSG %b %d %d\r\n%b%b\r\n" % (b" ".join(words), *sizes, head, payload)


GONE = b"g0neg0neg0neg0neg0neg0nego"
"""The token of a subscription that is over."""


@st.composite
def server_frames(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A frame, and what is to come of it."""
    kind = draw(st.sampled_from(["message", "push", "line"]))
    if kind == "line":
        line = draw(st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'x'\r\n", b"INFO {} \r\n"]))
        return line, line
    sid, payload = draw(SIDS), draw(PAYLOADS)
    reply = draw(st.just(b"") | SUBJECTS)
    msg_id = draw(st.none() | st.integers(0, 10**18))
    head = None
    if draw(st.booleans()):
        lane = draw(st.sampled_from([b"", b"mq9-priority: critical\r\n", b"mq9-priority: low\r\n"]))
        first = b"" if msg_id is None else b"mq9-msg-id: %d\r\n%b" % (msg_id, lane)
        head = (
            b"NATS/1.0\r\n" + first + draw(st.sampled_from([b"", b"a: b\r\n", b"c: " + b"d" * 90 + b"\r\n"])) + b"\r\n"
        )
    subject = draw(SUBJECTS)
    clean = message(subject, sid, payload, reply, head)
    if kind == "message":
        return clean, clean
    token = draw(st.sampled_from([b"k3yk3yk3yk3yk3yk3yk3yk3yk3", GONE]))
    return message(b"$mq9.PUSH.%b.%b" % (token, subject), sid, payload, reply, head), b"" if token == GONE else clean


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut the data at these places."""
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if start < end]


PLACES = st.lists(st.integers(0, 10**4), max_size=12)


def fed(stream: ClientStream | ServerStream, chunks: list[bytes]) -> bytes:
    """Feed all chunks; raises what a stream found wrong."""
    out = passed(stream, chunks)
    if stream.violation is not None:
        raise stream.violation
    return out


def passed(stream: ClientStream | ServerStream, chunks: list[bytes]) -> bytes:
    """Feed chunks until something is wrong."""
    out = b""
    for chunk in chunks:
        out += b"".join(stream.feed(chunk))
        if stream.violation is not None:
            break
    return out


@given(st.lists(CLIENT_FRAMES, max_size=8), PLACES)
def test_what_a_client_says_passes_as_it_came_however_it_is_cut(frames: list[bytes], places: list[int]) -> None:
    data = b"".join(frames)
    whole, parts = Client(), Client()
    once = fed(ClientStream(whole), [data])
    assert fed(ClientStream(parts), cut(data, places)) == once
    assert parts == whole
    single = Client()
    assert fed(ClientStream(single), [data[at : at + 1] for at in range(len(data))]) == once
    assert single == whole
    dropped = [told for told in whole.told if told[0] == b"body" and b"bad" in told[2]]
    if not dropped:
        assert once == data
    assert whole.published == sum(frame[:4].upper().strip() in (b"PUB", b"HPUB") for frame in frames) - len(dropped)


@given(st.lists(server_frames(), max_size=8), PLACES)
def test_only_secrets_and_late_pushes_are_cut_out(frames: list[tuple[bytes, bytes]], places: list[int]) -> None:
    data, clean = (b"".join(part) for part in zip(*frames, strict=True)) if frames else (b"", b"")
    whole, parts, single = Server(), Server(), Server()
    assert fed(ServerStream(whole), [data]) == clean
    assert fed(ServerStream(parts), cut(data, places)) == clean
    assert fed(ServerStream(single), [data[at : at + 1] for at in range(len(data))]) == clean
    assert parts == whole == single
    assert sum(told[0] == b"push" for told in whole.told) == sum(frame != kept for frame, kept in frames)


@given(st.lists(CLIENT_FRAMES, min_size=1, max_size=6), PLACES, st.integers(0, 20))
def test_a_frame_of_ours_is_put_in_between_two_frames(frames: list[bytes], places: list[int], when: int) -> None:
    ours = b"PUB ours 0\r\n\r\n"
    data = b"".join(frames)
    stream, out = ClientStream(Client()), []
    chunks = cut(data, places)
    for number, chunk in enumerate(chunks):
        out += stream.feed(chunk)
        if number == when % len(chunks):
            out.append(stream.insert(ours))
    joined = b"".join(out)
    edges = {len(b"".join(frames[:count])) for count in range(len(frames) + 1)}
    assert any(joined == data[:edge] + ours + data[edge:] for edge in edges)


def test_a_chunk_that_nobody_looks_at_is_not_copied() -> None:
    data = pub(b"a.b", b"x" * 100) * 10
    assert ClientStream(Client()).feed(data)[0] is data
    data = message(b"a.b", b"1", b"x" * 100) * 10
    assert ServerStream(Server()).feed(data)[0] is data


def test_a_publish_that_is_refused_is_left_out_with_its_payload() -> None:
    data = pub(b"a", b"1") + pub(b"$mq9.PUSH.x.y", b"SUB > 1\r\n" * 50) + pub(b"b", b"2")
    for chunks in ([data], cut(data, list(range(len(data))))):
        client = Client()
        assert fed(ClientStream(client), chunks) == pub(b"a", b"1") + pub(b"b", b"2")
        assert client.told == [(b"PUB", b"$mq9.PUSH.x.y", b"")]
        assert client.published == 2


def test_a_reply_subject_is_looked_at_as_well() -> None:
    client = Client()
    fed(ClientStream(client), [pub(b"a", b"", b"$mq9.PUSH.x.y"), pub(b"a", b"", b"mq9ctl.z", b"NATS/1.0\r\n\r\n")])
    assert client.told == [(b"PUB", b"a", b"$mq9.PUSH.x.y"), (b"PUB", b"a", b"mq9ctl.z")]


def test_an_inspected_body_is_whole_and_without_headers() -> None:
    verb = b"$JS.API.STREAM.CREATE.s"
    data = pub(verb, b"some bad", b"r", b"NATS/1.0\r\nbad: 1\r\n\r\n") + pub(
        verb, b"good", b"r", b"NATS/1.0\r\nbad: 1\r\n\r\n"
    )
    client = Client()
    out = fed(ClientStream(client), cut(data, list(range(0, len(data), 3))))
    assert out == pub(verb, b"good", b"r", b"NATS/1.0\r\nbad: 1\r\n\r\n")
    assert [told[2] for told in client.told if told[0] == b"body"] == [b"some bad", b"good"]


def test_a_body_that_is_too_large_to_be_looked_at_is_not_kept() -> None:
    client = Client()
    stream = ClientStream(client)
    assert b"".join(stream.feed(b"PUB $JS.API.STREAM.CREATE.s %d\r\n" % (MAX_INSPECTED + 1))) == b""
    assert client.told[-1] == (b"body", b"$JS.API.STREAM.CREATE.s", b"(large)")
    assert stream.feed(b"x" * (MAX_INSPECTED + 1)) == []
    assert stream.feed(b"\r\nPING\r\n") == [b"PING\r\n"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\n", "Unknown Protocol Operation"),
        (b"\r\n", "Unknown Protocol Operation"),
        (b"\x00\x01\x02\n", "Unknown Protocol Operation"),
        (b"PUB a -1\r\n", "Unknown Protocol Operation"),
        (b"PUB a 99999999999\r\n", "Unknown Protocol Operation"),
        (b"PUB a 1x\r\n", "Unknown Protocol Operation"),
        (b"PUB 1\r\n", "Unknown Protocol Operation"),
        (b"PUB a b c 1\r\n", "Unknown Protocol Operation"),
        (b"HPUB a 1\r\n", "Unknown Protocol Operation"),
        (b"SUB a\r\n", "Unknown Protocol Operation"),
        (b"SUB a b c d\r\n", "Unknown Protocol Operation"),
        (b"UNSUB\r\n", "Unknown Protocol Operation"),
        (b"PINGS\r\n", "Unknown Protocol Operation"),
        # nats-server takes the last byte of such a line off, and so reads another size.
        (b"PUB a\rb 15\n", "Unknown Protocol Operation"),
        (b"PUB a 1\r5\r\n", "Unknown Protocol Operation"),
        (b"SUB " + b"a" * MAX_LINE + b" 1\r\n", "maximum control line exceeded"),
        (b"SUB a " + b"q" * 100_000, "maximum control line exceeded"),
        (b"X" * 5000, "maximum control line exceeded"),
        (b"CONNECT " + b" " * 70_000, "maximum control line exceeded"),
    ],
)
def test_what_nats_server_may_read_otherwise_is_refused(data: bytes, text: str) -> None:
    for chunks in ([data], [data[:7], data[7:]], [data[:-1], data[-1:]]):
        with pytest.raises(ProtocolViolationError, match=text):
            fed(ClientStream(Client()), chunks)


def test_a_long_connect_passes() -> None:
    data = b'CONNECT {"jwt":"%b"}\r\n' % (b"x" * 8000)
    assert fed(ClientStream(Client()), cut(data, [5, 4099, 4200])) == data


@given(st.binary(max_size=200), PLACES)
def test_any_bytes_are_either_frames_or_refused(data: bytes, places: list[int]) -> None:
    for make in (lambda: ClientStream(Client()), lambda: ServerStream(Server())):
        whole, parts = make(), make()
        assert passed(whole, [data]) == passed(parts, cut(data, places))
        assert str(whole.violation) == str(parts.violation)


def test_what_came_before_a_broken_frame_passes() -> None:
    data = pub(b"a", b"1")
    assert passed(ClientStream(Client()), [data + b"oops\r\n"]) == data
