"""Several ACKs of a group done together do what they do one after the other (K2–K4, A8)."""

from random import Random
from typing import Any

import pytest

from mediator.mailboxes import settling
from mediator.mailboxes.events import Event
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.mailbox import Retention
from mediator.mailboxes.settling import Ack
from tests.harness.broker import GROUP, SECOND, TENANT, Broker

EACH, TOGETHER = BOXES = ("each", "together")


def prepare(broker: Broker, chance: Random, retention: Retention) -> int:
    """Let the same happen to both mailboxes, and return how many messages they got."""
    for box in BOXES:
        broker.create(box, retention=retention)
    sent = 0
    for _ in range(chance.randrange(4, 16)):
        what = chance.choice(["send", "send", "fetch", "fetch", "ack", "delete", "wait"])
        if what == "send":
            lanes = chance.choices(LANES, k=chance.randrange(1, 8))
            ttl = chance.choice([None, None, 2 * SECOND])
            for box in BOXES:
                for lane in lanes:
                    broker.send(to=box, lane=lane, ttl=ttl)
            sent += len(lanes)
        elif what == "fetch":
            options = {"num_msgs": chance.randrange(1, 8), "ack_wait": chance.choice([None, SECOND])}
            for box in BOXES:
                broker.take(box=box, max_deliver=2, **options)
        elif what == "ack" and sent:
            ids = [chance.randrange(sent)]
            for box in BOXES:
                broker.ack(*ids, box=box)
        elif what == "delete" and sent:
            msg_id = chance.randrange(sent)
            for box in BOXES:
                if msg_id in broker.shown(box):
                    broker.delete(msg_id, box=box)
        else:
            broker.advance(chance.choice([SECOND // 2, SECOND, 2 * SECOND]))
    return sent


def state(broker: Broker, box: str) -> Any:
    """Return all that an ACK can change."""
    with broker.reading() as tx:
        mailbox = tx.mailboxes.find(TENANT, box)
        group = tx.groups.find(mailbox, GROUP)
        there = [ref.msg_id for ref in tx.messages.first(mailbox, 1000)]
        if group is None:
            return there
        leases = sorted(tx.leases.get(group, range(1000)), key=lambda lease: lease.msg_id)
        return there, mailbox.messages, mailbox.bytes, group.settled, group.delivered, group.replies, leases


def told(events: list[Event]) -> list[Any]:
    return [(event.type, event.lane, event.msg_id) for event in events]


@pytest.mark.rule("K2", "K3", "K4", "A5")
@pytest.mark.parametrize("retention", Retention)
def test_joint_acks_do_what_each_would(broker: Broker, retention: Retention, histories: int) -> None:
    for seed in range(histories):
        chance = Random(seed)
        sent = prepare(broker, chance, retention)
        acks = [chance.choices(range(sent + 1), k=chance.randrange(4)) for _ in range(chance.randrange(1, 7))]
        before = len(broker.events)
        alone = [broker.ack(*ids, box=EACH) for ids in acks]
        events = told(broker.events[before:])
        before = len(broker.events)
        joint = [Ack(TENANT, TOGETHER, GROUP, ids) for ids in acks]
        assert broker.run(lambda tx, joint=joint: settling.ack_all(tx, joint, broker.now)) == alone, (seed, acks)
        assert told(broker.events[before:]) == events, (seed, acks)
        assert state(broker, TOGETHER) == state(broker, EACH), (seed, acks)
        for box in BOXES:
            broker.delete_mailbox(box)


@pytest.mark.rule("K2")
def test_many_acks_take_the_statements_of_one(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.create()
    for _ in range(50):
        broker.send()
    ids = broker.take(num_msgs=50)
    with broker.store.transaction() as tx:
        dialect = type(tx.session.dialect)
    execute, statements = dialect.execute, []

    def watched(self: Any, sql: str, *parameters: Any) -> Any:
        statements.append(sql)
        return execute(self, sql, *parameters)

    monkeypatch.setattr(dialect, "execute", watched)
    assert broker.ack(ids[0]) == 1
    one = len(statements)
    joint = [Ack(TENANT, "task", GROUP, [msg_id]) for msg_id in ids[1:]]
    assert broker.run(lambda tx: settling.ack_all(tx, joint, broker.now)) == [1] * 49
    assert len(statements) == 2 * one
