"""What is fuzzed of the gateway: both directions of a connection, in chunks of any size, and the subjects.

However the bytes are cut, the same comes out, or the same refusal.
"""

from collections.abc import Callable, Sequence

from mediator.nats import subjects
from mediator.nats.frames import ProtocolViolationError
from tests.harness.gateway_protocol import ClientPath

Outcome = tuple[bytes, bytes, str, list[tuple[object, ...]]]


def _through(take: Callable[[ClientPath, bytes], tuple[bytes, bytes]], chunks: Sequence[bytes]) -> Outcome:
    """Return what a fresh connection passes on to server, client and service, and how it ended."""
    path = ClientPath(b"", account=b"ACME")
    to_server, to_client, how = b"", b"", ""
    left = list(chunks)
    while left and not how:
        try:
            up, down = take(path, left.pop(0))
        except ProtocolViolationError as error:
            how = str(error)
            up, down = path.take()
        to_server += up
        to_client += down
        if not left and path.protocol.waiting and not how:
            up, down = path.identify()
            to_server += up
            to_client += down
            if path.protocol.waiting:
                left.append(b"")
    path.close()
    requests = [(each.subject, each.reply, each.data, each.headers) for each in path.requests]
    return to_server, to_client, how, requests


def _cut(data: bytes, step: int) -> list[bytes]:
    return [data[at : at + step] for at in range(0, len(data), step)]


def client(data: bytes) -> None:
    """Read what a client writes; the first byte says how it is cut."""
    step, data = 1 + data[0] if data else 1, data[1:]
    whole = _through(ClientPath.client, [data])
    parts = _through(ClientPath.client, _cut(data, step))
    assert parts == whole, (parts, whole)


def server(data: bytes) -> None:
    """Read what a server writes."""
    step, data = 1 + data[0] if data else 1, data[1:]
    whole = _through(ClientPath.server, [data])
    parts = _through(ClientPath.server, _cut(data, step))
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


GATEWAY: dict[str, tuple[Callable[[bytes], None], Sequence[bytes]]] = {
    "gateway_client": (
        client,
        (
            b'\x02CONNECT {"pedantic":false}\r\nSUB $mq9.AI.MAILBOX.MSG.a.* q 1\r\nPUB a b 2\r\nhi\r\nPING\r\nPONG\r\n',
            b'\x05HPUB $JS.API.STREAM.CREATE.s r 12 35\r\nNATS/1.0\r\n\r\n{"subjects":["$mq9.>"]}\r\nUNSUB 1 5\r\n',
            b'\x04CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\nSUB _INBOX.a.* 1\r\n'
            b"PUB $mq9.AI.MSG.SEND.a _INBOX.a.1 9\r\nUNSUB 1\r\n\r\n"
            b"HPUB $mq9.AI.MSG.SEND.a _INBOX.a.2 12 13\r\nNATS/1.0\r\n\r\nx\r\nUNSUB 1 3\r\n",
            b"\x09sub\t_INBOX.>  1\nPub $mq9.PUSH.x.y 3\r\nabc\r\nSUB BROADCAST.# 2\r\nSUB $mq9.AI.BROADCAST.# 3\r\n",
        ),
    ),
    "gateway_server": (
        server,
        (
            b'\x03INFO {"server_id":"x","port":1,"connect_urls":[]} \r\nPING\r\n+OK\r\n-ERR \'x\'\r\nPONG\r\n',
            b"\x07-ERR 'Permissions Violation for Subscription to \"$mq9.PUSH.gateway.x\"'\r\nMSG a.b 1 r 1\r\nx\r\n",
            b"\x01MSG a 1 2\r\nhi\r\nHMSG a 1 r 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        ),
    ),
    "gateway_subject": (
        subject,
        (b"$mq9.AI.MAILBOX.MSG.a.b.urgent", b"$mq9.AI.INBOX.a.*", b"$mq9.AI.BROADCAST.#", b"_INBOX.>", b"*.*", b">"),
    ),
}
