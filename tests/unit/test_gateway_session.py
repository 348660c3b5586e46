"""What the gateway changes on a client's connection, and what it knows of it (E6, E7, N10)."""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediator.gateway.inboxes import InboxClaims
from mediator.gateway.session import MAX_PINGS
from mediator.gateway.streams import UnfinishedCommands
from mediator.nats.frames import ProtocolViolationError
from tests.harness.gateway_protocol import ACME, ClientPath, question

BOX = b"$mq9.AI.MAILBOX.MSG.orders"
PROBE = b"$mq9.PUSH.gateway."


def probe(subject: bytes) -> bytes:
    """Return what asks nats-server for the right to subscribe."""
    return b"SUB %b%b mq9gateway\r\nUNSUB mq9gateway\r\n" % (PROBE, subject)


def refusal(subject: bytes, reason: bytes = b"") -> bytes:
    """Return how nats-server refuses a subscription, and the gateway, which gives its reason."""
    reason = b": " + reason if reason else b""
    return b"-ERR 'Permissions Violation for Subscription to \"%b\"%b'\r\n" % (subject, reason)


def push(number: int, sid: bytes = b"7") -> bytes:
    return b"MSG %b.normal %b 1\r\n%d\r\n" % (BOX, sid, number)


@pytest.mark.rule("E6")
def test_a_subscription_asks_for_rights_and_once_for_the_tenant() -> None:
    way = ClientPath()
    up, down = way.client(b"SUB %b.* workers 7\r\nSUB plain 8\r\n" % BOX)
    assert up == probe(BOX + b".*") + question(1) + b"PING\r\nSUB plain 8\r\n"
    assert down == b""
    assert way.client(b"SUB %b 9\r\n" % BOX)[0] == probe(BOX) + b"PING\r\n"
    assert [(each.text, each.queue) for each in way.made] == [
        (f"{BOX.decode()}.*", "workers"),
        (BOX.decode(), ""),
    ]


@pytest.mark.rule("E9")
def test_the_older_wildcard_becomes_that_of_nats() -> None:
    up, _ = ClientPath().client(b"SUB $mq9.AI.BROADCAST.# 1\r\n")
    assert up.startswith(probe(b"$mq9.AI.BROADCAST.>"))


@pytest.mark.rule("E6", "A6")
@pytest.mark.parametrize("early", [True, False])
def test_it_opens_once_the_rights_and_the_tenant_are_known(early: bool) -> None:
    way = ClientPath()
    way.client(b"SUB %b.* 7\r\nSUB %b 8\r\n" % (BOX, BOX))
    if early:
        way.protocol.identified("token1", ACME)
        assert way.opened == []
        assert way.server(b"PONG\r\n") == (b"", b"")
    else:
        assert way.server(b"PONG\r\n") == (b"", b"")
        assert way.opened == []
        way.protocol.identified("token1", ACME)
    assert way.opened == [(b"7", "acme")]
    way.server(b"PONG\r\n")
    assert way.opened == [(b"7", "acme"), (b"8", "acme")]


@pytest.mark.rule("A6")
def test_a_client_stays_the_tenant_that_it_was() -> None:
    way = ClientPath()
    way.client(b"SUB %b 7\r\n" % BOX)
    with pytest.raises(ProtocolViolationError, match="Unknown Protocol Operation"):
        way.client(b'PING\r\nCONNECT {"verbose":false,"pedantic":false,"user":"other"}\r\nSUB %b 8\r\n' % BOX)
    assert way.take()[0] == b"PING\r\n", "what came before it passes"
    assert len(way.made) == 1


@pytest.mark.rule("A6")
def test_a_question_without_an_answer_is_asked_again() -> None:
    way = ClientPath()
    way.client(b"SUB %b 7\r\nPUB a 5\r\nab" % BOX)
    way.protocol.identified("token1", None)
    assert way.take()[0] == b"", "a payload is under way"
    assert way.client(b"cde\r\nPING\r\n")[0] == b"cde\r\n" + question(2) + b"PING\r\n"
    way.protocol.identified("token2", ACME)
    way.protocol.identified("token2", None)
    assert way.take()[0] == b""


@pytest.mark.rule("E7")
def test_a_push_is_counted_when_the_ping_after_it_is_answered() -> None:
    way = ClientPath()
    made, served = way.subscribe(BOX + b".* 7")
    assert way.push(made, push(1), push(2)) == push(1) + push(2) + b"PING\r\n"
    assert way.push(made, push(3)) == push(3) + b"PING\r\n"
    assert way.server(b"PING\r\n")[1] == b"PING\r\n"
    assert way.client(b"PONG\r\n") == (b"", b"")
    assert way.client(b"PONG\r\n") == (b"", b"")
    assert served.told == ["start", 2, 3]
    assert way.client(b"PONG\r\n") == (b"PONG\r\n", b""), "this one was the server's"
    assert way.client(b"PONG\r\n") == (b"PONG\r\n", b"")


@pytest.mark.rule("E7")
def test_few_pings_are_under_way_and_the_last_confirms_all() -> None:
    way = ClientPath()
    made, served = way.subscribe(BOX + b".* 7")
    pushed = b"".join(way.push(made, push(number % 10)) for number in range(MAX_PINGS + 3))
    assert pushed.count(b"PING\r\n") == MAX_PINGS
    assert way.client(b"PONG\r\n") == (b"", b"PING\r\n")
    for _ in range(MAX_PINGS):
        assert way.client(b"PONG\r\n") == (b"", b"")
    assert served.told == ["start", *range(1, MAX_PINGS + 1), MAX_PINGS + 3]


@pytest.mark.rule("E7")
def test_a_push_waits_for_the_end_of_a_payload() -> None:
    way = ClientPath()
    made, _ = way.subscribe(BOX + b".* 7")
    assert way.server(b"MSG a 1 5\r\nab")[1] == b"MSG a 1 5\r\nab"
    way.protocol.push(made, [push(1)])
    assert way.protocol.data_to_send() == (b"", b"", len(push(1)) + len(b"PING\r\n"))
    assert way.server(b"cde\r\nMSG a 1 1\r\nx\r\n")[1] == b"cde\r\n" + push(1) + b"PING\r\nMSG a 1 1\r\nx\r\n"
    assert way.protocol.data_to_send() == (b"", b"", 0)


@pytest.mark.rule("E7")
def test_what_was_not_confirmed_before_an_unsub_stays_so() -> None:
    way = ClientPath()
    made, served = way.subscribe(BOX + b".* 7")
    way.push(made, push(1))
    assert way.client(b"UNSUB 7\r\nPONG\r\n") == (b"", b"")
    assert way.ends == [(b"7", "unsub")]
    assert served.told == ["start"]
    assert way.push(made, push(2)) == b""
    way.close()
    assert way.ends == [(b"7", "unsub")]


@pytest.mark.rule("E7")
@pytest.mark.parametrize("early", [True, False])
def test_an_automatic_end_waits_for_the_last_confirmation(early: bool) -> None:
    way = ClientPath()
    made, served = way.subscribe(BOX + b".* 7")
    if early:
        way.client(b"UNSUB 7 2\r\n")
        way.push(made, push(1), push(2))
    else:
        way.push(made, push(1), push(2))
        way.client(b"UNSUB 7 2\r\n")
    assert way.ends == []
    way.client(b"PONG\r\n")
    assert served.told == ["start", 2]
    assert way.ends == [(b"7", "unsub")]
    assert way.protocol.subscriptions == 0


@pytest.mark.rule("N10")
@pytest.mark.parametrize("subject", [b">", b"_INBOX.>", b"plain", b"%b.low" % BOX])
def test_a_subscription_with_a_used_sid_is_dropped(subject: bytes) -> None:
    way = ClientPath()
    made, _ = way.subscribe(BOX + b".* 7")
    way.client(b"UNSUB 7 2\r\n")
    assert way.client(b"SUB %b 7\r\n" % subject)[0] == b""
    assert way.made == [made]
    assert way.push(made, push(1)).startswith(push(1)), "the first one stays"


@pytest.mark.rule("E7")
def test_a_maximum_ends_exactly_and_frees_the_sid() -> None:
    way = ClientPath()
    made, _ = way.subscribe(BOX + b".* 7")
    way.client(b"UNSUB 7 2\r\n")
    assert way.push(made, *map(push, range(5))) == push(0) + push(1) + b"PING\r\n"
    other, _ = way.subscribe(BOX + b".low 7")
    assert other is not made
    assert way.push(made, push(5)) == b"", "what was on its way to the first is not for the second"
    assert way.push(other, push(6)) == push(6) + b"PING\r\n"


@pytest.mark.rule("E7")
def test_a_maximum_that_was_reached_before_ends_at_once() -> None:
    way = ClientPath()
    made, _ = way.subscribe(BOX + b".* 7")
    way.push(made, push(1), push(2))
    way.client(b"PONG\r\nUNSUB 7 1\r\n")
    assert way.ends == [(b"7", "unsub")]
    assert way.push(made, push(3)) == b""


@pytest.mark.rule("E7")
def test_a_full_client_is_pushed_more_once_it_has_read() -> None:
    way = ClientPath()
    (one, served), (other, idle) = way.subscribe(BOX + b".* 7"), way.subscribe(BOX + b".low 8")
    assert not one.is_full(one)
    way.set_full(True)
    assert (one.is_full(one), one.is_full(one)) == (True, True)
    way.set_full(False)
    assert (served.told, idle.told) == (["start", "resume"], ["start"])
    way.set_full(True)
    assert other.is_full(other)
    way.client(b"UNSUB 8\r\n")
    way.set_full(False)
    assert (served.told, idle.told) == (["start", "resume"], ["start"])


@pytest.mark.rule("E7")
@pytest.mark.parametrize("last", [b"UNSUB 7\r\n", b""])
def test_what_ended_while_it_opened_is_not_served(last: bytes) -> None:
    way = ClientPath()
    way.client(b"SUB %b 7\r\n%b" % (BOX, last))
    if not last:
        way.close()
    served = way.serve(way.made[0])
    assert served.told == ["broken"]
    assert way.ends == [(b"7", "unsub" if last else "broken")]


@pytest.mark.rule("N10")
def test_pongs_wait_for_the_subscriptions_before_them() -> None:
    way = ClientPath()
    way.client(b"PING\r\n")
    assert way.server(b"PONG\r\n") == (b"", b"PONG\r\n")
    way.client(b"SUB %b.* 1\r\nPING\r\nSUB %b.* 2\r\nPING\r\nPING\r\n" % (BOX, BOX))
    first, second = way.made
    assert way.server(b"PONG\r\nPONG\r\nMSG a 9 1\r\nx\r\n")[1] == b"MSG a 9 1\r\nx\r\n"
    way.client(b"SUB %b.* 3\r\n" % BOX)
    assert way.server(b"PONG\r\nPONG\r\nPONG\r\nPONG\r\n")[1] == b""
    way.serve(second)
    assert way.take()[1] == b""
    way.protocol.refuse(first, "no")
    assert way.take()[1] == refusal(BOX + b".*", b"no") + b"PONG\r\n"
    assert way.client(b"UNSUB 3\r\nPING\r\n")[1] == b"PONG\r\nPONG\r\n"
    assert way.server(b"PONG\r\n")[1] == b"PONG\r\n"


@pytest.mark.rule("N10")
def test_a_pong_does_not_wait_for_ever() -> None:
    way = ClientPath()
    way.client(b"SUB %b 7\r\nPING\r\n" % BOX)
    way.server(b"PONG\r\nPONG\r\n")
    way.protocol.release_pongs(way.made[0])
    assert way.take()[1] == b"PONG\r\n"
    way.protocol.refuse(way.made[0], "late")
    assert way.take()[1] == refusal(BOX, b"late")


@pytest.mark.rule("E7")
def test_the_end_of_the_connection_ends_each_once() -> None:
    way = ClientPath()
    (one, _), (other, _) = way.subscribe(BOX + b".* 7"), way.subscribe(BOX + b".low 8")
    way.client(b"UNSUB 8 1\r\nSUB %b 9\r\n" % BOX)
    way.push(one, push(1))
    way.push(other, push(2, b"8"))
    way.close()
    assert sorted(way.ends) == [(b"7", "broken"), (b"8", "broken"), (b"9", "broken")]


@pytest.mark.rule("N10")
def test_a_refusal_reaches_the_client_and_ends_the_sub() -> None:
    way = ClientPath()
    way.client(b"SUB %b.* 7\r\n" % BOX)
    way.server(b"MSG a 1 5\r\nab")
    way.protocol.refuse(way.made[0], "mailbox orders does not exist\r\nPING")
    assert way.take()[1] == b"", "a payload is under way"
    assert way.server(b"cde\r\n")[1] == b"cde\r\n" + refusal(BOX + b".*", b"mailbox orders does not exist PING")
    assert way.protocol.subscriptions == 0
    assert way.ends == [(b"7", "unsub")]


@pytest.mark.rule("N10")
def test_refusals_name_the_clients_own_subject() -> None:
    way = ClientPath()
    way.client(b"SUB %b.* 7\r\nSUB %b.low 8\r\nSUB %b 9\r\nPING\r\n" % (BOX, BOX, BOX))
    up, down = way.server(refusal(PROBE + BOX + b".*") + b"PONG\r\nPONG\r\n")
    assert (up, down) == (b"", refusal(BOX + b".*"))
    _, down = way.server(b"-ERR 'Permissions Violation for Publish to \"$mq9.AI.PUSH.OPEN\"'\r\n")
    assert down == refusal(BOX + b".low") + refusal(BOX)
    assert way.server(b"PONG\r\nPONG\r\n")[1] == b"PONG\r\n"
    assert way.ends == [(b"7", "unsub"), (b"8", "unsub"), (b"9", "unsub")]
    assert way.opened == []
    for other in (b"-ERR 'Authorization Violation'\r\n", refusal(b"plain")):
        assert way.server(other) == (b"", other)


@pytest.mark.rule("N10")
def test_a_refusal_is_known_however_the_server_words_it() -> None:
    way = ClientPath()
    odd = b'$mq9.AI.BROADCAST.a"b\\c.x'
    way.client(b"SUB %b 7\r\nSUB %b 8\r\n" % (BOX, odd))
    assert way.server(b"PONG\r\n" + refusal(PROBE + odd.replace(b"\\", b"\\\\").replace(b'"', b'\\"')))[1] == refusal(
        odd
    )
    way.server(b"PONG\r\n")
    way.protocol.identified("token1", ACME)
    assert way.opened == [(b"7", "acme")]


@pytest.mark.rule("N10")
def test_a_refusal_that_comes_late_concerns_no_other() -> None:
    way = ClientPath()
    way.client(b"SUB %b 7\r\nUNSUB 7\r\nSUB %b 7\r\n" % (BOX, BOX))
    assert way.server(refusal(PROBE + BOX) + b"PONG\r\n")[1] == refusal(BOX)
    assert way.protocol.subscriptions == 1
    assert way.server(refusal(PROBE + BOX) + b"PONG\r\n")[1] == refusal(BOX)
    assert way.protocol.subscriptions == 0


@pytest.mark.rule("N10", "N7")
def test_a_connection_has_so_many_subscriptions_to_mail() -> None:
    way = ClientPath()
    for sid in range(4):
        up, down = way.client(b"SUB %b.* %d\r\n" % (BOX, sid))
    assert (up, down) == (b"", refusal(BOX + b".*", b"maximum subscriptions exceeded"))
    way.client(b"UNSUB 0\r\n")
    assert way.client(b"SUB %b.* 3\r\n" % BOX)[0] == probe(BOX + b".*") + b"PING\r\n"


@pytest.mark.rule("N10")
@pytest.mark.parametrize(
    "publish",
    [
        b"PUB $mq9.AI.PUSH.OPEN 2\r\n{}\r\n",
        b"PUB $mq9.PUSH.gateway.x 0\r\n\r\n",
        b"PUB a $mq9.AI.PUSH.OPEN 0\r\n\r\n",
        b"HPUB $mq9.AI.MSG.SEND.a mq9ctl.gateway.x 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        b"PUB mq9ctl.gateway.x 0\r\n\r\n",
        b"PUB $SYS.REQ.ACCOUNT.PING.CONNZ 0\r\n\r\n",
        b"PUB $mq9.AI.MSG.SEND.a _INBOX.> 0\r\n\r\n",
        b"PUB $mq9.AI.MSG.SEND.a own.*.x 0\r\n\r\n",
    ],
)
def test_what_could_harm_others_is_not_published(publish: bytes) -> None:
    up, down = ClientPath().client(publish)
    assert up == b""
    assert down.startswith(b"-ERR 'Permissions Violation for Publish to ")


@pytest.mark.parametrize("tls", [True, False])
def test_the_greeting_names_the_gateway(tls: bool) -> None:
    told = {"server_name": "n", "host": "h", "port": 1, "connect_urls": ["a:1"], "tls_required": True, "nonce": "x"}
    _, down = ClientPath(tls=tls).server(b"INFO " + json.dumps(told).encode() + b" \r\n")
    seen = json.loads(down[5:])
    expected = {"server_name": "n", "host": "example.org", "port": 4222, "nonce": "x", "client_ip": "10.0.0.1"}
    assert seen == expected | ({"tls_required": True} if tls else {})


@dataclass
class Shared:
    """The inboxes of several connections, and what is to be called when holders have not answered."""

    late: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inboxes = InboxClaims(lambda _seconds, call: self.late.append(call))

    def way(self, account: bytes = b"A") -> ClientPath:
        return ClientPath(inboxes=self.inboxes, account=account)


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
    assert holder.take()[1] == b"PING\r\n"
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
    assert again.take()[1] == b"PING\r\n", "it is the holder now"


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
    first.close()
    second.close()
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
        b"PUB $mq9.AI.MSG.SEND.a _INBOX.x 1\r\nx\r\n",
        b"SUB plain %d\r\n",
        b"SUB _INBOX.x %d\r\n",
        b"SUB $mq9.AI.MAILBOX.MSG.m%d.* 1%d\r\n",
        b"UNSUB %d\r\n",
        b"UNSUB 1%d\r\n",
        b"UNSUB 1%d 2\r\n",
        b"SUB > 5\r\n",
        b"PUB $mq9.PUSH.x 1\r\nx\r\n",
        b"PING\r\n",
    ]
)


def answers(data: bytes, denied: bytes) -> bytes:
    """Return what nats-server says to a verbose client."""
    out = b""
    for line in data.split(b"\r\n"):
        if line.startswith(b"SUB ") and line.split()[1].startswith(denied):
            out += refusal(line.split()[1])
        elif line.startswith((b"CONNECT", b"PUB", b"SUB", b"UNSUB")):
            out += b"+OK\r\n"
        elif line == b"PING":
            out += b"PONG\r\n"
    return out


@given(
    st.lists(st.tuples(COMMANDS, st.integers(0, 3)), max_size=25),
    st.integers(0, 3),
    st.booleans(),
    st.integers(1, 30),
    st.sampled_from([b"(none)", PROBE, PROBE + b"$mq9.AI.MAILBOX.MSG.m1"]),
)
@settings(max_examples=200)
def test_a_verbose_client_gets_one_ok_for_each_command(
    commands: Sequence[tuple[bytes, int]], missing: int, said: bool, every: int, denied: bytes
) -> None:
    connect = b'CONNECT {"verbose":true}\r\n' if said else b"CONNECT {}\r\n"
    way = ClientPath(connect)
    to_server, seen = connect, b""
    for place, (command, number) in enumerate(commands):
        up, down = way.client(command.replace(b"%d", b"%d" % number))
        to_server, seen = to_server + up, seen + down
        if place % every == 0:
            seen += way.server(answers(to_server, denied))[1]
            to_server = b""
    seen += way.server(answers(to_server, denied))[1]
    pings = sum(command.startswith(b"PING") for command, _ in commands)
    assert seen.count(b"+OK\r\n") + seen.count(b"-ERR") == 1 + len(commands) - pings
    assert PROBE not in seen
    before = way.protocol.subscriptions
    for subscription in way.made[:missing]:
        way.protocol.refuse(subscription, "missing")
    refused = before - way.protocol.subscriptions
    for subscription in way.made[missing:]:
        way.serve(subscription)
    more = way.take()[1]
    assert more.count(b"-ERR") == refused
    assert (seen + more).count(b"PONG\r\n") == pings


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
    up, down = ClientPath().client(frame)
    assert (up == frame, b"Permissions Violation for Publish" in down) == (passes, not passes)


# What waits of clients (N7).


@pytest.mark.rule("N7")
@pytest.mark.parametrize(
    "sent",
    [
        b"PUB a 1\r\nx\r\n",
        b"PUB $JS.API.STREAM.CREATE.s 200000\r\n",
        b"HPUB a 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        b"PUB $mq9.AI.MSG.SEND.a _INBOX.a.1 200000\r\n",
        b"SUB %b.* 1\r\n" % BOX,
        b"UNSUB 1\r\n",
    ],
)
def test_nothing_but_pings_comes_before_connect(sent: bytes) -> None:
    for step in (1, len(sent)):
        chunks = [b"PING\r\n", *(sent[at : at + step] for at in range(0, len(sent), step))]
        way = ClientPath(b"")
        with pytest.raises(ProtocolViolationError, match=r"^Authorization Violation$"):
            deque(map(way.protocol.receive_from_client, chunks), 0)
        assert way.take()[0] == b"PING\r\n"
        assert not way.made


STREAM = b"PUB $JS.API.STREAM.CREATE.s 200000\r\n"
SEND = b"PUB $mq9.AI.MSG.SEND.a _INBOX.a.1 200000\r\n"


@pytest.mark.rule("N7")
def test_all_clients_together_have_so_much_unfinished() -> None:
    everybody = UnfinishedCommands(limit=1_000_000)
    # The sizes that the commands name count, though next to nothing of them has come.
    ways = [ClientPath(unfinished=everybody) for _ in range(20)]
    for way in ways:
        way.server(b"PONG\r\n")
    said = [way.client(STREAM + b"{") for way in ways]
    assert [down.startswith(b"-ERR 'Permissions Violation for Publish") for _, down in said] == [False] * 4 + [
        True
    ] * 16
    assert 800_000 < everybody.total <= 1_000_000
    # What was accepted is read to its end, what was refused is dropped, and the room is there again.
    rest = b'"subjects":["ok"]}'.ljust(199_999) + b"\r\n"
    assert [up.startswith(STREAM) for up, _ in (way.client(rest) for way in ways)] == [True] * 4 + [False] * 16
    assert everybody.total == 0
    assert ways[-1].client(STREAM + b"{")[1] == b""
    ways[-1].close()
    assert everybody.total == 0


@pytest.mark.rule("N7")
def test_a_long_connect_waits_while_there_is_room() -> None:
    everybody = UnfinishedCommands(limit=100_000)
    half = b'CONNECT {"auth_token":"' + b"x" * 60_000
    first, second = (ClientPath(b"", unfinished=everybody) for _ in range(2))
    first.client(half)
    with pytest.raises(ProtocolViolationError, match=r"^maximum control line exceeded$"):
        second.client(half)
    second.close()
    assert first.client(b'"}\r\n')[0] == half + b'"}\r\n'
    assert everybody.total == len(half) + 4, "the server has not answered"
    first.server(b"PONG\r\n")
    assert everybody.total == 0


@pytest.mark.rule("N7")
def test_who_is_not_let_in_yet_gives_way_when_much_waits() -> None:
    everybody = UnfinishedCommands(limit=1_000_000)
    ways = [ClientPath(unfinished=everybody) for _ in range(3)]
    frame = b"PUB a 400000\r\n" + b"x" * 400_000 + b"\r\n"
    for way in ways[:2]:
        way.client(frame)
    with pytest.raises(ProtocolViolationError, match=r"^Authorization Timeout$"):
        ways[2].client(frame)
    ways[2].close()
    ways[0].server(b"PONG\r\n")
    assert ways[0].client(frame * 3)[0] == frame * 3, "the server knows who it is"
    assert everybody.total < 500_000


@pytest.mark.rule("N2", "N10")
def test_probes_of_many_share_a_ping() -> None:
    way, answered = ClientPath(), list[int]()
    for number in range(1000):
        way.protocol.probe(partial(answered.append, number))
    assert way.take() == (b"", b"PING\r\n")
    assert way.client(b"PONG\r\n") == (b"", b"")
    assert answered == list(range(1000))
    way.protocol.probe(partial(answered.append, 1000))
    assert way.take() == (b"", b"PING\r\n")
    assert way.client(b"PONG\r\nPONG\r\n") == (b"PONG\r\n", b"")
    assert answered[1000:] == [1000]
