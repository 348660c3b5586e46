"""Agents that have been gone for long: which of them the clean-up removes, and which not (G3)."""

import pytest

from mediator.mailboxes.address import redact
from mediator.store.base import Store
from registry import rules
from registry.records import Liveness
from tests.harness.agents import Agency
from tests.harness.broker import DAY, SECOND, TENANT

LIVENESS = Liveness(grace=60 * SECOND, keep=DAY)
TTL = 30 * SECOND
SPAN = TTL + LIVENESS.grace + LIVENESS.keep


@pytest.fixture
def agency(store: Store) -> Agency:
    return Agency(store, LIVENESS)


@pytest.mark.rule("G3")
def test_agents_gone_for_long_are_removed_with_a_change(agency: Agency) -> None:
    agent = agency.register("a", ttl=TTL)
    agency.register("b")
    agency.advance(SPAN - 1)
    assert agency.collect_agents() == 0
    agency.advance(1)
    assert agency.collect_agents() == 1
    assert agency.find("a") is None
    assert agency.find("b") is not None
    assert [(one.agent_id, one.removed) for one in agency.changes()] == [(agent.id + 1, False), (agent.id, True)]
    assert agency.collect_agents() == 0


@pytest.mark.rule("G2", "G3")
@pytest.mark.parametrize("sign", ["report", "register"])
def test_a_sign_of_life_in_the_last_moment_counts(agency: Agency, sign: str) -> None:
    agency.register("a", ttl=TTL)
    agency.advance(SPAN)
    agency.report("a") if sign == "report" else agency.register("a", ttl=TTL)
    assert agency.collect_agents() == 0
    agency.advance(SPAN - 1)
    assert agency.collect_agents() == 0
    agency.advance(1)
    assert agency.collect_agents() == 1


@pytest.mark.rule("G3")
def test_rare_reporters_do_not_delay_the_removal_of_others(agency: Agency) -> None:
    for number in range(5):
        agency.register(f"seldom{number}", ttl=10 * DAY)
    agency.advance(1)
    for number in range(5):
        agency.register(f"often{number}", ttl=TTL)
    agency.advance(SPAN)
    assert agency.collect_agents(limit=2) == 5
    assert [agency.find(f"often{number}") for number in range(5)] == [None] * 5
    agency.advance(20 * DAY - SPAN + LIVENESS.keep - 2)
    assert agency.collect_agents(limit=2) == 0
    agency.advance(1)
    assert agency.collect_agents(limit=2) == 5


@pytest.mark.rule("G3")
def test_keep_0_removes_no_agent(store: Store) -> None:
    agency = Agency(store, Liveness(keep=0))
    agency.register("a", ttl=TTL)
    agency.advance(10_000 * DAY)
    assert agency.collect_agents() == 0
    with agency.reading() as tx:
        assert rules.plan_collecting(tx, agency.liveness, agency.now, 5) == []


@pytest.mark.rule("A7", "G3")
def test_a_dry_run_names_some_and_shows_no_address(agency: Agency) -> None:
    agents = [agency.register(f"gone{number}", ttl=TTL) for number in range(3)]
    agency.register("seldom", ttl=10 * DAY)
    agency.advance(SPAN)
    agency.register("new", ttl=TTL)
    with agency.reading() as tx:
        (finding,) = rules.plan_collecting(tx, LIVENESS, agency.now, 2)
    assert (finding.what, finding.why, finding.count, finding.more) == ("agents", rules.SILENT, 3, False)
    assert [(one.tenant, one.address, one.number, one.expired_at) for one in finding.examples] == [
        (TENANT, redact(agent.address), agent.id, agency.now) for agent in agents[:2]
    ]
    assert agency.collect_agents() == 3
    with agency.reading() as tx:
        assert rules.plan_collecting(tx, LIVENESS, agency.now, 2) == []
