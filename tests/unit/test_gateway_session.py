"""What the gateway changes on a client's connection, and what it knows of it (E6, E7, N10)."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediator.push.gateway.inboxes import InboxClaims
from mediator.push.gateway.session import GatewaySession, GatewaySubscription, PublicAddress, new_token

BOX = b"$mq9.AI.MAILBOX.MSG.orders"
QUIET = b'CONNECT {"verbose":false}\r\n'


@dataclass
class Owner:
    """Keeps what it is told."""

    subscriptions: list[GatewaySubscription] = field(default_factory=list)
    confirmations: list[tuple[bytes, int]] = field(default_factory=list)
    ends: list[tuple[bytes, str]] = field(default_factory=list)

    def subscribed(self, subscription: GatewaySubscription) -> None:
        self.subscriptions.append(subscription)

    def confirmed(self, subscription: GatewaySubscription) -> None:
        self.confirmations.append((subscription.sid, subscription.confirmed))

    def ended(self, subscription: GatewaySubscription, how: str) -> None:
        self.ends.append((subscription.sid, how))


class Way:
    """A session with its owner; tokens are counted."""

    def __init__(self, connect: bytes = QUIET, tls: bool = False, inboxes: InboxClaims | None = None) -> None:
        self.owner = Owner()
        tokens = (f"token{number}" for number in range(1000))
        front = PublicAddress("gateway", "example.org", 4222, tls, 3)
        self.session = GatewaySession(
            self.owner, inboxes or InboxClaims(lambda *_: None), front, "10.0.0.1", lambda: next(tokens)
        )
        self.client(connect)

    def client(self, data: bytes) -> tuple[bytes, bytes]:
        """The client writes; returns what goes to the server and to the client."""
        self.session.from_client(data)
        return self.session.take()[:2]

    def server(self, data: bytes) -> tuple[bytes, bytes]:
        """The server writes; returns the same."""
        self.session.from_server(data)
        return self.session.take()[:2]


def push(number: int, sid: bytes, msg_id: int, word: bytes = b".normal", lane: bytes = b"") -> bytes:
    named = b"mq9-priority: %b\r\n" % lane if lane else b""
    head = b"NATS/1.0\r\nmq9-msg-id: %d\r\n%b\r\n" % (msg_id, named)
    return b"HMSG $mq9.PUSH.token%d.%b%b %b %d %d\r\n%bhi\r\n" % (
        number,
        BOX,
        word,
        sid,
        len(head),
        len(head) + 2,
        head,
    )


def opens(data: bytes) -> list[dict[str, object]]:
    """Return the bodies of the OPENs in what goes to the server."""
    return [json.loads(part.split(b"\r\n")[1]) for part in data.split(b"PUB $mq9.AI.PUSH.OPEN ")[1:]]


def test_tokens_cannot_be_guessed() -> None:
    made = {new_token() for _ in range(1000)}
    assert len(made) == 1000
    assert all(len(token) == 26 and token.islower() and token.isalnum() for token in made)


@pytest.mark.rule("E6")
def test_a_subscription_becomes_private_and_is_opened() -> None:
    way = Way()
    up, down = way.client(b"SUB %b.* workers 7\r\nSUB plain 8\r\n" % BOX)
    assert up.startswith(b"SUB $mq9.PUSH.token0.%b.* 7\r\nPUB $mq9.AI.PUSH.OPEN " % BOX)
    assert up.endswith(b"SUB plain 8\r\n")
    assert opens(up) == [
        {"gateway": "gateway", "token": "token0", "subject": f"{BOX.decode()}.*", "queue": "workers", "after": {}}
    ]
    assert down == b""


@pytest.mark.rule("E9")
def test_the_older_wildcard_becomes_that_of_nats() -> None:
    up, _ = Way().client(b"SUB $mq9.AI.BROADCAST.# 1\r\n")
    assert up.startswith(b"SUB $mq9.PUSH.token0.$mq9.AI.BROADCAST.> 1\r\n")


@pytest.mark.rule("E7")
def test_a_push_is_counted_when_the_ping_after_it_is_answered() -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\n" % BOX)
    _, down = way.server(push(0, b"7", 1) + push(0, b"7", 2))
    assert b"$mq9.PUSH" not in down
    assert down.endswith(b"PING\r\n")
    assert down.count(b"PING") == 1
    _, down = way.server(push(0, b"7", 3) + b"PING\r\n")
    assert down.count(b"PING") == 1, "one of ours at a time, and this is the server's"
    up, down = way.client(b"PONG\r\n")
    assert (up, down) == (b"", b"PING\r\n")
    assert way.owner.confirmations == [(b"7", 2)]
    assert way.client(b"PONG\r\n") == (b"PONG\r\n", b""), "the server's own is its second"
    assert way.client(b"PONG\r\n") == (b"", b"")
    assert way.owner.confirmations == [(b"7", 2), (b"7", 3)]
    assert way.client(b"PONG\r\n") == (b"PONG\r\n", b"")


@pytest.mark.rule("E7")
def test_our_ping_waits_for_the_end_of_a_payload() -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\n" % BOX)
    data = push(0, b"7", 1)
    _, first = way.server(data[:-3])
    assert b"PING" not in first
    _, second = way.server(data[-3:] + b"MSG a 1 1\r\nx\r\n")
    assert second == b"i\r\nPING\r\nMSG a 1 1\r\nx\r\n"


@pytest.mark.rule("E7")
def test_what_was_not_confirmed_before_an_unsub_stays_so() -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\n" % BOX)
    way.server(push(0, b"7", 1))
    up, _ = way.client(b"UNSUB 7\r\nPONG\r\n")
    assert up == b"UNSUB 7\r\n"
    assert way.owner.ends == [(b"7", "unsub")]
    assert way.owner.confirmations == []
    way.session.close()
    assert way.owner.ends == [(b"7", "unsub")]


@pytest.mark.rule("E7")
@pytest.mark.parametrize("early", [True, False])
def test_an_automatic_end_waits_for_the_last_confirmation(early: bool) -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\n" % BOX)
    if early:
        way.client(b"UNSUB 7 2\r\n")
        way.server(push(0, b"7", 1) + push(0, b"7", 2))
    else:
        way.server(push(0, b"7", 1) + push(0, b"7", 2))
        way.client(b"UNSUB 7 2\r\n")
    assert way.owner.ends == []
    way.client(b"PONG\r\n")
    assert way.owner.confirmations == [(b"7", 2)]
    assert way.owner.ends == [(b"7", "unsub")]
    assert way.session.subscriptions == 0


@pytest.mark.rule("N10")
@pytest.mark.parametrize("subject", [b">", b"_INBOX.>", b"plain", b"%b.low" % BOX])
def test_a_subscription_with_a_used_sid_is_dropped(subject: bytes) -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\nUNSUB 7 2\r\n" % BOX)
    up, _ = way.client(b"SUB %b 7\r\n" % subject)
    assert up in (b"", b"SUB $mq9.PUSH.token0.%b.* 7\r\n" % BOX), "the first stays, whatever the server has counted"


@pytest.mark.rule("E7")
def test_a_maximum_ends_exactly_and_frees_the_sid() -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\nUNSUB 7 2\r\n" % BOX)
    up, down = way.server(b"".join(push(0, b"7", number) for number in range(5)))
    assert (up, down.count(b"HMSG")) == (b"UNSUB 7\r\n", 2)
    up, _ = way.client(b"SUB %b.low 7\r\n" % BOX)
    assert up.startswith(b"SUB $mq9.PUSH.token1.%b.low 7\r\n" % BOX)
    _, down = way.server(push(0, b"7", 5) + push(1, b"7", 6, b".low"))
    assert (down.count(b"HMSG"), down.count(b"mq9-msg-id: 6")) == (1, 1), "what was on its way to the first is not its"


@pytest.mark.rule("N10")
def test_pongs_wait_for_the_subscriptions_before_them() -> None:
    way = Way()
    assert way.server(b"PONG\r\n") == (b"", b"PONG\r\n")
    way.client(b"SUB %b.* 1\r\nPING\r\nSUB %b.* 2\r\nPING\r\nPING\r\n" % (BOX, BOX))
    first, second = way.owner.subscriptions
    assert way.server(b"PONG\r\nMSG a 9 1\r\nx\r\n")[1] == b"MSG a 9 1\r\nx\r\n"
    way.client(b"SUB %b.* 3\r\n" % BOX)
    assert way.server(b"PONG\r\nPONG\r\n")[1] == b""
    way.session.answered(second)
    assert way.session.take()[1] == b""
    way.session.refuse(first, "no")
    assert way.session.take()[1] == b"-ERR 'no'\r\nPONG\r\n"
    assert way.client(b"UNSUB 3\r\n")[1] == b"PONG\r\nPONG\r\n"
    assert way.server(b"PONG\r\n")[1] == b"PONG\r\n"


@pytest.mark.rule("N10")
def test_a_pong_waits_for_no_subscription_that_is_over() -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\nUNSUB 7 1\r\nPING\r\n" % BOX)
    assert b"PONG" not in way.server(push(0, b"7", 1) + b"PONG\r\n")[1]
    assert way.client(b"PONG\r\n")[1] == b"PONG\r\n", "it was served before the service's answer came"


@pytest.mark.rule("E7")
def test_the_end_of_the_connection_ends_each_once() -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\nSUB %b.low 8\r\nUNSUB 8 1\r\n" % (BOX, BOX))
    way.server(push(0, b"7", 1) + push(1, b"8", 2, b".low"))
    way.session.close()
    assert sorted(way.owner.ends) == [(b"7", "broken"), (b"8", "broken")]


@pytest.mark.rule("E6")
def test_a_repeated_open_names_the_last_id_of_each_lane() -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\nSUB %b 8\r\n" % (BOX, BOX))
    way.server(push(0, b"7", 1) + push(0, b"7", 5, b".urgent", b"urgent") + push(0, b"7", 2))
    # These two lanes share a subject.
    way.server(push(1, b"8", 9, b"") + push(1, b"8", 4, b"", b"low"))
    for subscription in way.owner.subscriptions:
        way.session.open_again(subscription)
    up = way.session.take()[0]
    assert [body["after"] for body in opens(up)] == [{"normal": 2, "urgent": 5}, {"normal": 9, "low": 4}]
    assert [body["token"] for body in opens(up)] == ["token0", "token1"]


@pytest.mark.rule("N10")
def test_a_refusal_reaches_the_client_and_ends_the_sub() -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\nPUB a 5\r\nab" % BOX)
    way.session.refuse(way.owner.subscriptions[0], "mailbox orders does not exist\r\nPING")
    up, down, _ = way.session.take()
    assert down == b"-ERR 'mailbox orders does not exist PING'\r\n"
    assert up == b"", "a payload is under way"
    up, _ = way.client(b"cde\r\nPING\r\n")
    assert up == b"cde\r\nUNSUB 7\r\nPING\r\n"
    assert way.session.subscriptions == 0


@pytest.mark.rule("N10")
def test_refusals_name_the_clients_own_subject() -> None:
    way = Way()
    way.client(b"SUB %b.* 7\r\nSUB %b.low 8\r\n" % (BOX, BOX))
    private = b"$mq9.PUSH.token0.%b.*" % BOX
    _, down = way.server(b"-ERR 'Permissions Violation for Subscription to \"%b\"'\r\n" % private)
    assert down == b"-ERR 'Permissions Violation for Subscription to \"%b.*\"'\r\n" % BOX
    up, down = way.server(b"-ERR 'Permissions Violation for Publish to \"$mq9.AI.PUSH.OPEN\"'\r\n")
    assert down == b"-ERR 'Permissions Violation for Subscription to \"%b.low\"'\r\n" % BOX
    assert up == b"UNSUB 8\r\n"
    assert way.owner.ends == [(b"7", "unsub"), (b"8", "unsub")]
    other = b"-ERR 'Authorization Violation'\r\n"
    assert way.server(other) == (b"", other)


@pytest.mark.parametrize("tls", [True, False])
def test_the_greeting_names_the_gateway(tls: bool) -> None:
    told = {"server_name": "n", "host": "h", "port": 1, "connect_urls": ["a:1"], "tls_required": True, "nonce": "x"}
    _, down = Way(tls=tls).server(b"INFO " + json.dumps(told).encode() + b" \r\n")
    seen = json.loads(down[5:])
    expected = {"server_name": "n", "host": "example.org", "port": 4222, "nonce": "x", "client_ip": "10.0.0.1"}
    assert seen == expected | ({"tls_required": True} if tls else {})


@dataclass
class Shared:
    """The inboxes of several connections, and what is to be called when holders have not answered."""

    late: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inboxes = InboxClaims(lambda _seconds, call: self.late.append(call))

    def way(self, account: bytes = b"A") -> Way:
        way = Way(inboxes=self.inboxes)
        way.server(b'INFO {"remote_account":"%b"} \r\n' % account)
        way.session.resume = lambda: way.session.from_client(b"")
        return way


HELD = b"SUB _INBOX.mine.* 1\r\n"


@pytest.mark.rule("N10")
@pytest.mark.parametrize(
    "subject",
    [
        b"_INBOX.mine.*",
        b"_INBOX.mine.>",
        b"_INBOX.mine.7",
        b"_INBOX.mine.* queue",
        b"*.mine.*",
        b"*.mine.>",
        b"*.mine.7",
    ],
)
def test_a_holder_that_answers_keeps_its_inbox(subject: bytes) -> None:
    shared = Shared()
    holder, thief = shared.way(), shared.way()
    assert holder.client(HELD)[0] == HELD
    assert thief.client(b"SUB a 1\r\nSUB %b 2\r\nPUB a 0\r\n\r\n" % subject) == (b"SUB a 1\r\n", b"")
    assert holder.session.take()[1] == b"PING\r\n"
    assert holder.client(b"PONG\r\n") == (b"", b"")
    up, down = thief.client(b"")
    assert up == b"PUB a 0\r\n\r\n", "what is behind it goes on"
    assert down == b"-ERR 'Permissions Violation for Subscription to \"%b\"'\r\n" % subject.split()[0]
    shared.late[0]()
    assert thief.client(b"") == (b"", b"")


@pytest.mark.rule("N10")
def test_a_returning_client_gets_the_inbox_of_a_dead_one() -> None:
    shared = Shared()
    dead, again = shared.way(), shared.way()
    dead.client(HELD)
    assert again.client(HELD + b"PUB a 0\r\n\r\n")[0] == b""
    shared.late[0]()
    assert again.client(b"") == (HELD + b"PUB a 0\r\n\r\n", b"")
    third = shared.way()
    assert third.client(HELD) == (b"", b"")
    assert again.session.take()[1] == b"PING\r\n", "it is the holder now"


@pytest.mark.rule("N10")
@pytest.mark.parametrize(
    ("before", "account"),
    [
        (b"SUB _INBOX.mine.* 1\r\nUNSUB 1\r\n", b"A"),
        (b"SUB _INBOX.mine.* 1\r\n", b"B"),
        (b"SUB _INBOX.other.* 1\r\nSUB _INBOX.mine.x.* 2\r\n", b"A"),
    ],
)
def test_an_inbox_that_nobody_of_the_account_holds_is_free(before: bytes, account: bytes) -> None:
    shared = Shared()
    shared.way().client(before)
    assert shared.way(account).client(HELD) == (HELD, b"")


@pytest.mark.rule("N10")
def test_an_inbox_is_freed_at_the_end_and_shared_in_queues() -> None:
    shared = Shared()
    first, second, third = shared.way(), shared.way(), shared.way()
    queued = b"SUB _INBOX.mine work 1\r\n"
    assert first.client(queued)[0] == second.client(queued)[0] == queued
    first.session.close()
    second.session.close()
    alone = b"SUB _INBOX.mine 1\r\n"
    assert third.client(alone)[0] == alone


@pytest.mark.rule("N10")
def test_a_pattern_that_takes_in_no_inbox_is_held_by_nobody() -> None:
    shared = Shared()
    shared.way().client(HELD)
    for pattern in (b"SUB *.events.* 1\r\n", b"SUB * 1\r\n"):
        assert shared.way().client(pattern)[0] == shared.way().client(pattern)[0] == pattern


COMMANDS = st.sampled_from(
    [
        b"PUB a 1\r\nx\r\n",
        b"SUB plain %d\r\n",
        b"SUB $mq9.AI.MAILBOX.MSG.m%d.* 1%d\r\n",
        b"UNSUB %d\r\n",
        b"UNSUB 1%d\r\n",
        b"SUB > 5\r\n",
        b"PUB $mq9.PUSH.x 1\r\nx\r\n",
        b"PING\r\n",
    ]
)


@given(st.lists(st.tuples(COMMANDS, st.integers(0, 3)), max_size=25), st.integers(0, 3), st.booleans())
@settings(max_examples=100)
def test_a_verbose_client_gets_one_ok_for_each_command(
    commands: list[tuple[bytes, int]], missing: int, said: bool
) -> None:
    way = Way(b'CONNECT {"verbose":true}\r\n' if said else b"CONNECT {}\r\n")
    wanted = 1
    to_server, seen = b"", b""
    for command, number in commands:
        frame = command.replace(b"%d", b"%d" % number)
        up, down = way.client(frame)
        to_server += up
        seen += down
        wanted += not frame.startswith(b"PING")
    for subscription in way.owner.subscriptions[:missing]:
        before = way.session.subscriptions
        way.session.refuse(subscription, "missing")
        wanted += before - way.session.subscriptions
    up, down, _ = way.session.take()
    to_server += up
    seen += down
    # As nats-server answers; the first CONNECT is in the stream already.
    lines = [line for line in (b"CONNECT {}\r\n" + to_server).split(b"\r\n") if line]
    answers = b""
    for line in lines:
        if line.startswith((b"CONNECT", b"PUB", b"SUB", b"UNSUB")):
            answers += b"+OK\r\n"
        elif line == b"PING":
            answers += b"PONG\r\n"
    _, down = way.server(answers)
    seen += down
    assert seen.count(b"+OK\r\n") + seen.count(b"-ERR") == wanted


@pytest.mark.rule("N10")
@pytest.mark.parametrize(
    ("body", "passes"),
    [
        (b'{"name":"s","subjects":["orders.>"]}', True),
        (b'{"name":"s","mirror":{"name":"other"},"subjects":null}', True),
        (b'{"subjects":["$mq9.>"]}', False),
        (b'{"Subjects":["$mq9.>"]}', False),
        ('{"\u017fubjects":["$mq9.>"]}'.encode(), False),
        (b'{"subjects":["_INBOX.>"],"description":"\\ud800"}', False),
        (b'{"subjects":["_INBOX.>"],"description":"\xff"}', False),
        (b'{"subjects":["$mq9.>"],"subjects":["ok"]}', False),
        (b'{"config":{"subjects":["$mq9.>"]},"config":{}}', False),
        (b"{", False),
        (b"[" * 100_000, False),
    ],
)
def test_a_stream_is_read_as_nats_server_reads_it(body: bytes, passes: bool) -> None:
    frame = b"PUB $JS.API.STREAM.CREATE.s %d\r\n%b\r\n" % (len(body), body)
    up, down = Way().client(frame)
    assert (up == frame, b"Permissions Violation for Publish" in down) == (passes, not passes)
