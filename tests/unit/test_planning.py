"""The dry run of the clean-up: what would go, why, and that nothing does."""

from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mediator.errors import MediatorError
from mediator.mailboxes import collecting
from mediator.mailboxes.address import redact
from mediator.mailboxes.collecting import EMPTIED, FIRST_LEASE, FREED, GONE, LAST, OVER, PlannedRemoval, plan
from tests.harness.broker import BOX, DAY, GROUP, HOUR, START, TENANT, Broker
from tests.harness.stores import ram_store


def planned(broker: Broker, examples: int = 5) -> dict[tuple[str, str], PlannedRemoval]:
    with broker.store.reading() as tx:
        return {(found.what, found.why): found for found in plan(tx, broker.now, examples)}


def test_nothing_expired_is_no_finding(broker: Broker) -> None:
    broker.create(ttl=DAY)
    broker.send(ttl=DAY)
    assert planned(broker) == {}


@pytest.mark.rule("S5", "A7")
def test_expired_messages_are_counted_with_a_few_examples(broker: Broker) -> None:
    broker.create()
    for number in range(7):
        broker.send(b"secret", ttl=HOUR + number)
    broker.send(b"stays")
    broker.advance(2 * HOUR)
    found = planned(broker, examples=3)
    assert list(found) == [("messages", OVER)]
    messages = found["messages", OVER]
    assert (messages.count, messages.more) == (7, False)
    assert [(x.tenant, x.address, x.number, x.expired_at) for x in messages.examples] == [
        (TENANT, redact(BOX), number, START + HOUR + number) for number in range(3)
    ]


@pytest.mark.rule("M1", "M4", "A7")
def test_mailboxes_that_go_are_told_apart_with_all_in_them(broker: Broker) -> None:
    broker.create("short", ttl=HOUR)
    broker.create("deleted")
    for box in ("short", "deleted"):
        broker.send(to=box)
        broker.send(to=box)
        broker.send(to=box, delay=DAY)
    broker.delete_mailbox("deleted")
    broker.advance(HOUR)
    found = planned(broker)
    assert {key: value.count for key, value in found.items()} == {
        ("mailboxes", OVER): 1,
        ("mailboxes", FREED): 1,
        ("messages", EMPTIED): 4,
        ("delayed messages", EMPTIED): 2,
    }
    (short,) = found["mailboxes", OVER].examples
    assert (short.address, short.expired_at) == (redact("short"), START + HOUR)
    (deleted,) = found["mailboxes", FREED].examples
    assert (deleted.address, deleted.expired_at) == ("", None)


@pytest.mark.rule("F7")
def test_leases_that_end_for_good(broker: Broker) -> None:
    broker.create()
    broker.send(ttl=HOUR)
    broker.send()
    broker.take(ack_wait=1000, max_deliver=1)
    broker.send()
    broker.take("others", ack_wait=1000, max_deliver=2)
    broker.advance(2 * HOUR)
    found = planned(broker)
    assert sorted(x.number for x in found["leases", GONE].examples) == [0, 0]
    assert [x.number for x in found["leases", LAST].examples] == [1]


@pytest.mark.rule("F7")
def test_a_plan_counts_the_leases_that_the_clean_up_ends(broker: Broker) -> None:
    broker.create()
    broker.send(ttl=HOUR)
    for _ in range(4):
        broker.send()
    broker.take(ack_wait=1000, max_deliver=1)
    broker.advance(1000)
    assert broker.take() == []
    broker.send()
    broker.take(ack_wait=1000)
    for msg_id in (1, 5):
        broker.delete(msg_id)
    broker.advance(2 * HOUR)
    for _ in range(2):
        expected = sum(each.count for (what, _), each in planned(broker).items() if what == "leases")
        done, _ = broker.run(lambda tx: collecting.ended_leases(tx, FIRST_LEASE, broker.now, 100))
        assert done.leases == expected


def test_a_plan_removes_nothing(broker: Broker) -> None:
    broker.create("short", ttl=HOUR)
    broker.create()
    broker.send(ttl=HOUR)
    broker.take(GROUP, ack_wait=1000)
    broker.advance(2 * HOUR)
    before = planned(broker)
    assert planned(broker) == before
    assert broker.clean_up().total > 0
    assert ("messages", OVER) not in planned(broker)


BOXES = ("one", "two")
GROUPS = ("a", "b", "c")
ACTS = st.one_of(
    st.tuples(st.just("create"), st.sampled_from(BOXES), st.sampled_from([None, HOUR])),
    st.tuples(st.just("send"), st.sampled_from(BOXES), st.fixed_dictionaries(
        {}, optional={"ttl": st.sampled_from([HOUR, DAY]), "delay": st.just(2 * HOUR), "dedup_id": st.just("x")}
    )),
    st.tuples(st.just("take"), st.sampled_from(BOXES), st.fixed_dictionaries(
        {"group": st.sampled_from(GROUPS)},
        optional={"ack_wait": st.sampled_from([1000, DAY]), "max_deliver": st.sampled_from([1, 2])},
    )),
    st.tuples(st.just("nack"), st.sampled_from(BOXES), st.sampled_from(GROUPS)),
    st.tuples(st.just("delete"), st.sampled_from(BOXES), st.integers(0, 4)),
    st.tuples(st.just("delete_mailbox"), st.sampled_from(BOXES), st.none()),
    st.tuples(st.just("advance"), st.sampled_from([2000, HOUR, DAY]), st.none()),
)  # fmt: skip


def act(broker: Broker, what: str, where: Any, how: Any) -> None:
    match what:
        case "create":
            broker.create(where, ttl=how)
        case "send":
            broker.send(to=where, **how)
        case "take":
            broker.take(how["group"], where, **{name: value for name, value in how.items() if name != "group"})
        case "nack":
            broker.nack(*range(5), group=how, box=where, delay=HOUR)
        case "delete":
            broker.delete(how, where)
        case "delete_mailbox":
            broker.delete_mailbox(where)
        case _:
            broker.advance(where)


@pytest.mark.rule("M1", "S5", "F7")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(acts=st.lists(ACTS, min_size=5, max_size=40))
def test_a_pass_removes_what_was_planned(acts: list[tuple[str, Any, Any]]) -> None:
    broker = Broker(ram_store())
    for box in BOXES:
        broker.create(box)
    for each in acts:
        with suppress(MediatorError):
            act(broker, *each)
    promised: Counter[str] = Counter()
    for (what, _), found in planned(broker).items():
        promised[what] += found.count
    # In the order of a pass, which counts expired mailboxes when they are removed; leases come last.
    broker.run(lambda tx: collecting.expired_mailboxes(tx, broker.now, 100))
    done = broker.clean_up()
    leases, _ = broker.run(lambda tx: collecting.ended_leases(tx, FIRST_LEASE, broker.now, 100))
    removed = Counter(asdict(done.plus(leases)))
    del removed["dedup_ids"]
    removed["delayed messages"] = removed.pop("delayed")
    assert removed == promised
    assert planned(broker) == {}
