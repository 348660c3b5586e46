"""What the registry remembers of use is the same in every store: requests, votes, and what is forgotten (G5–G7)."""

import numpy as np
import pytest

from mediator.errors import BadRequestError, NoSuchAgentError
from mediator.mailboxes.bounds import DAY
from registry import rules
from registry.index.vectors import pack_rows
from registry.records import SIGN, USEFUL, USELESS, ChangeCursor, RecentSearch
from registry.tables import RegistryTables
from tests.harness.agents import FIRST, SPACE, registration
from tests.harness.samples import T0, TENANT
from tests.harness.stores import within

VECTOR = pack_rows(np.ones((1, 4), np.float32) / 2)
ANN, BOB = 5, 6


def query(text="Book a boat", *agents, space=SPACE, tenant=TENANT) -> RecentSearch:
    numbers = np.array([agent.id for agent in agents], np.int64).tobytes()
    return RecentSearch("q", tenant, text, space, VECTOR, numbers)


def add(tx, address="boats", owner=0, tenant=TENANT):
    return tx.agents.add(registration(address, owner=owner, tenant=tenant), 0, T0)


def vote(tx, asked, address="boats", value=USEFUL, voter=ANN, *, owner=None, over=0, now=T0):
    return rules.vote(tx, asked, address, value, voter, owner, over, now)


def kept(tx, space=SPACE, after=FIRST) -> dict[int, bytes]:
    return {change.request_id: change.vector for change in tx.memory.changes(after, space, 100)}


def votes(tx) -> list[tuple[int, int, int]]:
    found = tx.memory.votes(list(kept(tx)))
    return sorted((one.agent_id, one.voter, one.value) for one in found)


@pytest.mark.rule("G5", "G6")
def test_a_voter_has_one_word_on_a_request_and_agent(store):
    with within(store.transaction(), RegistryTables) as tx:
        boats = add(tx)
        first = vote(tx, query("Book a boat", boats))
    with within(store.transaction(), RegistryTables) as tx:
        # Case and white space make no other request.
        second = vote(tx, query(" book A  boat", boats), value=USELESS, now=T0 + 1)
        vote(tx, query("Book a boat", boats), voter=BOB)
    assert first < second
    with within(store.reading(), RegistryTables) as tx:
        assert votes(tx) == [(boats.id, ANN, USELESS), (boats.id, BOB, USEFUL)]
        [(no, vector)] = kept(tx).items()
        assert vector == VECTOR
        assert kept(tx, "another/3/4") == {no: b""}
        assert kept(tx, after=ChangeCursor(second, no)) == {}


@pytest.mark.rule("G5", "G6")
def test_some_words_do_not_count(store):
    with within(store.transaction(), RegistryTables) as tx:
        boats, tide = add(tx, owner=ANN), add(tx, "tide")
        with pytest.raises(NoSuchAgentError):
            vote(tx, query("x", boats), "nobody")
        with pytest.raises(BadRequestError, match="mailbox: expected an agent that this search found"):
            vote(tx, query("x", boats), "tide")
        assert vote(tx, query("x", boats), owner=ANN) is None
        assert vote(tx, query("x", boats), owner=BOB, voter=BOB) is not None
        # A weak sign takes the place of no word, and is taken by one.
        assert vote(tx, query("x", boats), value=SIGN, voter=BOB) is None
        assert vote(tx, query("x", tide), "tide", SIGN) is not None
        vote(tx, query("x", tide), "tide", USELESS)
        assert votes(tx) == [(boats.id, BOB, USEFUL), (tide.id, ANN, USELESS)]


@pytest.mark.rule("G6")
def test_the_last_to_register_owns_the_card(store):
    with within(store.transaction(), RegistryTables) as tx:
        boats = tx.agents.replace(add(tx, owner=ANN), registration("boats", owner=BOB), 0, T0)
        assert boats.owner == BOB
        assert tx.agents.find(TENANT, "boats").owner == BOB


@pytest.mark.rule("G7")
def test_votes_and_requests_are_bounded(store, monkeypatch):
    monkeypatch.setattr(rules, "MAX_VOTES", 3)
    with within(store.transaction(), RegistryTables) as tx:
        boats = add(tx)
        for voter in range(5):
            vote(tx, query("x", boats), voter=voter, now=T0 + voter)
        assert [voter for _, voter, _ in votes(tx)] == [2, 3, 4]
        vote(tx, query("y", boats), now=T0 + 9)
        oldest = min(kept(tx))
        vote(tx, query("z", boats), over=1, now=T0 + 10)
        assert kept(tx)[oldest] == b""
        assert len(votes(tx)) == 2
        # A text that was forgotten may come again.
        vote(tx, query("x", boats), now=T0 + 11)
        assert sum(vector == VECTOR for vector in kept(tx).values()) == 3


@pytest.mark.rule("G7")
def test_one_voter_takes_no_other_ones_place(store, monkeypatch):
    monkeypatch.setattr(rules, "MAX_VOTES", 4)
    with within(store.transaction(), RegistryTables) as tx:
        agents = [add(tx, f"boats{n}") for n in range(8)]
        vote(tx, query("x", *agents), "boats0", voter=BOB)
        for at, agent in enumerate(agents):
            vote(tx, query("x", *agents), agent.address, now=T0 + 1 + at)
        assert votes(tx) == [(agents[0].id, BOB, USEFUL), *((agent.id, ANN, USEFUL) for agent in agents[-3:])]


@pytest.mark.rule("G7")
def test_the_clean_up_forgets_what_is_old_and_of_no_agent(store):
    with within(store.transaction(), RegistryTables) as tx:
        boats, tide = add(tx), add(tx, "tide")
        vote(tx, query("old", boats), now=T0)
        vote(tx, query("both", boats, tide), now=T0 + DAY)
        vote(tx, query("both", boats, tide), "tide", now=T0 + DAY)
        vote(tx, query("boats", boats), now=T0 + DAY)
        tx.agents.remove(boats.id, T0 + DAY)
    with within(store.transaction(), RegistryTables) as tx:
        removed, more = rules.collect_requests(tx, DAY, T0 + DAY + 1, 100)
        assert (removed, more) == (3, False)
        assert votes(tx) == [(tide.id, ANN, USEFUL)]
        assert sum(map(bool, kept(tx).values())) == 1
    with within(store.transaction(), RegistryTables) as tx:
        assert rules.collect_requests(tx, 9 * DAY, T0 + 3 * DAY, 100) == (2, False)
        assert len(kept(tx)) == 1


@pytest.mark.rule("G7")
def test_an_agent_or_a_tenant_is_forgotten_on_demand(store):
    with within(store.transaction(), RegistryTables) as tx:
        boats, tide, theirs = add(tx), add(tx, "tide"), add(tx, tenant="other")
        vote(tx, query("x", boats, tide))
        vote(tx, query("x", boats, tide), "tide")
        vote(tx, query("y", boats))
        vote(tx, query("x", theirs, tenant="other"))
        assert rules.forget_agent(tx, boats.id, T0) == 2
        assert votes(tx) == [(tide.id, ANN, USEFUL), (theirs.id, ANN, USEFUL)]
        assert rules.forget_all(tx, TENANT, 10, T0) == 1
        assert votes(tx) == [(theirs.id, ANN, USEFUL)]
