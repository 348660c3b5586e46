"""Broadcasts: how they are read, and what waits for a subscriber (E1, E9, N3, N7)."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BadRequestError
from mediator.gateway import broadcasts
from mediator.gateway.broadcasts import BACKLOG, BACKLOG_BYTES, BroadcastChannel, BroadcastHub
from mediator.gateway.opening import verbs_for_gateway
from mediator.gateway.subscription import BroadcastMessage, InFlightCounter, Subscription
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.pushing import WINDOW, WINDOW_BYTES
from mediator.metrics import Metrics
from mediator.nats.accounts import AccountMap
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection
from mediator.nats.door import Door, DoorOptions
from mediator.nats.subjects import PlainSubject, PublicListSubject, classify, overlaps


@pytest.mark.rule("E9")
@pytest.mark.parametrize(
    ("headers", "payload", "kept"),
    [
        ({}, b"x", False),
        ({}, b'{"persist": true}', True),
        ({}, b'{"persist": "true"}', False),
        ({"persist": "true"}, b"x", True),
        ({"Persist": "TRUE"}, b"x", True),
        ({"mq9-persist": "true"}, b"x", True),
        ({"persist": ""}, b'{"persist": true}', True),
        ({"persist": "false"}, b'{"persist": true}', False),
        ({"persist": "true", "MQ9-Persist": "false"}, b"x", False),
    ],
)
def test_headers_go_before_the_body_in_persist(headers: dict[str, str], payload: bytes, kept: bool) -> None:
    broadcast = broadcasts.read("a.b", payload, headers)
    assert (broadcast.kept, broadcast.draft.headers) == (kept, {})


@pytest.mark.rule("E9", "E3")
def test_a_broadcast_takes_prefixed_headers_only() -> None:
    headers = {"mq9-ttl": "5", "mq9-priority": "low", "mq9-tags": "a", "tags": "own", "expire_at": "own"}
    broadcast = broadcasts.read("a.b", b"x", headers)
    assert (broadcast.draft.ttl, broadcast.draft.lane, broadcast.draft.tags) == (5000, Lane.NORMAL, ("a",))
    assert broadcast.draft.headers == {"tags": "own", "expire_at": "own"}


@pytest.mark.rule("E9", "N3")
@pytest.mark.parametrize(
    "name", ["", "a", "a.", ".a", "a..b", "a.*", "a.>", "a.#", "#", "a.b#", "a.\x00", "a. b", "a.�"]
)
def test_a_wrong_broadcast_subject_is_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match=r"subject: expected .* BROADCAST\."):
        broadcasts.read(name, b"", None)


@pytest.mark.rule("E9")
@given(st.text(max_size=12), st.binary(max_size=20), st.dictionaries(st.text(max_size=8), st.text(max_size=8)))
def test_any_broadcast_is_read_or_refused(name: str, payload: bytes, headers: dict[str, str]) -> None:
    try:
        broadcast = broadcasts.read(name, payload, headers)
    except BadRequestError:
        return
    sizes, _, rest = broadcast.body().partition(b"\r\n")
    assert rest[int(sizes.split()[0]) : -2] == payload


@pytest.mark.rule("E9", "N10")
@given(st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4), st.booleans(), st.data())
def test_a_pattern_matches_token_by_token(tokens: list[str], rest: bool, data: st.DataObject) -> None:
    subject = [token if token != "*" else data.draw(st.sampled_from("ab")) for token in tokens]
    pattern = [*tokens, ">"] if rest else tokens
    more = data.draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=2))
    assert overlaps(".".join(pattern), ".".join([*subject, *more])) is rest
    assert overlaps(".".join(pattern), ".".join(subject)) is not rest
    assert not overlaps(".".join(pattern), ".".join(["c", *subject[1:], *more])) or tokens[0] == "*"


@pytest.mark.rule("E10")
@pytest.mark.parametrize(
    ("subject", "delivered_on"),
    [
        ("PUBLIC.LIST", "PUBLIC.LIST"),
        ("MAILBOX.MSG.public", "MAILBOX.MSG.public"),
        ("MAILBOX.MSG.public.*", "MAILBOX.MSG.public.normal"),
        ("MAILBOX.MSG.public.high", "MAILBOX.MSG.public.high"),
    ],
)
def test_public_mailboxes_come_on_the_subscribed_subject(subject: str, delivered_on: str) -> None:
    found = classify(f"$mq9.AI.{subject}")
    assert isinstance(found, PublicListSubject)
    assert found.delivered_on == f"$mq9.AI.{delivered_on}"


# What waits.


class Client:
    """A client with one subscription, which keeps what it is pushed."""

    def __init__(self, at: BroadcastHub | None = None, *, bare: bool = False, full: bool = False) -> None:
        self.full = full
        self._hub = at or hub()
        self._pushed: list[bytes] = []
        self.subscription = Subscription(b"7", "", PlainSubject(), "", self._write, lambda _: self.full, bare=bare)
        self.subscription.in_flight = InFlightCounter(lambda _count: None)
        BroadcastChannel(self._hub, "", "").join(self.subscription)

    def _write(self, _to: Subscription, pushes: Sequence[bytes]) -> None:
        self._pushed += pushes

    def enqueue(self, message: BroadcastMessage) -> bool:
        return self._hub.enqueue(self.subscription, message)

    def forget(self) -> list[BroadcastMessage]:
        return self._hub.forget(self.subscription)

    def gets(self) -> list[bytes]:
        """Return what is pushed now."""
        self._hub.push(self.subscription)
        pushed, self._pushed = self._pushed, []
        return pushed


def hub(lost: Callable[[], None] = lambda: None) -> BroadcastHub:
    return BroadcastHub(NatsConnection(b""), lost)


@pytest.mark.rule("E9", "E7")
async def test_unstored_broadcasts_get_half_a_window() -> None:
    client = Client()
    for number in range(BACKLOG):
        assert client.enqueue(BroadcastMessage(b"%d" % number, b"", b""))
    assert not client.enqueue(BroadcastMessage(b"over", b"", b""))
    first = client.gets()
    assert first[0] == b"HMSG $mq9.AI.BROADCAST.0 7 0 0\r\n\r\n"
    assert len(first) == WINDOW // 2
    assert client.gets() == []
    client.subscription.confirm(10)
    subjects = [b"$mq9.AI.BROADCAST.%d" % (WINDOW // 2 + number) for number in range(10)]
    assert [frame.split()[1] for frame in client.gets()] == subjects


@pytest.mark.rule("E9", "E6")
async def test_a_client_without_headers_gets_the_payload() -> None:
    client = Client(bare=True)
    client.enqueue(BroadcastMessage(b"a.b", b"NATS/1.0\r\na: b\r\n\r\n", b"hi"))
    assert client.gets() == [b"MSG $mq9.AI.BROADCAST.a.b 7 2\r\nhi\r\n"]


@pytest.mark.rule("E9", "N7")
async def test_waiting_bytes_are_bounded_but_for_one_broadcast() -> None:
    client = Client()
    assert client.enqueue(BroadcastMessage(b"a", b"", b"x" * (BACKLOG_BYTES + 1)))
    assert not client.enqueue(BroadcastMessage(b"b", b"", b"x"))
    assert len(client.gets()) == 1
    assert client.enqueue(BroadcastMessage(b"c", b"", b"x" * (WINDOW_BYTES // 2)))
    assert client.gets() == []
    client.subscription.confirm(1)
    assert len(client.gets()) == 1


@pytest.mark.rule("E9")
async def test_a_broadcast_waits_while_the_client_does_not_read() -> None:
    client = Client(full=True)
    client.enqueue(BroadcastMessage(b"a", b"", b"x"))
    assert client.gets() == []
    client.full = False
    assert len(client.gets()) == 1


@pytest.mark.rule("E9")
async def test_a_broadcast_that_nobody_takes_counts_as_lost() -> None:
    lost: list[None] = []
    at = hub(lambda: lost.append(None))
    BroadcastChannel(at, "", "workers").give(BroadcastMessage(b"a", b"", b"x"))
    assert len(lost) == 1
    crowded, free = Client(at), Client(at)
    both = BroadcastChannel(at, "", "")
    both.listeners += (crowded.subscription, free.subscription)
    for number in range(BACKLOG + 1):
        both.give(BroadcastMessage(b"%d" % number, b"", b""))
        free.forget()
    assert len(lost) == 2


@pytest.mark.rule("E9")
async def test_a_member_for_which_nothing_waits_is_next() -> None:
    at = hub()
    slow, quick = Client(at), Client(at)
    group = BroadcastChannel(at, "", "workers")
    group.listeners += (slow.subscription, quick.subscription)
    for number in range(6):
        group.give(BroadcastMessage(b"%d" % number, b"", b""))
        quick.gets()
    assert len(slow.subscription.backlog) == 1


@pytest.mark.rule("E9", "N7")
async def test_waiting_bytes_of_an_instance_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(broadcasts, "HELD_BYTES", 1000)
    shared = hub()
    one, two = Client(shared), Client(shared)
    first, other = BroadcastMessage(b"a", b"", b"x" * 6), BroadcastMessage(b"b", b"", b"x" * 6)
    assert one.enqueue(first)
    assert two.enqueue(first)
    assert not one.enqueue(other)
    assert one.forget() == [first]
    assert not one.enqueue(other)
    assert len(two.gets()) == 1
    assert one.enqueue(other)


@pytest.mark.rule("E9", "N1")
@pytest.mark.parametrize("subject", ["BROADCAST", "BROADCAST.", "BROADCAST.one"])
async def test_a_broadcast_without_a_name_is_told_what_is_missing(subject: str) -> None:
    connection, broker = Mock(spec=NatsConnection), Mock()
    broker.knows.return_value = False
    options = DoorOptions(accounts=False, instance="one", max_pending=10)
    door = Door(connection, broker, Metrics(), AccountMap({}, ()), options, verbs_for_gateway(connection, broker))
    replied = asyncio.get_running_loop().create_future()
    door.receive(Request(f"$mq9.AI.{subject}", b"reply", b"x", None, answer=replied.set_result))
    reply = orjson.loads(await asyncio.wait_for(replied, 5))
    assert (reply["error_code"], reply.get("msg_id")) == ("bad_request", -1)
    assert reply["error"].startswith("subject: expected BROADCAST.domain.event")
