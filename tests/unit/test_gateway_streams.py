"""The frames of NATS's protocol: whatever the chunks, the same bytes; nothing hidden from what must be seen."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.gateway.protocol import MAX_INSPECTED, MAX_LINE, ClientStream, ProtocolViolationError, ServerStream

SUBJECTS = st.text("abcz09$_.-", min_size=1, max_size=20).map(str.encode)
PAYLOADS = st.binary(max_size=60) | st.sampled_from([b"SUB a 1\r\n", b"PING\r\n", b"\r\n", b"MSG a 1 3\r\nabc\r\n"])
SIDS = st.integers(1, 99).map(lambda number: b"%d" % number)


SHORT, LONG, WAITING = b"_INBOX.a.1", b"_INBOX.b.1", b"_INBOX.c.1"
"""Replies to requests that are taken, that pass to the server, and that are taken once that is decided."""


@dataclass
class Client:
    """Notes what it is told, and hands on."""

    told: list[tuple[bytes, ...]] = field(default_factory=list)
    published: int = 0
    refused: frozenset[bytes] = frozenset()
    decided: bool = True
    connected: bool = True
    room: bool = True

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

    def may_wait(self, size: int) -> bool:
        return self.room

    def pinging(self) -> None:
        self.told.append((b"PING",))

    def may_publish(self, subject: bytes, reply: bytes) -> bool | None:
        if subject.startswith(b"$JS.API"):
            return None
        self.told.append((b"PUB", subject, reply))
        return not subject.startswith(b"$mq9.PUSH.")

    def may_contain(self, subject: bytes, body: bytes | None) -> bool:
        self.told.append((b"body", subject, b"(large)" if body is None else body))
        return body is not None and b"bad" not in body

    def takes(self, reply: bytes, length: int, headers: bool) -> bool | None:
        if reply == WAITING and not self.decided:
            return None
        return reply in (b"", SHORT, WAITING) and length < 100

    def request(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self.told.append((b"request", subject, reply, headers, payload))

    def passing(self, subject: bytes) -> None:
        self.told.append((b"passing", subject))


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


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    verb = draw(st.sampled_from([b"MSG.SEND.a", b"MAILBOX.CREATE", b"PUSH.OPEN", b"\xff*>"]))
    head = draw(st.none() | st.binary(max_size=20).map(lambda text: b"NATS/1.0\r\n" + text + b"\r\n\r\n"))
    reply = draw(st.sampled_from([b"", SHORT, LONG, WAITING, b"plain"]))
    return pub(b"$mq9.AI." + verb, draw(PAYLOADS), reply, head)


CLIENT_FRAMES = st.one_of(
    publishes(),
    requests(),
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


@st.composite
def server_frames(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        return draw(st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'x'\r\n", b"INFO {} \r\n"]))
    head = draw(st.none() | st.binary(max_size=20).map(lambda text: b"NATS/1.0\r\n" + text + b"\r\n\r\n"))
    return message(draw(SUBJECTS), draw(SIDS), draw(PAYLOADS), draw(st.just(b"") | SUBJECTS), head)


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


def is_publish(frame: bytes) -> bool:
    return frame[:4].upper().strip() in (b"PUB", b"HPUB")


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
    # Each publish has passed, was refused, or went the short way; nothing else is missing.
    taken = [told for told in whole.told if told[0] == b"request"]
    refused = [told for told in whole.told if told[0] == b"body" and b"bad" in told[2]]
    passing = [frame for frame in frames if not is_publish(frame)]
    assert whole.published + len(taken) + len(refused) == len(frames) - len(passing)
    if not (taken or refused):
        assert once == data
    left = [pub(subject, body, reply, head or None) for _, subject, reply, head, body in taken]
    assert sorted(left) == sorted(frame for frame in frames if frame in left), "each request is told as it came"


@given(st.lists(server_frames(), max_size=8), PLACES)
def test_what_a_server_says_passes_as_it_came(frames: list[bytes], places: list[int]) -> None:
    data = b"".join(frames)
    whole, parts, single = Server(), Server(), Server()
    assert fed(ServerStream(whole), [data]) == data
    assert fed(ServerStream(parts), cut(data, places)) == data
    assert fed(ServerStream(single), [data[at : at + 1] for at in range(len(data))]) == data
    assert parts == whole == single
    assert len(whole.told) == sum(not frame.startswith((b"MSG", b"HMSG")) for frame in frames)


@given(st.lists(CLIENT_FRAMES, max_size=4), st.lists(CLIENT_FRAMES, max_size=4), PLACES)
def test_nothing_is_read_behind_what_is_not_decided(
    before: list[bytes], behind: list[bytes], places: list[int]
) -> None:
    waiting = pub(b"$mq9.AI.MSG.SEND.a", b"x", WAITING)
    data = b"".join([*before, waiting, *behind])
    whole = Client()
    once = fed(ClientStream(whole), [data])
    parts = Client(decided=False)
    stream = ClientStream(parts)
    out = fed(stream, cut(data, places))
    assert (b"request", b"$mq9.AI.MSG.SEND.a", WAITING, b"", b"x") not in parts.told
    assert once.startswith(out)
    parts.decided = True
    assert out + fed(stream, [b""]) == once
    assert parts == whole


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
    # Requests that are taken, and streams that are refused, leave nothing behind.
    edges = [passed(ClientStream(Client()), frames[:count]) for count in range(len(frames) + 1)]
    assert any(joined == edge + ours + edges[-1].removeprefix(edge) for edge in edges)


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
    told = [each for each in client.told if each[0] == b"PUB"]
    assert told == [(b"PUB", b"a", b"$mq9.PUSH.x.y"), (b"PUB", b"a", b"mq9ctl.z")]


@pytest.mark.parametrize("head", [None, b"NATS/1.0\r\na: SUB x 1\r\n\r\n"])
def test_a_request_is_told_whole_and_does_not_pass(head: bytes | None) -> None:
    body = b"SUB > 1\r\nPUB $mq9.AI.X _INBOX.a.1 0\r\n\r\n"
    data = pub(b"a", b"1") + pub(b"$mq9.AI.MSG.SEND.b", body, SHORT, head) + pub(b"c", b"2")
    for step in (1, 7, len(data)):
        client = Client()
        assert fed(ClientStream(client), cut(data, list(range(0, len(data), step)))) == pub(b"a", b"1") + pub(
            b"c", b"2"
        )
        assert client.told == [(b"request", b"$mq9.AI.MSG.SEND.b", SHORT, head or b"", body)]
        assert client.published == 2


@pytest.mark.parametrize(
    "frame",
    [
        pub(b"$mq9.AI.PUSH.OPEN", b"{}", SHORT),
        pub(b"$mq9.AI.MSG.SEND.a", b"x", b"$mq9.PUSH.x"),
        pub(b"$mq9.AI.MSG.SEND.a", b"x", b"other"),
        pub(b"$mq9.AIX.MSG.SEND.a", b"x", SHORT),
        b"pub $mq9.AI.MSG.SEND.a _INBOX.a.1 1\r\nx\r\n",
        b"PUB $mq9.AI.MSG.SEND.a  _INBOX.a.1 1\r\nx\r\n",
        b"PUB $mq9.AI.MSG.SEND.a 5 1\r\nx\r\n",
        pub(b"$mq9.AI.MSG.SEND.*", b"x", SHORT),
        pub(b"$mq9.AI.>", b"x", SHORT),
        pub(b"$mq9.AI.MSG.SEND.a", b"x", b"_INBOX.a."),
        pub(b"$mq9.AI.MSG.SEND.a", b"x", b"_INBOX..a"),
        pub(b"$mq9.AI.MSG.SEND.a", b"x", b"_INBOX.a.*"),
        pub(b"$mq9.AI.MSG.SEND.a", b"x" * 100, SHORT),
    ],
)
def test_only_plain_requests_to_the_service_are_taken(frame: bytes) -> None:
    for chunks in ([frame], [frame[at : at + 1] for at in range(len(frame))]):
        client = Client()
        assert fed(ClientStream(client), chunks) == frame
        assert not [each for each in client.told if each[0] == b"request"]
        assert client.told[-1][0] == b"passing"


@pytest.mark.rule("N2")
@pytest.mark.parametrize(
    ("subject", "delivered"),
    [
        (b"$mq9.AI.MSG.SEND.", b"$mq9.AI.MSG.SEND.#"),
        (b"$mq9.AI.MSG..SEND", b"$mq9.AI.MSG.#"),
        (b"$mq9.AI.MSG.SEND.a...b.", b"$mq9.AI.MSG.SEND.a.#"),
        (b"$mq9.AI.", b"$mq9.AI.#"),
        (b"$mq9.AI..PUB", b"$mq9.AI.#"),
    ],
)
def test_a_request_with_an_empty_token_reaches_the_service(subject: bytes, delivered: bytes) -> None:
    for reply in (SHORT, b""):
        frame, passed = pub(subject, b"PUB", reply), pub(delivered, b"PUB", reply)
        for chunks in ([frame * 2], [frame[at : at + 1] for at in range(len(frame))] * 2):
            assert fed(ClientStream(Client()), chunks) == passed * 2


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
        (b"HPUB $mq9.AI.X _INBOX.a.1 2\r\n", "Unknown Protocol Operation"),
        (b"HPUB $mq9.AI.X _INBOX.a.1 3 2\r\nab\r\n", "Unknown Protocol Operation"),
        (b"PUB $mq9.AI.X _INBOX.a.1 2\r\nabc\r\n", "Unknown Protocol Operation"),
        (b"PUB $mq9.AI.X _INBOX.a.1 2\r\nab\n\n", "Unknown Protocol Operation"),
        (b"PUB $mq9.AI.X _INBOX.a.1 9999999999\r\n", "Unknown Protocol Operation"),
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


@pytest.mark.rule("N7")
def test_what_finds_no_room_to_wait_goes_on_or_is_dropped() -> None:
    client = Client(room=False)
    stream = ClientStream(client)
    begun = b"PUB $mq9.AI.MSG.SEND.a _INBOX.a.1 50\r\nabc"
    assert b"".join(stream.feed(begun)) == begun, "nats-server reads it piece by piece"
    assert b"".join(stream.feed(b"x" * 47 + b"\r\nPUB $JS.API.STREAM.CREATE.s 50\r\nabc")) == b"x" * 47 + b"\r\n"
    assert client.told[-1] == (b"body", b"$JS.API.STREAM.CREATE.s", b"(large)")
    whole = pub(b"$mq9.AI.MSG.SEND.a", b"x", SHORT)
    assert fed(stream, [b"x" * 47 + b"\r\n" + whole]) == b""
    assert client.told[-1][0] == b"request", "what is whole waits for nothing"
