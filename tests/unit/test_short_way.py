"""The short way of requests: when it is taken, and that a client cannot tell (A6, A8, N1, N2, N10)."""

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.gateway.identity import ClientIdentity
from mediator.gateway.inboxes import MAX_INBOXES, InboxClaims
from mediator.gateway.protocol import MAX_SHORT_WAY
from mediator.mailboxes.address import DEFAULT_TENANT
from tests.harness.gateway_protocol import ACME, QUIET, ClientPath, question

SEND = b"$mq9.AI.MSG.SEND.a"
INBOX = b"SUB _INBOX.a.* 1\r\n"


def send(payload: bytes = b"x", reply: bytes = b"_INBOX.a.1 ") -> bytes:
    return b"PUB %b %b%d\r\n%b\r\n" % (SEND, reply, len(payload), payload)


def opened(connect: bytes = QUIET, inboxes: InboxClaims | None = None) -> ClientPath:
    """Return a connection that has an inbox, and the short way."""
    way = unopened(connect, inboxes)
    way.client(send(b"first"))
    assert way.identify() == (b"", b"")
    assert [each.data for each in way.requests] == [b"first"]
    way.requests.clear()
    return way


def unopened(connect: bytes = QUIET, inboxes: InboxClaims | None = None) -> ClientPath:
    """Return a connection that has an inbox, and may get the short way."""
    return ClientPath(connect + INBOX, inboxes=inboxes, account=b"ACME")


@pytest.mark.rule("A6", "N1")
def test_a_request_goes_to_the_door_and_its_answer_back() -> None:
    way = opened()
    assert way.client(send(b"hello")) == (b"", b"")
    (request,) = way.requests
    assert request.subject == "mq9.ACME.$mq9.AI.MSG.SEND.a"
    assert (request.reply, request.data, request.headers) == (b"_INBOX.a.1", b"hello", None)
    assert request.client.name == "me"
    assert way.answer(0, b"{}") == b"MSG _INBOX.a.1 1 2\r\n{}\r\n"


@pytest.mark.rule("A6")
def test_without_accounts_the_subject_stays() -> None:
    way = unopened()
    way.client(send())
    way.protocol.identified("token1", ClientIdentity(DEFAULT_TENANT, None))
    assert way.requests[0].subject == SEND.decode()


@pytest.mark.rule("N1")
def test_headers_are_read_and_none_speaks_for_the_server() -> None:
    way = opened()
    head = b'NATS/1.0\r\nmq9-key: k\r\nNats-Request-Info: {"name":"other"}\r\n\r\n'
    way.client(b"HPUB %b _INBOX.a.1 %d %d\r\n%bhi\r\n" % (SEND, len(head), len(head) + 2, head))
    (request,) = way.requests
    assert (request.headers, request.data, request.client.name) == ({"mq9-key": "k"}, b"hi", "me")


@pytest.mark.rule("N2")
def test_a_request_that_wants_no_answer_gets_none() -> None:
    way = opened()
    way.client(send(reply=b""))
    assert way.answer(0, b"{}") == b""


def test_two_connections_are_two_clients_of_the_door() -> None:
    one, other = opened(), opened()
    one.client(send() + send())
    other.client(send())
    (first, second), (third,) = one.requests, other.requests
    assert first.client == second.client != third.client


@pytest.mark.rule("A6")
def test_nothing_is_read_until_it_is_known_who_asks() -> None:
    way = unopened()
    assert way.client(b"PUB a 0\r\n\r\n" + send() + b"PUB b 0\r\n\r\n") == (b"PUB a 0\r\n\r\n" + question(1), b"")
    assert way.protocol.waiting
    assert way.client(b"PING\r\n") == (b"", b"")
    assert way.questions == 1
    way.protocol.identified("another", ACME)
    assert way.requests == []
    way.protocol.identified("token1", ACME)
    assert len(way.requests) == 1
    assert way.take() == (b"PUB b 0\r\n\r\nPING\r\n", b"")
    assert not way.protocol.waiting


@pytest.mark.rule("A8")
def test_no_request_overtakes_one_that_went_through_nats() -> None:
    way = opened()
    long = send(b"long", b"other.inbox ")
    assert way.client(long + send(b"short") + send(b"next")) == (long + question(2), b""), "it is asked behind that one"
    assert way.requests == []
    way.protocol.identified("token2", ACME)
    assert [each.data for each in way.requests] == [b"short", b"next"]
    way.client(b"PUB elsewhere 0\r\n\r\n" + send(b"at once"))
    assert way.requests[-1].data == b"at once"


@pytest.mark.rule("A9")
def test_who_gets_no_answer_goes_through_nats() -> None:
    way = unopened()
    way.client(send() + b"PING\r\n")
    way.protocol.identified("token1", None)
    assert way.take() == (send() + b"PING\r\n", b"")
    assert way.goes_long(send())
    assert way.questions == 1


@pytest.mark.parametrize(
    "connect",
    [
        b"CONNECT {}\r\n",
        b'CONNECT {"verbose":true,"headers":true}\r\n',
        b'CONNECT {"verbose":0}\r\n',
        b'CONNECT {"verbose":false',
        b"CONNECT []\r\n",
    ],
)
def test_a_verbose_client_is_answered_by_nats(connect: bytes) -> None:
    way = unopened(connect if connect.endswith(b"\n") else connect + b"\r\n")
    assert way.goes_long(send())


def test_headers_that_were_not_announced_go_to_nats() -> None:
    way = opened(b'CONNECT {"verbose":false,"pedantic":false}\r\n')
    assert way.goes_long(b"HPUB %b _INBOX.a.1 12 13\r\nNATS/1.0\r\n\r\nx\r\n" % SEND)


@pytest.mark.parametrize(
    "before",
    [
        b"SUB _INBOX.a.1 2\r\n",
        b"SUB _INBOX.a.* 2\r\n",
        b"SUB _INBOX.a.> 2\r\n",
        b"SUB *.a.* 2\r\n",
        b"SUB *.a.1 2\r\n",
        b"SUB _INBOX.b.* queue 2\r\n",
        b"UNSUB 1\r\n",
        b"UNSUB 1 10\r\n",
    ],
)
def test_an_answer_leads_to_exactly_one_plain_subscription(before: bytes) -> None:
    way = opened()
    way.client(before)
    assert way.goes_long(send())
    if before.startswith(b"SUB"):
        way.client(b"UNSUB 2\r\n")
        way.client(send())
        way.protocol.identified("token2", ACME)
        assert len(way.requests) == 1, "it is the only one again"


@pytest.mark.parametrize("reply", [b"_INBOX.b.1 ", b"_INBOX.a ", b"_INBOX.a.1.2 ", b"_INBOX.a. ", b"own.inbox "])
def test_a_reply_to_another_subject_goes_through_nats(reply: bytes) -> None:
    assert opened().goes_long(send(reply=reply))


def test_other_subscriptions_do_not_matter() -> None:
    way = opened()
    way.client(b"SUB plain 2\r\nSUB _INBOX.b.* 3\r\nSUB _INBOX.c 4\r\nSUB events.> 5\r\n")
    way.client(send() + send(reply=b"_INBOX.c ") + send(reply=b"_INBOX.b.7 "))
    assert [way.answer(number, b"") for number in range(3)] == [
        b"MSG _INBOX.a.1 1 0\r\n\r\n",
        b"MSG _INBOX.c 4 0\r\n\r\n",
        b"MSG _INBOX.b.7 3 0\r\n\r\n",
    ]


@pytest.mark.rule("N10")
def test_an_inbox_that_another_connection_took_is_not_used() -> None:
    late: list[Callable[[], None]] = []
    inboxes = InboxClaims(lambda _seconds, call: late.append(call))
    way = opened(inboxes=inboxes)
    unopened(inboxes=inboxes)
    assert way.take()[1] == b"PING\r\n"
    late[0]()
    assert way.goes_long(send())


@pytest.mark.parametrize("size", [MAX_SHORT_WAY + 1, 999_999_999])
def test_a_large_request_goes_through_nats_as_it_comes(size: int) -> None:
    way = opened()
    line = b"PUB %b _INBOX.a.1 %d\r\n" % (SEND, size)
    assert way.client(line) == (line, b"")
    assert way.client(b"x" * 1000) == (b"x" * 1000, b"")


def test_what_the_server_would_refuse_is_left_to_it() -> None:
    way = opened()
    way.protocol.receive_from_server(b'INFO {"max_payload":10} \r\n')
    assert way.goes_long(send(b"x" * 11))


def test_requests_go_through_nats_while_the_door_is_closed() -> None:
    way = opened()
    way.client(send()[:-4])
    way.context.short_way = False
    assert way.client(send()[-4:])[0] == send()


@pytest.mark.rule("N10")
@pytest.mark.parametrize("subject", [b"$mq9.AI.PUSH.OPEN", b"$mq9.AI.PUSH.X"])
def test_reserved_subjects_are_refused_on_either_way(subject: bytes) -> None:
    way = opened()
    up, down = way.client(b"PUB %b _INBOX.a.1 2\r\n{}\r\n" % subject)
    assert (up, way.requests) == (b"", [])
    assert down == b"-ERR 'Permissions Violation for Publish to \"%b\"'\r\n" % subject


@pytest.mark.rule("N10")
@pytest.mark.parametrize("reply", [b"$mq9.PUSH.gateway.x", b"mq9ctl.gateway.x", b"$mq9.AI.PUSH.OPEN", b"$SYS.x"])
def test_an_answer_never_goes_to_a_reserved_subject(reply: bytes) -> None:
    way = opened()
    up, down = way.client(b"PUB %b %b 1\r\nx\r\n" % (SEND, reply))
    assert (up, way.requests) == (b"", [])
    assert down == b"-ERR 'Permissions Violation for Publish to \"%b\"'\r\n" % reply


def test_a_maximum_counts_answers_of_the_short_way() -> None:
    way = opened()
    way.client(send() + send())
    way.answer(0, b"a")
    assert way.client(b"UNSUB 1 5\r\n")[0] == b"UNSUB 1 2\r\n", (
        "one of another request, two of these, two by nats-server"
    )
    assert way.answer(1, b"b") == b"MSG _INBOX.a.1 1 1\r\nb\r\n", "what was asked before is answered"


@pytest.mark.parametrize(("most", "answers"), [(1, 1), (2, 2), (3, 3)])
def test_no_more_answers_come_than_a_client_takes(most: int, answers: int) -> None:
    way = unopened()
    way.client(send() + send() + send())
    way.protocol.identified("token1", ACME)
    assert way.client(b"UNSUB 1 %d\r\n" % most)[0] == b"UNSUB 1\r\n"
    assert [way.answer(number, b"x") != b"" for number in range(3)] == [number < answers for number in range(3)]


def test_an_answer_finds_the_subscription_in_place_of_its_own() -> None:
    way = opened()
    way.client(send() + b"UNSUB 1\r\nSUB _INBOX.a.* 2\r\n")
    assert way.answer(0, b"x") == b"MSG _INBOX.a.1 2 1\r\nx\r\n"
    assert way.client(b"UNSUB 2 3\r\n")[0] == b"UNSUB 2 2\r\n"


def test_an_answer_after_the_end_is_dropped() -> None:
    way = opened()
    way.client(send() + send())
    way.client(b"UNSUB 1\r\nSUB _INBOX.b.* 1\r\n")
    assert way.answer(0, b"x") == b"", "the sid is that of another subscription now"
    way.close()
    assert way.answer(1, b"x") == b""


def test_an_answer_waits_for_the_end_of_a_payload() -> None:
    way = opened()
    way.client(send())
    way.protocol.receive_from_server(b"MSG a 2 4\r\nab")
    assert way.answer(0, b"x") == b"MSG a 2 4\r\nab"
    way.protocol.receive_from_server(b"cd\r\nPING\r\n")
    assert way.take()[1] == b"cd\r\nMSG _INBOX.a.1 1 1\r\nx\r\nPING\r\n"


@pytest.mark.rule("N7")
def test_a_client_with_very_many_inboxes_goes_through_nats() -> None:
    way = opened()
    frames = b"".join(b"SUB _INBOX.b%d.* b%d\r\n" % (number, number) for number in range(MAX_INBOXES))
    assert way.client(frames)[0] == frames
    assert way.goes_long(send())


def test_the_name_of_a_client_ends_no_line() -> None:
    name = 'x\r\nNats-Request-Info: {"name":"y"}\r\n'
    way = opened(b"CONNECT " + json.dumps({"verbose": False, "pedantic": False, "name": name}).encode() + b"\r\n")
    way.client(send())
    assert way.requests[0].client.name == name


def chunks(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if start < end]


FRAMES = st.sampled_from(
    [
        send(),
        send(b"SUB _INBOX.a.1 9\r\nUNSUB 1\r\n"),
        send(b"", b""),
        send(b"PING\r\n", b"own.inbox "),
        b"HPUB %b _INBOX.a.2 18 20\r\nNATS/1.0\r\na: b\r\n\r\n\r\n\r\n" % SEND.replace(b"SEND", b"FETCH"),
        b"SUB _INBOX.b.* 2\r\n",
        b"SUB *.a.1 3\r\n",
        b"UNSUB 3\r\n",
        b"PUB a 4\r\n\r\n\r\n\r\n",
        b"PUB $mq9.AI.PUSH.OPEN 0\r\n\r\n",
        b"PING\r\n",
    ]
)


@given(st.lists(FRAMES, max_size=12), st.lists(st.integers(0, 10**4), max_size=12))
def test_the_same_requests_are_made_however_it_is_cut(frames: list[bytes], places: list[int]) -> None:
    data = b"".join(frames)
    outcomes = []
    for parts in ([data], chunks(data, places), [data[at : at + 1] for at in range(len(data))]):
        way = opened()
        seen = [b"", b""]
        for part in parts:
            for side, written in enumerate(way.client(part)):
                seen[side] += written
            while way.protocol.waiting:
                way.protocol.identified(f"token{way.questions}", ACME)
                for side, written in enumerate(way.take()):
                    seen[side] += written
        made = [(each.subject, each.reply, each.data, each.headers) for each in way.requests]
        outcomes.append((made, seen, way.questions))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(outcomes[0][0]) <= sum(frame.startswith((b"PUB $mq9", b"HPUB")) for frame in frames)
