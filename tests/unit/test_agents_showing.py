"""What others learn of an agent whose mailbox keeps its own address secret (G4)."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import NoSuchAgentError, SendOnlyError
from mediator.mailboxes.address import is_generated
from mediator.store.base import Store
from registry.cards.card import keeps_secret, read_card, with_send_only
from registry.rules import find_by_send_only, shown_to_others
from tests.harness.agents import Agency
from tests.harness.broker import DAY, TENANT

GENERATED = "abcdefghijklmnopqrstuvwx25"
TO = f"send.{'0' * 40}"
pytestmark = pytest.mark.rule("G4")


@pytest.fixture
def agency(store: Store) -> Agency:
    return Agency(store)


def shown(agency: Agency, address: str) -> bytes:
    """Return the card of a mailbox as others see it."""
    with agency.reading() as tx:
        [agent] = shown_to_others(tx, TENANT, [tx.agents.find(TENANT, address)], agency.now)
        return agent.card


@pytest.mark.rule("A1")
def test_a_generated_address_is_known_by_its_form(agency: Agency) -> None:
    assert is_generated(agency.create(None).mailbox.address)
    for other in ("task", TO, GENERATED[:-1], f"{GENERATED}2", f"a.{GENERATED[2:]}", GENERATED.replace("a", "1")):
        assert not is_generated(other)


@pytest.mark.parametrize(
    ("card", "address", "secret"),
    [
        (b"{}", GENERATED, True),
        (b"{}", "task", False),
        (b'{"send_only": true}', "task", True),
        (b'{"send_only": false}', GENERATED, False),
        (b'{"send_only": "false"}', GENERATED, True),
        (b'{"send_only": null}', "task", False),
        (b'{"x": {"send_only": true}}', "task", False),
    ],
)
def test_the_card_has_the_last_word(card: bytes, address: str, secret: bool) -> None:
    assert keeps_secret(card, address) is secret


def test_a_choice_that_is_none_is_warned_of() -> None:
    assert read_card(b'{"mailbox": "a", "send_only": "no"}').warnings == ("send_only: expected true or false",)
    assert read_card(b'{"mailbox": "a", "send_only": false}').warnings == ()


def test_a_generated_address_stands_nowhere_in_what_is_shown() -> None:
    card = f'{{ "mailbox" :"mq9://b/{GENERATED}", "n": 1.10, "url": "x/{GENERATED}/y", "n": 2 }}'.encode()
    assert with_send_only(card, GENERATED, TO) == card.replace(GENERATED.encode(), TO.encode())
    escaped = f'{{"mailbox": "\\u0061{GENERATED[1:]}", "n": 1.10}}'.encode()
    assert orjson.loads(with_send_only(escaped, GENERATED, TO)) == {"mailbox": TO, "n": 1.10}


@pytest.mark.parametrize("value", ["mail", "mq9://broker/mail", "mq9:\\/\\/broker\\/mail"])
def test_of_a_chosen_address_the_mailbox_alone_is_replaced(value: str) -> None:
    card = (
        '{"name": "mail", "mail": "mailbox", "text": "\\"mailbox\\": \\"mail\\"", "other": {"mailbox": "mail.er"},'
        f' "mailbox" :\n"{value}"}}'
    ).encode()
    end = value.removesuffix("mail") + TO
    assert with_send_only(card, "mail", TO) == card.replace(f'"{value}"}}'.encode(), f'"{end}"}}'.encode())
    a2a = b'{"capabilities": {"extensions": [{"params": {"mailbox": "mail"}}]}}'
    assert with_send_only(a2a, "mail", TO) == a2a.replace(b'"mail"', f'"{TO}"'.encode())


words = st.text(st.sampled_from('ab"\\/:{} é'), max_size=8) | st.sampled_from(["mail", GENERATED, "mailbox"])
values = st.recursive(words, lambda inner: st.lists(inner) | st.dictionaries(words, inner), max_leaves=8)


def replaced(value: Any, address: str, key: str = "") -> Any:
    """Return what is to become of a value of a card."""
    if isinstance(value, dict):
        return {replaced(k, address): replaced(v, address, k) for k, v in value.items()}
    if isinstance(value, list):
        return [replaced(each, address) for each in value]
    if address == GENERATED or (key == "mailbox" and value == address):
        return value.replace(address, TO)
    return value


@given(st.dictionaries(words, values), st.sampled_from(["mail", GENERATED]), st.booleans())
def test_nothing_but_the_address_is_replaced(card: dict[str, Any], address: str, escaped: bool) -> None:
    card["mailbox"] = address
    data = orjson.dumps(card)
    if escaped:
        data = data.replace("é".encode(), b"\\u00e9")
    assert orjson.loads(with_send_only(data, address, TO)) == replaced(card, address)


def test_who_finds_an_agent_may_send_to_it(agency: Agency) -> None:
    made = agency.create(None)
    agency.register(made.mailbox.address)
    agency.report(made.mailbox.address, status=f'{{"mailbox": "{made.mailbox.address}"}}'.encode())
    card = shown(agency, made.mailbox.address)
    assert read_card(card).address == made.send_only
    assert agency.send(to=read_card(card).address) == 0
    with agency.reading() as tx:
        agent = find_by_send_only(tx, TENANT, made.send_only, agency.now)
    assert (agent.address, agent.card) == (made.send_only, card)
    assert agent.status == f'{{"mailbox": "{made.send_only}"}}'.encode()
    assert agency.find(made.mailbox.address).address == made.mailbox.address


def test_without_a_living_mailbox_a_card_is_shown_as_it_came(agency: Agency) -> None:
    agency.register(GENERATED)
    assert shown(agency, GENERATED) == agency.find(GENERATED).card
    made = agency.create(GENERATED, ttl=DAY)
    assert made.send_only.encode() in shown(agency, GENERATED)
    agency.advance(DAY)
    assert shown(agency, GENERATED) == agency.find(GENERATED).card


@pytest.mark.rule("A6")
def test_only_mailboxes_of_the_tenant_count(agency: Agency) -> None:
    agency.create(GENERATED, tenant="other")
    agency.register(GENERATED)
    assert shown(agency, GENERATED) == agency.find(GENERATED).card


@pytest.mark.rule("G1", "G2")
def test_the_owner_alone_changes_the_card(agency: Agency) -> None:
    made = agency.create(None)
    own = made.mailbox.address
    agency.register(own)
    for change in (agency.register, agency.report, agency.unregister):
        with pytest.raises(SendOnlyError):
            change(made.send_only)
    assert agency.register(own).edition == 1
    agency.unregister(own)
    with pytest.raises(NoSuchAgentError):
        agency.unregister(made.send_only)


@pytest.mark.rule("G1")
def test_a_send_only_address_may_be_registered_itself(agency: Agency) -> None:
    to = agency.create("task").send_only
    agency.register(to)
    assert shown(agency, to) == agency.find(to).card
    agency.report(to)
    # That task has a card of its own tells nobody whose send-only address this is.
    agency.register("task")
    assert agency.register(to).edition == 1
    with agency.reading() as tx:
        assert find_by_send_only(tx, TENANT, to, agency.now) is None
    agency.unregister(to)
    assert agency.find("task") is not None


@pytest.mark.rule("G1")
def test_a_chosen_address_is_hidden_where_the_card_says_so(agency: Agency) -> None:
    to = agency.create("task").send_only
    agency.register("task", card=b'{"mailbox": "task", "name": "task", "send_only": true}')
    assert shown(agency, "task") == f'{{"mailbox": "{to}", "name": "task", "send_only": true}}'.encode()
    with pytest.raises(SendOnlyError):
        agency.register(to)
