"""Send-only addresses: they take SEND and nothing else, and live and die with their mailbox (A10)."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BadRequestError, MediatorError, NoSuchMailboxError, SendOnlyError
from mediator.mailboxes import pushing
from mediator.mailboxes.address import SendOnlyAddresses, is_send_only, parse_address
from mediator.mailboxes.lanes import LANES
from tests.harness.broker import BOX, DAY, GROUP, HOUR, SECOND, TENANT, Broker

KEYED = SendOnlyAddresses(bytes(32))
pytestmark = pytest.mark.rule("A10")


@pytest.fixture
def to(broker: Broker) -> str:
    """The send-only address of the mailbox ``task``."""
    return broker.create(ttl=DAY).send_only


def test_what_is_sent_to_it_is_in_the_mailbox(broker: Broker, to: str) -> None:
    assert [broker.send(b"0", to=to), broker.send(b"1"), broker.send(b"2", to=to)] == [0, 1, 2]
    assert [message.payload for message in broker.query()] == [b"0", b"1", b"2"]


def test_it_means_the_mailbox_to_every_rule_of_sending(broker: Broker, to: str) -> None:
    broker.send(b"old", key="k")
    broker.send(b"new", key="k", to=to)
    assert broker.send(dedup_id="d", to=to) == broker.send(dedup_id="d") == 2
    assert broker.send(b"late", delay=SECOND, to=to) == -1
    broker.advance(SECOND)
    broker.release()
    assert [message.payload for message in broker.query()] == [b"new", b"", b"late"]


def test_what_follows_from_a_send_names_the_mailbox(broker: Broker, to: str) -> None:
    mailbox = broker.mailbox()
    broker.send(to=to)
    assert broker.woken == {(TENANT, BOX)}
    assert (broker.events[-1].tenant, broker.events[-1].mailbox_id) == (TENANT, mailbox.id)


VERBS: dict[str, Callable[[Broker, str], Any]] = {
    "fetch": lambda broker, to: broker.fetch(box=to),
    "ack": lambda broker, to: broker.ack(0, box=to),
    "nack": lambda broker, to: broker.nack(0, box=to),
    "extend": lambda broker, to: broker.extend(0, ack_wait=SECOND, box=to),
    "query": lambda broker, to: broker.query(to),
    "dead": lambda broker, to: broker.query(to, dead_for=GROUP),
    "delete": lambda broker, to: broker.delete(0, to),
    "update": lambda broker, to: broker.update("token", to, desc="mine"),
    "set": lambda broker, to: broker.set_ack_wait(SECOND, to),
    "end": lambda broker, to: broker.delete_mailbox(to),
    "subscribe": lambda broker, to: broker.run(
        lambda tx: pushing.open_cursor(tx, (TENANT, to), LANES, 9, 99, broker.now)
    ),
    "join": lambda broker, to: broker.run(
        lambda tx: pushing.join_queue_group(tx, (TENANT, to), GROUP, DAY, broker.now)
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_else_is_done_by_it(broker: Broker, to: str, verb: str) -> None:
    broker.send(b"secret")
    before = broker.mailbox(), len(broker.events)
    with pytest.raises(SendOnlyError) as raised:
        VERBS[verb](broker, to)
    assert str(raised.value) == f"mailbox {to} is send-only: this address takes SEND and nothing else"
    assert (broker.mailbox(), len(broker.events)) == before


def everything_fails(broker: Broker, to: str) -> None:
    for verb in (lambda: broker.send(to=to), lambda: broker.query(to), lambda: broker.fetch(box=to)):
        with pytest.raises(NoSuchMailboxError) as raised:
            verb()
        assert str(raised.value) == f"mailbox {to} does not exist"


@pytest.mark.rule("M1", "M4", "A3")
def test_it_ends_with_its_mailbox(broker: Broker, to: str) -> None:
    broker.send(to=to)
    broker.delete_mailbox()
    everything_fails(broker, to)
    again = broker.create().send_only
    everything_fails(broker, to)
    assert broker.send(to=again) == 0
    broker.clean_up()
    everything_fails(broker, to)


@pytest.mark.rule("M1")
def test_it_ends_the_moment_its_mailbox_expires(broker: Broker, to: str) -> None:
    broker.advance(DAY - 1)
    assert broker.send(to=to) == 0
    broker.advance(1)
    everything_fails(broker, to)
    broker.clean_up()
    everything_fails(broker, to)
    broker.create(ttl=HOUR)
    everything_fails(broker, to)


@pytest.mark.rule("A6")
def test_it_is_of_its_tenant(broker: Broker, to: str) -> None:
    for tenant in ("other", ""):
        with pytest.raises(NoSuchMailboxError):
            broker.send(to=to, tenant=tenant)
    assert broker.create(tenant="other").send_only != to


@pytest.mark.rule("M2")
def test_creating_again_shows_the_same(broker: Broker) -> None:
    to = broker.create(public=True).send_only
    assert broker.create(public=True).send_only == to
    assert broker.run(lambda tx: tx.mailboxes.send_only(tx.mailboxes.find(TENANT, BOX))) == to


@pytest.mark.rule("A1")
def test_no_mailbox_gets_such_a_name(broker: Broker, to: str) -> None:
    for name in (to, KEYED.make(1, TENANT, "a", 0)):
        with pytest.raises(BadRequestError) as raised:
            broker.create(name)
        assert raised.value.field == "name"
    for name in ("send", "send.mail", f"{to}x", to[:-1], f"send.{'z' * 40}"):
        broker.create(name)
        assert broker.send(b"x", to=name) == 0


def test_changing_a_character_leads_nowhere(broker: Broker, to: str) -> None:
    for place in range(len("send."), len(to)):
        other = "0" if to[place] != "0" else "1"
        with pytest.raises(NoSuchMailboxError):
            broker.send(to=to[:place] + other + to[place + 1 :])


@given(st.integers(1, 2**63 - 1), st.text(max_size=9), st.from_regex(r"[a-z0-9]{1,128}", fullmatch=True))
def test_only_who_has_the_key_reads_the_number(no: int, tenant: str, address: str) -> None:
    made = KEYED.make(no, tenant, address, 0)
    assert parse_address(made) == made
    assert is_send_only(made)
    assert KEYED.number(made) == no
    assert SendOnlyAddresses(b"other".ljust(32)).number(made) != no
    assert address not in made or len(address) < 8


def test_each_part_of_what_a_mailbox_is_counts() -> None:
    mailboxes = [(1, "t", "a", 0), (2, "t", "a", 0), (1, "u", "a", 0), (1, "t", "b", 0), (1, "t", "a", 1)]
    assert len({KEYED.make(*each) for each in mailboxes}) == len(mailboxes)


@pytest.mark.parametrize("text", ["", "task", "send.", f"send.{'0' * 39}", f"send.{'w' * 40}", f"send.{'1_' * 20}"])
def test_other_words_are_no_such_address(text: str) -> None:
    assert not is_send_only(text)
    assert KEYED.number(text) is None


def test_every_word_of_the_form_can_be_read() -> None:
    for digit in "09av":
        assert KEYED.number(f"send.{digit * 40}") is None or is_send_only(f"send.{digit * 40}")


def test_the_error_is_one_of_the_tree() -> None:
    assert (SendOnlyError("a").code, SendOnlyError("a").status) == ("send_only", 403)
    assert isinstance(SendOnlyError("a"), MediatorError)
