"""Broadcasts: how they are read, and what waits for a subscriber (E1, E9, N3, N7)."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BadRequestError
from mediator.mailboxes.lanes import Lane
from mediator.nats.connection import Connection
from mediator.nats.editions import broadcasts
from mediator.nats.push import fanout
from mediator.nats.push.fanout import BACKLOG, BACKLOG_BYTES, Cast, Hub, Listener
from mediator.nats.push.outlet import Outlet
from mediator.nats.push.subscription import Tally, Target
from mediator.nats.pushwire import WINDOW, WINDOW_BYTES
from mediator.nats.stored import PublicList, classify, overlaps


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
def test_who_says_that_a_broadcast_is_kept(headers: dict[str, str], payload: bytes, kept: bool) -> None:
    told = broadcasts.read("a.b", payload, headers)
    assert (told.kept, told.draft.headers) == (kept, {})


@pytest.mark.rule("E9", "E3")
def test_what_a_broadcast_says_besides() -> None:
    headers = {"mq9-ttl": "5", "mq9-priority": "low", "mq9-tags": "a", "tags": "own", "expire_at": "own"}
    told = broadcasts.read("a.b", b"x", headers)
    assert (told.draft.ttl, told.draft.lane, told.draft.tags) == (5000, Lane.NORMAL, ("a",))
    assert told.draft.headers == {"tags": "own", "expire_at": "own"}


@pytest.mark.rule("E9", "N3")
@pytest.mark.parametrize(
    "name", ["", "a", "a.", ".a", "a..b", "a.*", "a.>", "a.#", "#", "a.b#", "a.\x00", "a. b", "a.�"]
)
def test_a_subject_that_is_wrong_is_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match=r"subject: expected .* BROADCAST\."):
        broadcasts.read(name, b"", None)


@pytest.mark.rule("E9")
@given(st.text(max_size=12), st.binary(max_size=20), st.dictionaries(st.text(max_size=8), st.text(max_size=8)))
def test_any_broadcast_is_read_or_refused(name: str, payload: bytes, headers: dict[str, str]) -> None:
    try:
        told = broadcasts.read(name, payload, headers)
    except BadRequestError:
        return
    sizes, _, rest = told.body().partition(b"\r\n")
    assert rest[int(sizes.split()[0]) : -2] == payload


@pytest.mark.rule("E9", "N10")
@given(st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4), st.booleans(), st.data())
def test_a_pattern_takes_what_stands_in_its_places(tokens: list[str], rest: bool, data: st.DataObject) -> None:
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
def test_public_mailboxes_come_on_a_subject_that_was_subscribed_to(subject: str, delivered_on: str) -> None:
    found = classify(f"$mq9.AI.{subject}")
    assert isinstance(found, PublicList)
    assert found.delivered_on == f"$mq9.AI.{delivered_on}"


# What waits.


def listener(hub: Hub | None = None) -> Listener:
    hub = hub or Hub(None, None, lambda: None)  # type: ignore[arg-type]
    return Listener(hub, Target({}, False, Tally(lambda _count: None)), b"to.")


def written(made: Listener) -> list[bytes]:
    return list(made.frames())


@pytest.mark.rule("E9", "E7")
async def test_half_a_window_is_for_what_is_not_kept_and_the_rest_waits() -> None:
    made = listener()
    for number in range(BACKLOG):
        assert made.take(Cast(b"%d" % number, b"", b""))
    assert not made.take(Cast(b"over", b"", b""))
    first = written(made)
    assert first[0] == b"HPUB to.0 0 0\r\n\r\n"
    assert len(first) == WINDOW // 2
    assert written(made) == []
    assert made.target.confirm(10) == []
    assert [frame.split()[1] for frame in written(made)] == [b"to.%d" % (WINDOW // 2 + number) for number in range(10)]


@pytest.mark.rule("E9", "N7")
async def test_bytes_that_wait_are_bounded_and_one_broadcast_always_may() -> None:
    made = listener()
    assert made.take(Cast(b"a", b"", b"x" * (BACKLOG_BYTES + 1)))
    assert not made.take(Cast(b"b", b"", b"x"))
    assert len(written(made)) == 1
    assert made.take(Cast(b"c", b"", b"x" * (WINDOW_BYTES // 2)))
    assert written(made) == []
    made.target.confirm(1)
    assert len(written(made)) == 1


@pytest.mark.rule("E9")
async def test_what_cannot_be_written_is_counted_as_lost() -> None:
    without = Connection(b"")
    lost = asyncio.Semaphore(0)
    hub = Hub(without, Outlet(without), lost.release)
    made = listener(hub)
    made.take(Cast(b"a", b"", b"x"))
    hub.start()
    made.start()
    await asyncio.wait_for(lost.acquire(), 10)
    hub.pause()


@pytest.mark.rule("E9", "N7")
async def test_what_waits_at_an_instance_is_bounded_and_counted_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(fanout, "HELD_BYTES", 1000)
    hub = Hub(None, None, lambda: None)  # type: ignore[arg-type]
    one, two = listener(hub), listener(hub)
    cast, other = Cast(b"a", b"", b"x" * 6), Cast(b"b", b"", b"x" * 6)
    assert one.take(cast)
    assert two.take(cast)
    assert not one.take(other)
    assert one.empty() == [cast]
    assert not one.take(other)
    assert len(written(two)) == 1
    assert one.take(other)
