"""Keylists and attached keys: whose mail a key is, and that nobody takes it from them (D8, D11)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BadRequestError, NoSuchMailboxError, NotEnrolledError
from mediator.mailboxes.fetching import Deliver
from mediator.mailboxes.mailbox import Retention
from mediator.store.base import Store
from pickup.rules import names
from pickup.rules.granting import KeylistResult
from pickup.rules.records import MediationRules
from tests.harness.broker import DAY, HOUR, START
from tests.harness.mediation import Mediation, key, payloads
from tests.harness.stores import ram_store

SUCCESS, NO_CHANGE, CLIENT_ERROR = KeylistResult.SUCCESS, KeylistResult.NO_CHANGE, KeylistResult.CLIENT_ERROR
BASE58 = names.base58(names.verkey(key(10)))
IDLE = 180 * DAY


def test_each_wish_has_its_own_result(house: Mediation) -> None:
    holder = house.holder(1)
    wishes = [
        (key(10), "add"),
        (key(10), "add"),
        ("nonsense", "add"),
        ("nonsense", "remove"),
        (key(11), "remove"),
        (key(11), "borrow"),
        (key(12), "add"),
        (key(12), "remove"),
        (key(12), "remove"),
    ]
    results = [SUCCESS, NO_CHANGE, CLIENT_ERROR, CLIENT_ERROR, NO_CHANGE, CLIENT_ERROR, SUCCESS, SUCCESS, NO_CHANGE]
    assert house.update(holder, wishes) == results
    assert house.keys(holder) == ([key(10)], 1)


@pytest.mark.rule("D3")
@pytest.mark.parametrize("written", [BASE58, key(10), f"{key(10)}#{key(10)[8:]}"])
def test_a_key_is_the_same_in_every_form(house: Mediation, written: str) -> None:
    holder = house.holder(1, BASE58)
    assert house.add(holder, written) == [NO_CHANGE]
    assert house.remove(holder, written) == [SUCCESS]
    assert house.keys(holder) == ([], 0)


@pytest.mark.rule("D8")
def test_a_key_that_another_holds_cannot_be_had(house: Mediation) -> None:
    holder, thief = house.holder(1, key(10)), house.holder(2)
    for written in (key(10), BASE58, f"{key(10)}#x"):
        assert house.add(thief, written) == [CLIENT_ERROR]
    assert house.add(thief, key(10), proven=[key(2)]) == [CLIENT_ERROR]
    # Nor can it be taken away from its holder.
    assert house.remove(thief, key(10)) == [NO_CHANGE]
    house.forward(key(10))
    assert (house.status(holder).count, house.status(thief).count) == (1, 0)


@pytest.mark.rule("A6", "D8")
def test_the_same_key_in_two_tenants_is_two_keys(house: Mediation) -> None:
    here, there = house.holder(1, key(10)), house.holder(1, key(10), tenant="other")
    house.forward(key(10), b"here")
    house.forward(key(10), b"there", tenant="other")
    assert payloads(house.deliver(here)) == [b"here"]
    assert payloads(house.deliver(there)) == [b"there"]


@pytest.mark.rule("D8")
def test_who_proves_a_key_has_it_and_what_came_before_stays(house: Mediation) -> None:
    old, new = house.holder(1, key(10)), house.holder(2)
    house.forward(key(10), b"before")
    assert house.add(new, BASE58, proven=[key(2), key(10)]) == [SUCCESS]
    house.forward(key(10), b"after")
    assert payloads(house.deliver(old)) == [b"before"]
    assert payloads(house.deliver(new)) == [b"after"]
    assert (house.keys(old)[1], house.keys(new)[1]) == (0, 1)


@pytest.mark.rule("D8")
def test_a_key_is_free_after_180_idle_days(house: Mediation) -> None:
    house.holder(1, key(10))
    other = house.holder(2)
    house.now = START + IDLE - 1
    assert house.add(other, key(10)) == [CLIENT_ERROR]
    house.now = START + IDLE
    assert house.add(other, key(10)) == [SUCCESS]


@pytest.mark.rule("D8")
@pytest.mark.parametrize("used", ["mail", "holder"])
def test_use_keeps_a_key(house: Mediation, used: str) -> None:
    holder, other = house.holder(1, key(10)), house.holder(2)
    house.advance(10 * DAY)
    if used == "mail":
        assert house.forward(key(10)).queued == 1
    else:
        house.seen(holder)
    house.now = START + IDLE + 10 * DAY - 1
    assert house.add(other, key(10)) == [CLIENT_ERROR]
    house.advance(1)
    assert house.add(other, key(10)) == [SUCCESS]


@pytest.mark.rule("D8")
def test_without_a_span_no_key_is_ever_idle(store: Store) -> None:
    house = Mediation(store, MediationRules(idle=0))
    house.holder(1, key(10))
    other = house.holder(2)
    house.advance(10_000 * DAY)
    assert house.add(other, key(10)) == [CLIENT_ERROR]


@pytest.mark.rule("D11")
def test_a_key_that_an_operator_attached_cannot_be_had_ever(house: Mediation) -> None:
    house.create(retention=Retention.UNTIL_ACK)
    house.attach(key(10), "task")
    holder = house.holder(1)
    house.advance(IDLE)
    assert house.add(holder, key(10), proven=[key(10)]) == [CLIENT_ERROR]


def test_a_keylist_is_bounded(store: Store) -> None:
    house = Mediation(store, MediationRules(max_keys=2))
    holder = house.holder(1, key(10), key(11))
    assert house.update(
        holder, [(key(12), "add"), (key(10), "add"), (key(10), "remove"), (key(12), "add"), (key(13), "add")]
    ) == [CLIENT_ERROR, NO_CHANGE, SUCCESS, SUCCESS, CLIENT_ERROR]
    assert set(house.keys(holder)[0]) == {key(11), key(12)}


def test_a_keylist_is_paged_in_order_of_its_making(house: Mediation) -> None:
    holder = house.holder(1)
    for number in (13, 11, 12):
        house.add(holder, key(number))
        house.advance(1)
    assert house.keys(holder, 0, 2) == ([key(13), key(11)], 3)
    assert house.keys(holder, 2, 2) == ([key(12)], 3)
    assert house.keys(holder, 3, 2) == ([], 3)


@pytest.mark.rule("D8")
def test_without_mediation_there_is_no_keylist_to_change(house: Mediation) -> None:
    with pytest.raises(NotEnrolledError):
        house.add(house.connect(key(1)), key(10))
    assert house.route(key(10)) is None


@pytest.mark.rule("D12")
@given(st.text(), st.sampled_from(["add", "remove", "", "Add", "query"]))
def test_no_text_does_harm(text: str, action: str) -> None:
    house = Mediation(ram_store())
    (result,) = house.update(house.holder(1), [(text, action)])
    assert result in (SUCCESS, NO_CHANGE, CLIENT_ERROR)


@pytest.mark.rule("D11")
def test_mail_for_an_attached_key_is_fetched_by_a_group(house: Mediation) -> None:
    house.create(retention=Retention.UNTIL_ACK)
    route = house.attach(BASE58, "task")
    assert (route.key, route.connection_id) == (key(10), None)
    assert house.forward(key(10), b"for the group").queued == 1
    fetched = house.fetch("workers", deliver=Deliver.EARLIEST)
    assert payloads(fetched.messages) == [b"for the group"]
    house.ack(fetched.messages[0].msg_id)
    assert house.shown() == []


@pytest.mark.rule("D11")
def test_an_attached_key_moves_and_goes(house: Mediation) -> None:
    for name in ("a", "b"):
        house.create(name, retention=Retention.UNTIL_ACK)
    house.attach(key(10), "a")
    house.attach(key(10), "b")
    house.forward(key(10))
    assert (house.shown("a"), house.shown("b")) == ([], [0])
    house.detach(BASE58)
    assert house.forward(key(10)).unroutable == 1
    with pytest.raises(BadRequestError) as raised:
        house.detach(key(10))
    assert raised.value.field == "key"


@pytest.mark.rule("D11")
def test_a_key_is_attached_to_a_work_queue_only(house: Mediation) -> None:
    house.create()
    with pytest.raises(BadRequestError) as raised:
        house.attach(key(10), "task")
    assert raised.value.field == "mail_address"
    with pytest.raises(NoSuchMailboxError):
        house.attach(key(10), "nowhere")
    with pytest.raises(BadRequestError) as raised:
        house.attach("nonsense", "task")
    assert raised.value.field == "key"
    assert house.route(key(10)) is None


@pytest.mark.rule("A6", "D11")
def test_a_key_is_attached_within_its_tenant_only(house: Mediation) -> None:
    house.create(tenant="other", retention=Retention.UNTIL_ACK)
    with pytest.raises(NoSuchMailboxError):
        house.attach(key(10), "task")


@pytest.mark.rule("D8", "D11")
def test_an_operator_takes_no_key_from_its_holder(house: Mediation) -> None:
    house.create(retention=Retention.UNTIL_ACK)
    holder = house.holder(1, key(10))
    with pytest.raises(BadRequestError) as raised:
        house.attach(key(10), "task")
    assert raised.value.field == "key"
    with pytest.raises(BadRequestError):
        house.detach(key(10))
    assert house.keys(holder) == ([key(10)], 1)


@pytest.mark.rule("D8")
def test_use_of_a_key_is_noted_to_the_day(house: Mediation) -> None:
    house.holder(1, key(10))
    house.advance(DAY - HOUR)
    house.forward(key(10))
    route = house.route(key(10))
    assert route.used_at == START
    house.advance(HOUR)
    house.forward(key(10))
    assert house.route(key(10)).used_at == START + DAY
