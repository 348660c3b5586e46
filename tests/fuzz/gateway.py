"""What is fuzzed of the gateway: both directions of a connection, in chunks of any size, and the subjects.

However the bytes are cut, the same comes out, or the same refusal.
"""

from collections.abc import Callable, Sequence

from mediator.nats import subjects
from mediator.push.gateway.inboxes import InboxClaims
from mediator.push.gateway.session import GatewaySession, GatewaySubscription, PublicAddress
from mediator.push.gateway.streams import ProtocolViolationError
from mediator.push.protocol import read_heartbeat, read_open, read_open_reply


class _Owner:
    """Learns of subscriptions, and does nothing about them."""

    def subscribed(self, subscription: GatewaySubscription) -> None: ...
    def confirmed(self, subscription: GatewaySubscription) -> None: ...
    def ended(self, subscription: GatewaySubscription, how: str) -> None: ...


def _session() -> GatewaySession:
    tokens = iter(range(1 << 30))
    front = PublicAddress("gateway", "127.0.0.1", 4222, False, 100)
    return GatewaySession(_Owner(), InboxClaims(lambda *_: None), front, "127.0.0.1", lambda: f"t{next(tokens):025d}")


def _through(take: Callable[[GatewaySession, bytes], None], chunks: Sequence[bytes]) -> tuple[bytes, bytes, str]:
    """Return what a fresh session hands on to server and client, and how it ended."""
    session = _session()
    to_server, to_client, how = b"", b"", ""
    for chunk in chunks:
        try:
            take(session, chunk)
        except ProtocolViolationError as error:
            how = str(error)
        up, down, _ = session.take()
        to_server += up
        to_client += down
        if how:
            break
    session.close()
    return to_server, to_client, how


def _cut(data: bytes, step: int) -> list[bytes]:
    return [data[at : at + step] for at in range(0, len(data), step)]


def client(data: bytes) -> None:
    """Read what a client writes; the first byte says how it is cut."""
    step, data = 1 + data[0] if data else 1, data[1:]
    whole = _through(GatewaySession.from_client, [data])
    parts = _through(GatewaySession.from_client, _cut(data, step))
    assert parts == whole, (parts, whole)


def server(data: bytes) -> None:
    """Read what a server writes."""
    step, data = 1 + data[0] if data else 1, data[1:]
    whole = _through(GatewaySession.from_server, [data])
    parts = _through(GatewaySession.from_server, _cut(data, step))
    assert parts == whole, (parts, whole)


def subject(data: bytes) -> None:
    """Read a subject of a subscription."""
    text = data.decode("utf-8", "replace")
    found = subjects.classify(text)
    if isinstance(found, subjects.PlainSubject):
        assert not text.startswith("$mq9.")
    if isinstance(found, subjects.MailboxSubject):
        assert found.word in {"", subjects.ANY, *subjects.WORDS[found.edition]}
        assert 1 <= len(found.address) <= 128
    subjects.stream_allowed(text)


def told(data: bytes) -> None:
    """Read what gateway and service tell each other."""
    from mediator.errors import BadRequestError

    for read in (read_open, read_open_reply, read_heartbeat):
        try:
            read(data)
        except BadRequestError:
            continue


GATEWAY: dict[str, tuple[Callable[[bytes], None], Sequence[bytes]]] = {
    "gateway_client": (
        client,
        (
            b'\x02CONNECT {"verbose":false}\r\nSUB $mq9.AI.MAILBOX.MSG.a.* q 1\r\nPUB a b 2\r\nhi\r\nPING\r\nPONG\r\n',
            b'\x05HPUB $JS.API.STREAM.CREATE.s r 12 35\r\nNATS/1.0\r\n\r\n{"subjects":["$mq9.>"]}\r\nUNSUB 1 5\r\n',
            b"\x09sub\t_INBOX.>  1\nPub $mq9.PUSH.x.y 3\r\nabc\r\nSUB BROADCAST.# 2\r\nSUB $mq9.AI.BROADCAST.# 3\r\n",
        ),
    ),
    "gateway_server": (
        server,
        (
            b'\x03INFO {"server_id":"x","port":1,"connect_urls":[]} \r\nPING\r\n+OK\r\n-ERR \'x\'\r\nPONG\r\n',
            b"\x07HMSG $mq9.PUSH.t.a 1 28 30\r\nNATS/1.0\r\nmq9-msg-id: 12\r\n\r\nhi\r\n"
            b"MSG $mq9.PUSH.t.b 1 r 1\r\nx\r\n",
            b"\x01MSG a 1 2\r\nhi\r\nHMSG a 1 r 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        ),
    ),
    "gateway_subject": (
        subject,
        (b"$mq9.AI.MAILBOX.MSG.a.b.urgent", b"$mq9.AI.INBOX.a.*", b"$mq9.AI.BROADCAST.#", b"_INBOX.>", b"*.*", b">"),
    ),
    "gateway_told": (
        told,
        (
            b'{"gateway":"g","token":"t","subject":"s","queue":"","after":{"urgent":1}}',
            b'{"token":"t","instance":"i","error":""}',
            b'{"sender":"s","credits":{"t":1},"closed":{"t":"unsub"},"leaving":true}',
        ),
    ),
}
