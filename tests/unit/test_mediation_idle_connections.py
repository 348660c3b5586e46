"""Connections that nobody uses any more: which of them the clean-up forgets, and which not."""

import pytest

from mediator.mailboxes.address import redact
from mediator.mailboxes.bounds import DAY
from mediator.store.base import Store
from pickup.rules import connecting
from pickup.rules.records import MediationRules
from tests.harness.broker import TENANT
from tests.harness.mediation import Mediation, key
from tests.harness.protocols import envelope

SPAN = MediationRules().idle


@pytest.mark.rule("D8")
def test_an_unused_connection_goes_with_keys_and_mailbox(house: Mediation) -> None:
    gone = house.holder(1, key(10))
    house.connect(key(2))
    house.advance(SPAN - 1)
    assert house.forget() == 0
    new = house.holder(3, key(11))
    house.advance(1)
    assert house.forget() == 2
    assert house.called(key(1)) is house.called(key(2)) is house.route(key(10)) is None
    assert gone.address is not None
    assert house.mailbox(gone.address) is None
    assert house.called(key(3)) == new
    assert house.clean_up().mailboxes == 1
    assert house.forget() == 0


@pytest.mark.rule("D8")
def test_who_asks_for_something_stays(house: Mediation) -> None:
    holder = house.holder(1)
    house.advance(SPAN - DAY)
    house.seen(holder)
    house.advance(SPAN - 1)
    assert house.forget() == 0
    house.advance(1)
    assert house.forget() == 1


@pytest.mark.rule("D8", "D10")
def test_a_connection_whose_keys_get_mail_stays(house: Mediation) -> None:
    holder = house.holder(1, key(10))
    house.advance(SPAN - DAY)
    house.forward(key(10))
    (message,) = house.deliver(holder)
    house.acknowledge(holder, message.msg_id)
    house.advance(SPAN - 1)
    assert house.forget() == 0
    house.advance(1)
    assert house.forget() == 1


@pytest.mark.rule("D8", "D11")
@pytest.mark.parametrize("delay", [None, 2 * SPAN])
def test_no_waiting_mail_is_lost(house: Mediation, delay: int | None) -> None:
    holder = house.holder(1)
    assert holder.address is not None
    # Of a NATS client: it waits for as long as the mailbox is there.
    house.post(envelope(), holder.address, delay=delay)
    house.advance(SPAN)
    assert house.forget() == 0
    assert house.called(key(1)) is not None


def test_slices_pass_over_who_stays(house: Mediation) -> None:
    for number in range(10):
        house.holder(number, key(100 + number))
    house.advance(SPAN)
    for number in range(0, 10, 3):
        house.forward(key(100 + number))
    assert house.forget(limit=1) == 6
    assert [house.called(key(number)) is not None for number in range(10)] == [number % 3 == 0 for number in range(10)]


def test_nobody_is_forgotten_where_that_is_off(store: Store) -> None:
    house = Mediation(store, MediationRules(idle=0))
    house.holder(1)
    house.advance(10 * SPAN)
    assert house.forget() == 0
    with house.reading() as tx:
        assert connecting.plan_unused(tx, 0, house.now, 5) == []


@pytest.mark.rule("A7")
def test_a_dry_run_names_some_and_shows_no_address(house: Mediation) -> None:
    holders = [house.holder(number) for number in range(3)]
    house.advance(SPAN)
    house.holder(9)
    with house.reading() as tx:
        (finding,) = connecting.plan_unused(tx, SPAN, house.now, 2)
    assert (finding.what, finding.why, finding.count, finding.more) == (
        "connections",
        connecting.UNUSED,
        3,
        False,
    )
    assert [(one.tenant, one.address, one.number, one.expired_at) for one in finding.examples] == [
        (TENANT, redact(holder.address or ""), holder.id, house.now) for holder in holders[:2]
    ]
    assert house.forget() == 3
