"""REGISTER, UNREGISTER and REPORT: what the model in test_agents_model leaves out, and what errors say (G1, G2)."""

import pytest

from mediator.errors import BadRequestError, NoSuchAgentError, QuotaExceededError
from mediator.store.base import Store
from registry.records import Liveness, State
from registry.rules import MAX_MATCHES
from tests.harness.agents import Agency, card, registration
from tests.harness.broker import DAY, SECOND, TENANT

OTHER = "other"


@pytest.fixture
def agency(store: Store) -> Agency:
    return Agency(store)


# REGISTER.


@pytest.mark.rule("G1")
def test_its_mailbox_need_not_exist(agency: Agency) -> None:
    assert agency.mailbox("a") is None
    agency.register("a")
    assert agency.mailbox("a") is None


@pytest.mark.rule("G1")
def test_the_same_card_in_other_bytes_is_a_new_edition(agency: Agency) -> None:
    agency.register("a")
    assert agency.register("a", card=card("a") + b" ").edition == 2


@pytest.mark.rule("G3")
def test_a_card_without_ttl_gets_the_default(store: Store) -> None:
    agency = Agency(store, Liveness(default_ttl=7 * SECOND))
    assert agency.register("a").ttl == 7 * SECOND
    assert agency.register("b", ttl=0).ttl == 0
    assert agency.register("b").ttl == 7 * SECOND


@pytest.mark.rule("G1")
def test_a_tenant_has_no_more_agents_than_it_may(store: Store) -> None:
    agency = Agency(store, limit=2)
    agency.register("a")
    agency.register("b")
    with pytest.raises(QuotaExceededError, match=r"^quota_exceeded: agents of the tenant, limit 2, in use 2$"):
        agency.register("c")
    assert agency.find("c") is None
    assert agency.revision() == 2
    # Who is there may come again, and other tenants have room of their own.
    assert agency.register("a", text="new").edition == 2
    agency.register("a", tenant=OTHER)
    agency.unregister("b")
    agency.register("c")


# Many at once, with vectors that were made elsewhere.


@pytest.mark.rule("G1")
def test_bulk_registration_again_adds_only_missing_vectors(agency: Agency) -> None:
    many = [(registration(address, ttl=SECOND), b"V") for address in "abc"]
    agency.take(*many)
    before, revision = [agency.find(address) for address in "abc"], agency.revision()
    agency.advance(SECOND)
    assert agency.take(*many) == (0, 0, 0, 3, revision)
    assert [agency.find(address) for address in "abc"] == before
    assert agency.revision() == revision
    # Its vectors are those of the former card.
    agency.register("a", text="rain")
    assert agency.take((registration("a", text="rain"), b"R")) == (0, 0, 1, 0, revision + 2)
    assert agency.missing() == []


# UNREGISTER and REPORT.


@pytest.mark.rule("G2", "G3")
def test_a_report_brings_a_gone_agent_back(agency: Agency) -> None:
    agent = agency.register("a", ttl=SECOND)
    agency.advance(DAY)
    assert agency.state("a") is State.GONE
    assert agency.report("a").id == agent.id
    assert agency.state("a") is State.ALIVE


@pytest.mark.rule("G2")
@pytest.mark.parametrize("verb", ["unregister", "report"])
@pytest.mark.parametrize("count", [2, 3, MAX_MATCHES, MAX_MATCHES + 1, MAX_MATCHES + 50])
def test_by_name_where_several_match(agency: Agency, verb: str, count: int) -> None:
    for number in range(count):
        agency.register(f"a{number}", "Weather")
    said = str(count) if count <= MAX_MATCHES else f"more than {MAX_MATCHES}"
    before = agency.changes()
    with pytest.raises(BadRequestError, match=f"^name: {said} agents match; give mailbox$") as refused:
        getattr(agency, verb)(name="Weather")
    assert refused.value.field == "name"
    assert agency.changes() == before
    # The mailbox decides, whatever the name says.
    assert getattr(agency, verb)("a1", "Weather").address == "a1"


@pytest.mark.rule("G1", "G2")
@pytest.mark.parametrize("verb", ["unregister", "report"])
def test_a_name_that_identifies_an_agent_goes_first(agency: Agency, verb: str) -> None:
    for address in ("a", "b", "name:Weather"):
        agency.register(address, "Weather")
    assert getattr(agency, verb)(name="Weather").address == "name:Weather"


@pytest.mark.rule("G2")
@pytest.mark.parametrize("verb", ["unregister", "report"])
def test_an_unknown_agent_is_named(agency: Agency, verb: str) -> None:
    agency.register("a", "Weather", tenant=OTHER)
    with pytest.raises(NoSuchAgentError, match=r"^agent a is not registered$"):
        getattr(agency, verb)("a")
    with pytest.raises(NoSuchAgentError, match=r"^agent Weather is not registered$"):
        getattr(agency, verb)(name="Weather")
    with pytest.raises(NoSuchAgentError) as refused:
        getattr(agency, verb)(name="x" * 100_000)
    assert len(str(refused.value)) < 300
    assert agency.revision() == 1


@pytest.mark.rule("G2", "N3")
@pytest.mark.parametrize(("address", "name"), [(None, None), ("", ""), (None, "")])
def test_one_of_both_must_be_given(agency: Agency, address: str | None, name: str | None) -> None:
    agency.register("a")
    with pytest.raises(BadRequestError, match=r"^mailbox: "):
        agency.unregister(address, name)
    assert agency.find("a", TENANT) is not None
