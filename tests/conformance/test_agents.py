"""What the registry keeps is the same in every store: agents, revisions, removals, vectors."""

from dataclasses import replace

import pytest

from registry import tables
from registry.records import (
    Agent,
    AgentChange,
    CardVectors,
    ChangeCursor,
    LastSeenCursor,
    SilentAgent,
    UnembeddedCard,
    UpdatedTerms,
)
from registry.tables import RegistryTables
from tests.harness.agents import FIRST, SPACE, card, registration
from tests.harness.samples import ALL, T0, TENANT
from tests.harness.stores import undone, within

ODD = "Zoë's 📱 \0 \" ' % ? \\ \n \u2028 \ud800 end"
"""What a card may give as a name: also what PostgreSQL takes in no text, and what is no text at all."""
BYTES = bytes(range(256)) * 1024
"""As long as a card may be."""
START = LastSeenCursor(-1, 0)


def add(tx, address="a", name="", text="", *, ttl=0, now=T0, **more) -> Agent:
    return tx.agents.add(registration(address, name, text, **more), ttl, now)


def embed(tx, *agents, space=SPACE, made=b"v") -> int:
    return tx.vectors.save(space, [CardVectors(agent.id, agent.card_revision, made) for agent in agents])


def change(agent, embedded=0) -> AgentChange:
    return AgentChange(agent.revision, agent.id, agent.tenant, agent.card_revision, agent.ttl, agent.seen_at, embedded)


def removal(no, revision, at=T0, tenant=TENANT) -> AgentChange:
    return AgentChange(revision, no, tenant, 0, 0, at, 0, removed=True)


# Agents.


@pytest.mark.rule("G3")
def test_last_seen_is_of_agents_with_a_ttl(store):
    with within(store.transaction(), RegistryTables) as tx:
        assert tx.agents.last_seen() == 0
        add(tx, "a", ttl=60, now=T0 + 2)
        add(tx, "b", ttl=60, now=T0 + 1)
        add(tx, "c", now=T0 + 3)
        assert tx.agents.last_seen() == T0 + 2


@pytest.mark.rule("G1", "G2")
def test_an_agent_comes_back_as_it_was_kept(store, reopen):
    with within(store.transaction(), RegistryTables) as tx:
        agent = add(tx, "a.b", ODD, card=BYTES, terms=BYTES[::-1], ttl=2**40)
        assert agent == Agent(
            id=agent.id,
            tenant=TENANT,
            address="a.b",
            name=ODD,
            card=BYTES,
            ttl=2**40,
            edition=1,
            registered_at=T0,
            updated_at=T0,
            seen_at=T0,
            status=None,
            revision=1,
            card_revision=1,
        )
        assert tx.agents.find(TENANT, "a.b") == agent
    with within(store.transaction(), RegistryTables) as tx:
        changed = tx.agents.replace(agent, registration("a.b", ODD[::-1], card=b"", terms=b""), 7, T0 + 1)
    assert changed == replace(
        agent,
        name=ODD[::-1],
        card=b"",
        ttl=7,
        edition=2,
        updated_at=T0 + 1,
        seen_at=T0 + 1,
        revision=2,
        card_revision=2,
    )
    with within(store.transaction(), RegistryTables) as tx:
        reported = tx.agents.seen(changed, BYTES, T0 + 2)
    assert reported == replace(changed, status=BYTES, seen_at=T0 + 2, revision=3)
    for _ in range(2):
        for transaction in (store.transaction, store.reading):
            with within(transaction(), RegistryTables) as tx:
                assert tx.agents.find(TENANT, "a.b") == reported
                assert tx.agents.pick([agent.id]) == {agent.id: reported}
                assert tx.agents.terms([agent.id]) == {agent.id: b""}
                assert tx.agents.named(TENANT, ODD[::-1], ALL) == [agent.id]
                assert tx.agents.named(TENANT, ODD, ALL) == []
                assert tx.agents.revision() == 3
        store = reopen()


@pytest.mark.rule("G1")
def test_who_is_not_registered_is_not_found(store):
    with within(store.transaction(), RegistryTables) as tx:
        agent = add(tx, "a", "Weather")
        for tenant, address in ((TENANT, "b"), ("other", "a"), (TENANT, "a.a"), (TENANT, ""), ("", "a")):
            assert tx.agents.find(tenant, address) is None
        for tenant, name in ((TENANT, "weather"), (TENANT, "Weather "), (TENANT, ""), ("other", "Weather")):
            assert tx.agents.named(tenant, name, ALL) == []
        nobody = [agent.id + 1, 0, -1, 2**60]
        assert tx.agents.pick(nobody) == tx.agents.terms(nobody) == tx.vectors.read(SPACE, nobody) == {}
        assert tx.agents.pick([]) == {}
        assert tx.agents.count("other") == 0


@pytest.mark.rule("G1", "A6")
def test_each_tenant_has_agents_of_its_own(store):
    with within(store.transaction(), RegistryTables) as tx:
        here, there = add(tx), add(tx, tenant="other")
        assert here.id != there.id
        assert tx.agents.find(TENANT, "a") == here
        assert tx.agents.find("other", "a") == there
        tx.agents.remove(here.id, T0)
        assert tx.agents.find("other", "a") == there
        assert (tx.agents.count(TENANT), tx.agents.count("other")) == (0, 1)


@pytest.mark.rule("G2")
def test_names_are_compared_whole_however_long(store):
    long = "n" * 200_000
    with within(store.transaction(), RegistryTables) as tx:
        numbers = [add(tx, f"a{number}", long).id for number in range(4)]
        add(tx, "b", long + "n")
        assert tx.agents.named(TENANT, long, ALL) == numbers
        assert tx.agents.named(TENANT, long, 2) == numbers[:2]


def test_many_are_picked_at_once(store):
    with within(store.transaction(), RegistryTables) as tx:
        agents = {agent.id: agent for agent in (add(tx, f"a{number}") for number in range(1200))}
        embed(tx, *agents.values())
    with within(store.reading(), RegistryTables) as tx:
        numbers = [*agents, *agents, 2**40]
        assert list(tx.agents.pick(numbers)) == list(tx.agents.terms(numbers)) == list(agents)
        assert tx.vectors.read(SPACE, numbers).keys() == agents.keys()
        assert tx.vectors.count(SPACE) == len(agents)


@pytest.mark.rule("G1")
def test_an_unchanged_card_is_no_new_edition_but_is_reread(store):
    with within(store.transaction(), RegistryTables) as tx:
        agent = add(tx, name="one", terms=b"one")
    with within(store.transaction(), RegistryTables) as tx:
        again = tx.agents.replace(agent, registration("a", "two", terms=b"two"), 5, T0 + 9)
        assert again == replace(agent, name="two", ttl=5, updated_at=T0 + 9, seen_at=T0 + 9, revision=2)
    with within(store.reading(), RegistryTables) as tx:
        assert tx.agents.find(TENANT, "a") == again
        assert tx.agents.terms([agent.id]) == {agent.id: b"two"}
        assert tx.agents.named(TENANT, "two", ALL) == [agent.id]


@pytest.mark.rule("G1")
def test_a_number_is_never_used_again(opened):
    with within(opened.store.transaction(), RegistryTables) as tx:
        last = [add(tx, f"a{number}") for number in range(3)][-1]
    with within(opened.store.transaction(), RegistryTables) as tx:
        tx.agents.remove(last.id, T0)
    store = opened.reopen()
    with within(store.transaction(), RegistryTables) as tx:
        tx.agents.forget_removed(T0 + 1, ALL)
    with within(store.transaction(), RegistryTables) as tx:
        assert add(tx, last.address).id > last.id


def test_how_many_there_are_follows_what_happens_here(store):
    with within(store.transaction(), RegistryTables) as tx:
        assert tx.agents.count(TENANT) == 0
        first = add(tx)
        add(tx, tenant="other")
        assert tx.agents.count(TENANT) == 1
    with undone(store, RegistryTables) as tx:
        add(tx, "b")
        assert tx.agents.count(TENANT) == 2
    with within(store.transaction(), RegistryTables) as tx:
        assert tx.agents.count(TENANT) == 1
        add(tx, "b")
    with undone(store, RegistryTables) as tx:
        tx.agents.remove(first.id, T0)
        assert tx.agents.count(TENANT) == 1
    with within(store.transaction(), RegistryTables) as tx:
        tx.agents.remove(first.id, T0)
        tx.agents.remove(first.id, T0)
        assert tx.agents.count(TENANT) == 1
    with within(store.reading(), RegistryTables) as tx:
        assert (tx.agents.count(TENANT), tx.agents.count("other")) == (1, 1)


# Revisions, and who follows them.


@pytest.mark.rule("G1", "G2")
def test_what_one_transaction_changes_has_one_revision(store):
    with within(store.transaction(), RegistryTables) as tx:
        assert tx.agents.revision() == 0
        a, b, c = (add(tx, name) for name in "abc")
        assert tx.agents.revision() == 1
    with within(store.transaction(), RegistryTables) as tx:
        a = tx.agents.seen(a, b"", T0 + 1)
        tx.agents.remove(c.id, T0 + 1)
        assert embed(tx, a) == 1
        assert tx.agents.revision() == 2
    with within(store.reading(), RegistryTables) as tx:
        assert tx.agents.revision() == 2
        assert tx.agents.changes(FIRST, SPACE, ALL) == [change(b), change(a, 1), removal(c.id, 2, T0 + 1)]


@pytest.mark.rule("G1")
def test_what_changes_nothing_takes_no_revision(store):
    with within(store.transaction(), RegistryTables) as tx:
        agent = add(tx)
    with within(store.transaction(), RegistryTables) as tx:
        tx.agents.find(TENANT, "a")
        tx.agents.named(TENANT, "a", 1)
        tx.agents.unseen(T0, START, 1)
        tx.agents.remove(agent.id + 1, T0)
        tx.agents.set_terms([UpdatedTerms(agent.id, agent.card_revision, b"new")])
        tx.agents.set_terms([])
        assert embed(tx, replace(agent, card_revision=2), replace(agent, id=agent.id + 1)) == 0
        assert tx.vectors.save(SPACE, []) == 0
        tx.vectors.drop(SPACE, 1)
        tx.agents.forget_removed(T0, 1)
    with within(store.reading(), RegistryTables) as tx:
        assert tx.agents.revision() == 1
        assert tx.agents.find(TENANT, "a") == agent


@pytest.mark.rule("A8")
def test_what_was_taken_back_is_not_there(store):
    with within(store.transaction(), RegistryTables) as tx:
        agent = add(tx, name="one")
        embed(tx, agent)
    with undone(store, RegistryTables) as tx:
        add(tx, "b")
        tx.agents.replace(agent, registration("a", "two", "other"), 5, T0 + 1)
        embed(tx, replace(agent, card_revision=2), made=b"w")
        tx.agents.remove(agent.id, T0)
        assert tx.agents.revision() == 2
    with within(store.reading(), RegistryTables) as tx:
        assert tx.agents.revision() == 1
        assert tx.agents.find(TENANT, "a") == agent
        assert tx.agents.find(TENANT, "b") is None
        assert tx.agents.terms([agent.id]) == {agent.id: b"terms of "}
        assert tx.vectors.read(SPACE, [agent.id]) == {agent.id: CardVectors(agent.id, 1, b"v")}
        assert tx.agents.changes(FIRST, SPACE, ALL) == [change(agent, 1)]


def test_changes_are_read_in_pages_also_within_one_revision(store):
    with within(store.transaction(), RegistryTables) as tx:
        agents = [add(tx, f"a{number}") for number in range(5)]
    with within(store.transaction(), RegistryTables) as tx:
        for number in (4, 2):
            tx.agents.remove(agents[number].id, T0)
        tx.agents.seen(agents[1], b"", T0)
        late = add(tx, "late")
    expected = [
        (1, agents[0].id, False),
        (1, agents[3].id, False),
        (2, agents[1].id, False),
        (2, agents[2].id, True),
        (2, agents[4].id, True),
        (2, late.id, False),
    ]
    for limit in range(1, 8):
        found, place = [], FIRST
        with within(store.reading(), RegistryTables) as tx:
            while page := tx.agents.changes(place, SPACE, limit):
                assert len(page) <= limit
                found += [(one.revision, one.agent_id, one.removed) for one in page]
                place = ChangeCursor(page[-1].revision, page[-1].agent_id)
        assert found == expected


@pytest.mark.rule("G1")
def test_who_was_removed_and_comes_back_is_another(store):
    with within(store.transaction(), RegistryTables) as tx:
        first = add(tx)
    with within(store.transaction(), RegistryTables) as tx:
        tx.agents.remove(first.id, T0 + 1)
        second = add(tx, now=T0 + 1)
    with within(store.reading(), RegistryTables) as tx:
        assert tx.agents.changes(FIRST, SPACE, ALL) == [removal(first.id, 2, T0 + 1), change(second)]


def test_removals_are_forgotten_the_oldest_first(store):
    with within(store.transaction(), RegistryTables) as tx:
        for number in range(4):
            agent = add(tx, f"a{number}")
            tx.agents.remove(agent.id, T0 + number)
    with within(store.transaction(), RegistryTables) as tx:
        assert tx.agents.forget_removed(T0, ALL) == 0
        assert tx.agents.forget_removed(T0 + 3, 2) == 2
        assert [one.seen_at for one in tx.agents.changes(FIRST, SPACE, ALL)] == [T0 + 2, T0 + 3]
        assert tx.agents.forget_removed(T0 + 3, 2) == 1
        assert tx.agents.forget_removed(T0 + 3, 2) == 0


@pytest.mark.rule("G3")
def test_the_silent_are_found_by_when_they_were_last_seen(store):
    with within(store.transaction(), RegistryTables) as tx:
        late, early, twin = (add(tx, name, ttl=5, now=at) for name, at in (("a", T0 + 9), ("b", T0), ("c", T0)))
        add(tx, "never", ttl=0)
    expected = [SilentAgent(one.id, TENANT, one.address, 5, one.seen_at) for one in (early, twin, late)]
    for transaction in (store.reading, store.transaction):
        with within(transaction(), RegistryTables) as tx:
            assert tx.agents.unseen(T0 + 9, START, ALL) == expected
            assert tx.agents.unseen(T0 + 8, START, ALL) == expected[:2]
            assert tx.agents.unseen(T0 + 9, LastSeenCursor(T0, early.id), 1) == expected[1:2]
            assert tx.agents.unseen(T0 + 9, LastSeenCursor(T0 + 9, late.id), ALL) == []
            assert tx.agents.unseen(T0 - 1, START, ALL) == []


# Terms and vectors.


def test_terms_are_kept_for_the_card_they_were_read_from(store):
    with within(store.transaction(), RegistryTables) as tx:
        a, b, c = (add(tx, name) for name in "abc")
    with within(store.transaction(), RegistryTables) as tx:
        tx.agents.replace(b, registration("b", text="new"), 0, T0)
        tx.agents.seen(c, b"", T0)
    with within(store.transaction(), RegistryTables) as tx:
        tx.agents.set_terms(
            [UpdatedTerms(one.id, one.card_revision, ODD.encode("utf-8", "replace")) for one in (a, b, c)]
        )
    with within(store.reading(), RegistryTables) as tx:
        anew = ODD.encode("utf-8", "replace")
        assert tx.agents.terms([c.id, b.id, a.id]) == {a.id: anew, b.id: b"terms of new", c.id: anew}
        assert tx.agents.revision() == 2


def test_vectors_are_kept_by_space_for_cards_as_they_are(store):
    with within(store.transaction(), RegistryTables) as tx:
        a, b = add(tx, "a"), add(tx, "b")
    with within(store.transaction(), RegistryTables) as tx:
        changed = tx.agents.replace(b, registration("b", text="new"), 0, T0)
    with within(store.transaction(), RegistryTables) as tx:
        assert embed(tx, a, b, replace(a, id=99), made=BYTES) == 1
        assert embed(tx, a, changed, space="other") == 2
    with within(store.reading(), RegistryTables) as tx:
        assert tx.vectors.read(SPACE, [a.id, b.id]) == {a.id: CardVectors(a.id, 1, BYTES)}
        assert tx.vectors.read("other", [b.id]) == {b.id: CardVectors(b.id, 2, b"v")}
        assert tx.vectors.read("", [a.id]) == {}
        assert (tx.vectors.count(SPACE), tx.vectors.count("other"), tx.vectors.count("")) == (1, 2, 0)
        assert tx.vectors.spaces() == sorted([SPACE, "other"])
        assert [one.embedded for one in tx.agents.changes(FIRST, SPACE, ALL)] == [1, 0]
        assert [one.embedded for one in tx.agents.changes(FIRST, "other", ALL)] == [1, 2]
        assert {one.revision for one in tx.agents.changes(FIRST, "", ALL)} == {3}


def test_vectors_of_a_former_card_are_told_apart(store):
    with within(store.transaction(), RegistryTables) as tx:
        agent = add(tx)
        embed(tx, agent)
    with within(store.transaction(), RegistryTables) as tx:
        agent = tx.agents.replace(agent, registration("a", text="new"), 0, T0)
        assert tx.vectors.read(SPACE, [agent.id]) == {agent.id: CardVectors(agent.id, 1, b"v")}
        assert tx.agents.changes(FIRST, SPACE, ALL) == [change(agent, 1)]
        assert tx.vectors.count(SPACE) == 1
        missing = [UnembeddedCard(agent.id, 2, card("a", "new"))]
        assert tx.vectors.missing(SPACE, 0, ALL, T0 + 1) == (missing, None)
    with within(store.transaction(), RegistryTables) as tx:
        assert embed(tx, agent, made=b"new") == 1
        assert tx.vectors.read(SPACE, [agent.id]) == {agent.id: CardVectors(agent.id, 2, b"new")}
        assert tx.vectors.missing(SPACE, 0, ALL, T0 + 1) == ([], None)


def test_missing_vectors_are_found_by_number_and_time(store):
    with within(store.transaction(), RegistryTables) as tx:
        agents = [add(tx, f"a{number}", now=T0 + number) for number in range(5)]
        embed(tx, agents[1])
        embed(tx, agents[2], space="other")

        def missing(after=0, limit=ALL, before=T0 + 5):
            return [one.agent_id - agents[0].id for one in tx.vectors.missing(SPACE, after, limit, before)[0]]

        assert missing() == [0, 2, 3, 4]
        assert missing(limit=2) == [0, 2]
        assert tx.vectors.missing(SPACE, 0, 2, T0 + 5)[1] == agents[2].id
        assert missing(after=agents[2].id) == [3, 4]
        assert missing(before=T0 + 3) == [0, 2]
        tx.agents.replace(agents[0], registration("a0"), 0, T0 + 9)
        assert missing() == [2, 3, 4]


@pytest.mark.parametrize("looked_at", [1, 2, 5, 100])
def test_what_lacks_vectors_is_found_look_by_look(store, monkeypatch, looked_at):
    monkeypatch.setattr(tables, "MAX_SCANNED", looked_at)
    with within(store.transaction(), RegistryTables) as tx:
        agents = [add(tx, f"a{number}") for number in range(20)]
        embed(tx, *agents[7:12])
        for agent in agents[3:6]:
            tx.agents.remove(agent.id, T0)
    found, after = [], 0
    with within(store.reading(), RegistryTables) as tx:
        while after is not None:
            some, after = tx.vectors.missing(SPACE, after, 2, T0 + 1)
            found += [one.agent_id - agents[0].id for one in some]
    assert found == [0, 1, 2, 6, *range(12, 20)]


def test_vectors_go_with_their_agent_and_with_their_space(store):
    with within(store.transaction(), RegistryTables) as tx:
        agents = [add(tx, f"a{number}") for number in range(3)]
        for space in (SPACE, "other"):
            embed(tx, *agents, space=space)
    with within(store.transaction(), RegistryTables) as tx:
        tx.agents.remove(agents[0].id, T0)
        assert tx.vectors.read(SPACE, [agents[0].id]) == tx.vectors.read("other", [agents[0].id]) == {}
        assert tx.vectors.drop(SPACE, 1) == 1
        assert tx.vectors.drop(SPACE, 5) == 1
        assert tx.vectors.drop(SPACE, 5) == 0
        assert tx.vectors.spaces() == ["other"]
        assert tx.vectors.count("other") == 2
