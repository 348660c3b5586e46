"""The frames of NATS's protocol: whatever the chunks, the same bytes; nothing hidden from what must be seen."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.gateway.protocol import MAX_INSPECTED, MAX_SHORT_WAY
from mediator.gateway.streams import UnfinishedCommands
from mediator.nats.frames import MAX_LINE, ProtocolViolationError
from tests.harness.gateway_protocol import QUIET, ClientPath, question

SUBJECTS = st.text("abcz09$_.-", min_size=1, max_size=20).map(str.encode)
PAYLOADS = st.binary(max_size=60) | st.sampled_from([b"SUB a 1\r\n", b"PING\r\n", b"\r\n", b"MSG a 1 3\r\nabc\r\n"])
SIDS = st.integers(1, 99).map(lambda number: b"%d" % number)


SHORT, LONG = b"_INBOX.a.1", b"_INBOX.b.1"
"""Replies to requests that go the short way, and that pass to the server."""
INBOX = b"SUB _INBOX.a.* inbox\r\n"
STREAM = b"$JS.API.STREAM.CREATE.s"


def client_path(identified: bool = True, **options: Any) -> ClientPath:
    """Return a connection with an inbox, which takes requests the short way once it is identified."""
    path = ClientPath(QUIET + INBOX, account=b"ACME", **options)
    if identified:
        path.client(pub(b"$mq9.AI.X", b"", SHORT))
        path.identify()
        path.requests.clear()
    path.server(b"")
    return path


@dataclass
class Outcome:
    """What came out of a connection."""

    to_server: bytes = b""
    to_client: bytes = b""
    requests: list[tuple[str, bytes, bytes, dict[str, str] | None]] = field(default_factory=list)
    ends: list[tuple[bytes, str]] = field(default_factory=list)
    violation: str = ""


def passed(path: ClientPath, chunks: list[bytes], server: bool = False) -> Outcome:
    """Feed chunks until something is wrong; questions who the client is are answered behind each chunk."""
    found = Outcome()
    for chunk in chunks:
        try:
            written = [(path.server if server else path.client)(chunk)]
        except ProtocolViolationError as error:
            found.violation = str(error)
            written = [path.take()]
        while path.protocol.waiting and not found.violation:
            try:
                written.append(path.identify())
            except ProtocolViolationError as error:
                found.violation = str(error)
                written.append(path.take())
        found.to_server += b"".join(up for up, _ in written)
        found.to_client += b"".join(down for _, down in written)
        if found.violation:
            break
    found.requests = [(each.subject, each.reply, each.data, each.headers) for each in path.requests]
    found.ends = path.ends
    return found


def fed(path: ClientPath, chunks: list[bytes], server: bool = False) -> Outcome:
    """Feed all chunks; raises what was wrong."""
    found = passed(path, chunks, server)
    if found.violation:
        raise ProtocolViolationError(found.violation)
    return found


def refusals(found: Outcome) -> int:
    """Return how many publishes were refused."""
    return found.to_client.count(b"-ERR 'Permissions Violation for Publish")


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
    reply = draw(st.sampled_from([b"", SHORT, LONG, b"plain"]))
    return pub(b"$mq9.AI." + verb, draw(PAYLOADS), reply, head)


CLIENT_FRAMES = st.one_of(
    publishes(),
    requests(),
    st.builds(lambda sid, subject: b"SUB %b %b\r\n" % (subject, sid), SIDS, SUBJECTS),
    st.builds(lambda sid, subject: b"sub\t%b  workers \t%b\n" % (subject, sid), SIDS, SUBJECTS),
    st.builds(lambda sid: b"UNSUB %b\r\n" % sid, SIDS),
    st.builds(lambda sid: b"UNSUB %b 5\r\n" % sid, SIDS),
    st.sampled_from([b"PING\r\n", b"pong\r\n", b"Pub  a\t3\r\nxyz\r\n"]),
    st.sampled_from([b'{"subjects":["ok"]}', b'{"subjects":["$mq9.>"]}', b"bad"]).map(lambda body: pub(STREAM, body)),
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
        return draw(st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'x'\r\n", b"INFO x \r\n"]))
    head = draw(st.none() | st.binary(max_size=20).map(lambda text: b"NATS/1.0\r\n" + text + b"\r\n\r\n"))
    return message(draw(SUBJECTS), draw(SIDS), draw(PAYLOADS), draw(st.just(b"") | SUBJECTS), head)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut the data at these places."""
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if start < end]


PLACES = st.lists(st.integers(0, 10**4), max_size=12)


@given(st.lists(CLIENT_FRAMES, max_size=8), PLACES)
def test_what_a_client_says_passes_as_it_came_however_it_is_cut(frames: list[bytes], places: list[int]) -> None:
    data = b"".join(frames)
    once = fed(client_path(), [data])
    assert fed(client_path(), cut(data, places)) == once
    assert fed(client_path(), [data[at : at + 1] for at in range(len(data))]) == once
    # Each frame has passed, was refused, or went the short way; nothing else is missing.
    if not (once.requests or refusals(once) or b"PUSH.OPEN" in once.to_server):
        assert once.to_server == data
    publishes = [frame for frame in frames if frame[:4].upper().strip() in (b"PUB", b"HPUB")]
    taken = [reply for _, reply, _, _ in once.requests]
    assert len(taken) + refusals(once) <= len(publishes)
    assert set(taken) <= {b"", SHORT}


@given(st.lists(server_frames(), max_size=8), PLACES)
def test_what_a_server_says_passes_as_it_came(frames: list[bytes], places: list[int]) -> None:
    data = b"".join(frames)
    for chunks in ([data], cut(data, places), [data[at : at + 1] for at in range(len(data))]):
        assert fed(client_path(), chunks, server=True) == Outcome(to_client=data)


@given(st.lists(CLIENT_FRAMES, max_size=4), st.lists(CLIENT_FRAMES, max_size=4), PLACES)
def test_nothing_is_read_behind_what_is_not_decided(
    before: list[bytes], behind: list[bytes], places: list[int]
) -> None:
    data = b"".join([*before, pub(b"$mq9.AI.MSG.SEND.a", b"x", SHORT), *behind])
    once = fed(client_path(identified=False), [data])
    path = client_path(identified=False)
    seen = [path.client(chunk) for chunk in cut(data, places)]
    up, down = b"".join(up for up, _ in seen), b"".join(down for _, down in seen)
    assert path.requests == []
    assert path.protocol.waiting
    assert once.to_server.startswith(up)
    rest = passed(path, [b""])
    assert (up + rest.to_server, down + rest.to_client, rest.requests) == (
        once.to_server,
        once.to_client,
        once.requests,
    )


@given(st.lists(CLIENT_FRAMES, min_size=1, max_size=6), PLACES, st.integers(0, 20))
def test_a_frame_of_ours_is_put_in_between_two_frames(frames: list[bytes], places: list[int], when: int) -> None:
    data = b"".join(frames)
    path, joined = client_path(identified=False, short_way=False), b""
    chunks = cut(data, places)
    for number, chunk in enumerate(chunks):
        joined += path.client(chunk)[0]
        if number == when % len(chunks):
            # Nobody has said who the client is: the service is asked again.
            path.protocol.identified("token", None)
            joined += path.take()[0]
    # Publishes that are refused leave nothing behind.
    edges = [
        passed(client_path(identified=False, short_way=False), frames[:count]).to_server
        for count in range(len(frames) + 1)
    ]
    assert any(joined == edge + question(1) + edges[-1].removeprefix(edge) for edge in edges)


def test_a_chunk_that_nobody_looks_at_is_not_copied() -> None:
    protocol = client_path().protocol
    data = pub(b"a.b", b"x" * 100) * 10
    protocol.receive_from_client(data)
    assert protocol.data_to_send()[0] is data
    data = message(b"a.b", b"1", b"x" * 100) * 10
    protocol.receive_from_server(data)
    assert protocol.data_to_send()[1] is data


def test_a_publish_that_is_refused_is_left_out_with_its_payload() -> None:
    data = pub(b"a", b"1") + pub(b"$mq9.PUSH.x.y", b"SUB > 1\r\n" * 50) + pub(b"b", b"2")
    for chunks in ([data], cut(data, list(range(len(data))))):
        found = fed(client_path(), chunks)
        assert found.to_server == pub(b"a", b"1") + pub(b"b", b"2")
        assert found.to_client == b"-ERR 'Permissions Violation for Publish to \"$mq9.PUSH.x.y\"'\r\n"


def test_a_reply_subject_is_looked_at_as_well() -> None:
    data = pub(b"a", b"", b"$mq9.PUSH.x.y") + pub(b"a", b"", b"mq9ctl.z", b"NATS/1.0\r\n\r\n")
    found = fed(client_path(), [data])
    assert (found.to_server, refusals(found)) == (b"", 2)


@pytest.mark.parametrize("head", [None, b"NATS/1.0\r\na: SUB x 1\r\n\r\n"])
def test_a_request_is_told_whole_and_does_not_pass(head: bytes | None) -> None:
    body = b"SUB > 1\r\nPUB $mq9.AI.X _INBOX.a.1 0\r\n\r\n"
    data = pub(b"a", b"1") + pub(b"$mq9.AI.MSG.SEND.b", body, SHORT, head) + pub(b"c", b"2")
    for step in (1, 7, len(data)):
        found = fed(client_path(), cut(data, list(range(0, len(data), step))))
        assert found.to_server == pub(b"a", b"1") + pub(b"c", b"2")
        headers = None if head is None else {"a": "SUB x 1"}
        assert found.requests == [("mq9.ACME.$mq9.AI.MSG.SEND.b", SHORT, body, headers)]


@pytest.mark.parametrize(
    ("frame", "passes"),
    [
        (pub(b"$mq9.AI.PUSH.OPEN", b"{}", SHORT), False),
        (pub(b"$mq9.AI.MSG.SEND.a", b"x", b"$mq9.PUSH.x"), False),
        (pub(b"$mq9.AI.MSG.SEND.a", b"x", b"other"), True),
        (pub(b"$mq9.AIX.MSG.SEND.a", b"x", SHORT), True),
        (b"pub $mq9.AI.MSG.SEND.a _INBOX.a.1 1\r\nx\r\n", True),
        (b"PUB $mq9.AI.MSG.SEND.a  _INBOX.a.1 1\r\nx\r\n", True),
        (b"PUB $mq9.AI.MSG.SEND.a 5 1\r\nx\r\n", True),
        (pub(b"$mq9.AI.MSG.SEND.*", b"x", SHORT), True),
        (pub(b"$mq9.AI.>", b"x", SHORT), True),
        (pub(b"$mq9.AI.MSG.SEND.a", b"x", b"_INBOX.a."), True),
        (pub(b"$mq9.AI.MSG.SEND.a", b"x", b"_INBOX..a"), True),
        (pub(b"$mq9.AI.MSG.SEND.a", b"x", b"_INBOX.a.*"), False),
        (pub(b"$mq9.AI.MSG.SEND.a", b"x" * (MAX_SHORT_WAY + 1), SHORT), True),
    ],
)
def test_only_plain_requests_to_the_service_are_taken(frame: bytes, passes: bool) -> None:
    for step in (len(frame), 1 if len(frame) < 1000 else 9999):
        found = fed(client_path(), [frame[at : at + step] for at in range(0, len(frame), step)])
        assert (found.to_server, refusals(found)) == ((frame, 0) if passes else (b"", 1))
        assert found.requests == []


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
        frame, mended = pub(subject, b"PUB", reply), pub(delivered, b"PUB", reply)
        for chunks in ([frame * 2], [frame[at : at + 1] for at in range(len(frame))] * 2):
            assert fed(client_path(), chunks).to_server == mended * 2


def test_an_inspected_body_is_whole_and_without_headers() -> None:
    head = b'NATS/1.0\r\n{"subjects":["$mq9.>"]}: 1\r\n\r\n'
    bad, good = pub(STREAM, b'{"subjects":["$mq9.>"]}', b"r", head), pub(STREAM, b'{"subjects":["ok"]}', b"r", head)
    found = fed(client_path(), cut(bad + good, list(range(0, len(bad + good), 3))))
    assert (found.to_server, refusals(found)) == (good, 1)


def test_a_body_that_is_too_large_to_be_looked_at_is_not_kept() -> None:
    path = client_path()
    assert path.client(b"PUB %b %d\r\n" % (STREAM, MAX_INSPECTED + 1)) == (
        b"",
        b"-ERR 'Permissions Violation for Publish to \"%b\"'\r\n" % STREAM,
    )
    assert path.client(b"x" * (MAX_INSPECTED + 1)) == (b"", b"")
    assert path.client(b"\r\nPING\r\n") == (b"PING\r\n", b"")


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
            fed(client_path(), chunks)


def test_a_long_connect_passes() -> None:
    data = b'CONNECT {"jwt":"%b"}\r\n' % (b"x" * 8000)
    assert fed(ClientPath(b""), cut(data, [5, 4099, 4200])).to_server == data


@pytest.mark.parametrize("server", [False, True])
@given(data=st.binary(max_size=200), places=PLACES)
def test_any_bytes_are_either_frames_or_refused(server: bool, data: bytes, places: list[int]) -> None:
    assert passed(client_path(), [data], server) == passed(client_path(), cut(data, places), server)


def test_what_came_before_a_broken_frame_passes() -> None:
    data = pub(b"a", b"1")
    found = passed(client_path(), [data + b"oops\r\n"])
    assert (found.to_server, found.violation) == (data, "Unknown Protocol Operation")


@pytest.mark.rule("N7")
def test_what_finds_no_room_to_wait_goes_on_or_is_dropped() -> None:
    everybody = UnfinishedCommands(limit=1000)
    path = client_path(unfinished=everybody)
    everybody.total += 970
    begun = b"PUB $mq9.AI.MSG.SEND.a _INBOX.a.1 50\r\nabc"
    assert path.client(begun) == (begun, b""), "nats-server reads it piece by piece"
    up, down = path.client(b"x" * 47 + b"\r\nPUB %b 50\r\nabc" % STREAM)
    assert (up, down.startswith(b"-ERR")) == (b"x" * 47 + b"\r\n", True)
    whole = pub(b"$mq9.AI.MSG.SEND.a", b"x", SHORT)
    assert path.client(b"x" * 47 + b"\r\n" + whole) == (question(2), b"")
    path.identify()
    assert [each.data for each in path.requests] == [b"x"], "what is whole waits for nothing but its turn"
