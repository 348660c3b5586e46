"""REGISTER, UNREGISTER and REPORT, as the domain does them (G1, G2)."""

import pytest

from mediator.agents.records import Liveness, State
from mediator.agents.registering import MAX_MATCHES
from mediator.errors import BadRequestError, NoSuchAgentError, QuotaExceededError
from mediator.store.memory import MemoryStore
from tests.unit.agents import Agency, card, registration
from tests.unit.broker import DAY, SECOND, START, TENANT

OTHER = "other"


@pytest.fixture
def agency() -> Agency:
    return Agency(MemoryStore())


# REGISTER.


@pytest.mark.rule("G1")
def test_a_card_is_kept_byte_for_byte(agency: Agency) -> None:
    agent, created = agency.put(registration("a", "Weather", "rain"))
    assert created
    assert (agent.card, agent.name, agent.edition, agent.status) == (card("a", "rain"), "Weather", 1, None)
    assert agent.registered_at == agent.updated_at == agent.seen_at == START
    assert agency.find("a") == agent


@pytest.mark.rule("G1")
def test_its_mailbox_need_not_exist(agency: Agency) -> None:
    assert agency.mailbox("a") is None
    agency.register("a")
    assert agency.mailbox("a") is None


@pytest.mark.rule("G1")
def test_another_card_is_a_new_edition_in_its_place(agency: Agency) -> None:
    first = agency.register("a", "one", "rain")
    agency.report("a", status=b"busy")
    agency.advance(SECOND)
    second, created = agency.put(registration("a", "two", "snow", ttl=5 * SECOND))
    assert not created
    assert (second.no, second.registered_at, second.edition) == (first.no, START, 2)
    assert (second.name, second.card, second.ttl) == ("two", card("a", "snow"), 5 * SECOND)
    assert second.updated_at == second.seen_at == START + SECOND
    # What it last said of itself is still that.
    assert second.status == b"busy"
    assert second.card_revision == second.revision > first.card_revision
    assert agency.find("a") == second
    with pytest.raises(NoSuchAgentError):
        agency.report(name="one")


@pytest.mark.rule("G1")
def test_the_same_bytes_again_are_a_sign_of_life_and_no_new_edition(agency: Agency) -> None:
    first = agency.register("a", ttl=SECOND)
    agency.advance(SECOND)
    assert agency.state("a") is State.STALE
    again = agency.register("a", ttl=SECOND)
    assert (again.edition, again.card_revision, again.registered_at) == (1, first.card_revision, START)
    assert again.updated_at == again.seen_at == agency.now
    assert again.revision > first.revision
    assert agency.state("a") is State.ALIVE


@pytest.mark.rule("G1")
def test_cards_that_say_the_same_in_other_bytes_are_two_editions(agency: Agency) -> None:
    agency.register("a")
    assert agency.register("a", card=card("a") + b" ").edition == 2


@pytest.mark.rule("G3")
def test_who_names_no_ttl_gets_the_default() -> None:
    agency = Agency(MemoryStore(), Liveness(default_ttl=7 * SECOND))
    assert agency.register("a").ttl == 7 * SECOND
    assert agency.register("b", ttl=0).ttl == 0
    assert agency.register("b").ttl == 7 * SECOND


@pytest.mark.rule("G1")
def test_a_tenant_has_no_more_agents_than_it_may() -> None:
    agency = Agency(MemoryStore(), limit=2)
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
def test_many_are_kept_with_their_vectors_as_if_each_had_registered(agency: Agency) -> None:
    former = agency.register("a", "one", "rain", ttl=SECOND)
    lacking = agency.register("b", "two", "snow")
    agency.advance(SECOND)
    taken = agency.take(
        (registration("a", "one", "hail"), b"A"),
        (registration("b", "two", "snow"), b"B"),
        (registration("c", "three", "fog", ttl=5 * SECOND), b"C"),
    )
    assert taken == (1, 1, 1, 0, agency.revision())
    a, b, c = (agency.find(address) for address in "abc")
    assert a is not None
    assert b is not None
    assert c is not None
    assert (a.no, a.edition, a.card, a.ttl) == (former.no, 2, card("a", "hail"), 0)
    assert (b.edition, b.updated_at, b.seen_at) == (1, lacking.updated_at, lacking.seen_at)
    assert (c.edition, c.ttl, c.seen_at) == (1, 5 * SECOND, agency.now)
    assert [one.vectors for one in agency.vectors(a, b, c).values()] == [b"A", b"B", b"C"]
    assert agency.missing() == []


@pytest.mark.rule("G1")
def test_the_same_once_more_changes_nothing(agency: Agency) -> None:
    many = [(registration(address, ttl=SECOND), b"V") for address in "abc"]
    agency.take(*many)
    before, revision = [agency.find(address) for address in "abc"], agency.revision()
    agency.advance(SECOND)
    assert agency.take(*many) == (0, 0, 0, 3, revision)
    assert [agency.find(address) for address in "abc"] == before
    assert agency.revision() == revision


@pytest.mark.rule("G1")
def test_of_several_cards_for_one_mailbox_the_last_counts(agency: Agency) -> None:
    taken = agency.take((registration("a", text="rain"), b"R"), (registration("a", text="snow"), b"S"))
    assert (taken.added, taken.replaced) == (1, 0)
    agent = agency.find("a")
    assert agent is not None
    assert (agent.card, agent.edition, agency.vectors(agent)[agent.no].vectors) == (card("a", "snow"), 1, b"S")


@pytest.mark.rule("G1")
def test_many_that_are_one_too_many_are_refused_as_a_whole(agency: Agency) -> None:
    agency.limit = 3
    agency.register("a", "one", "rain")
    agency.register("b")
    with pytest.raises(QuotaExceededError):
        agency.take((registration("a", "one", "snow"), b"A"), (registration("c"), b"C"), (registration("d"), b"D"))
    assert agency.find("a").card == card("a", "rain")  # type: ignore[union-attr]
    assert agency.find("c") is None
    assert agency.take((registration("a", "one", "snow"), b"A"), (registration("c"), b"C"))[:2] == (1, 1)


# UNREGISTER and REPORT.


@pytest.mark.rule("G2")
def test_unregister_forgets_and_returns_the_agent(agency: Agency) -> None:
    agent = agency.register("a", "Weather")
    gone = agency.unregister("a")
    assert (gone.no, gone.card) == (agent.no, agent.card)
    # Whoever follows knows of it from this revision on.
    assert gone.revision == agency.revision() == agent.revision + 1
    assert agency.find("a") is None
    for name in (None, "Weather"):
        with pytest.raises(NoSuchAgentError):
            agency.unregister(None if name else "a", name)


@pytest.mark.rule("G1", "G2")
def test_who_registers_after_that_is_somebody_new(agency: Agency) -> None:
    before = agency.register("a")
    agency.report("a")
    agency.unregister("a")
    agency.advance(SECOND)
    agent, created = agency.put(registration("a"))
    assert created
    assert agent.no > before.no
    assert (agent.edition, agent.registered_at, agent.status) == (1, agency.now, None)


@pytest.mark.rule("G2")
def test_report_keeps_the_last_status_and_moves_last_seen(agency: Agency) -> None:
    agent = agency.register("a", ttl=SECOND)
    for status in (b'{"load": 1}', b'{"load" : 2 }', b""):
        agency.advance(SECOND)
        reported = agency.report("a", status=status)
        assert (reported.status, reported.seen_at, reported.updated_at) == (status, agency.now, START)
        assert (reported.edition, reported.card_revision) == (1, agent.card_revision)
        assert agency.find("a") == reported


@pytest.mark.rule("G2", "G3")
def test_who_counts_as_gone_is_back_with_a_report(agency: Agency) -> None:
    agent = agency.register("a", ttl=SECOND)
    agency.advance(DAY)
    assert agency.state("a") is State.GONE
    assert agency.report("a").no == agent.no
    assert agency.state("a") is State.ALIVE


@pytest.mark.rule("G2")
@pytest.mark.parametrize("verb", ["unregister", "report"])
def test_by_name_where_exactly_one_matches(agency: Agency, verb: str) -> None:
    agency.register("a", "Weather")
    agency.register("b", "weather")
    agency.register("c", "Weather ")
    agency.register("a", "Weather", tenant=OTHER)
    assert getattr(agency, verb)(name="Weather").address == "a"
    untouched = agency.find("a", OTHER)
    assert untouched is not None
    assert untouched.status is None


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


@pytest.mark.rule("G2")
@pytest.mark.parametrize("verb", ["unregister", "report"])
def test_an_agent_that_is_not_there_is_named(agency: Agency, verb: str) -> None:
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
