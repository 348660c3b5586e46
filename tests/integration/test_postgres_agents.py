"""The registry on several instances that share one PostgreSQL: revisions in the order of commits, nothing skipped."""

import contextlib
import random
import threading

import pytest

from mediator.errors import NoSuchAgentError
from registry import rules
from registry.records import CardVectors, ChangeCursor, Liveness
from registry.tables import RegistryTables
from tests.harness.agents import ALL, FIRST, SPACE, registration
from tests.harness.stores import within
from tests.integration.test_postgres_mediation import wait_for_a_lock
from tests.integration.test_postgres_store import DEADLINE, NOW, TENANT, instances, open_store, store, together, url

__all__ = ["instances", "open_store", "store", "url"]

pytestmark = pytest.mark.postgres

LIVENESS = Liveness()
TURNS = 60
ADDRESSES = [f"a{number}" for number in range(6)]


def register(tx, address, text="", now=NOW, **more):
    return rules.register(tx, LIVENESS, 0, registration(address, text=text, **more), now)[0]


def revision(store) -> int:
    with within(store.reading(), RegistryTables) as tx:
        return tx.agents.revision()


def change(tx, chance) -> int | None:
    """Do something to an agent and return the revision of that, None when there was nothing to do."""
    address, verb = chance.choice(ADDRESSES), chance.choice(["register", "register", "report", "unregister", "embed"])
    if verb == "register":
        return register(tx, address, str(chance.random())).revision
    try:
        if verb == "report":
            return rules.report(tx, TENANT, address, None, b"", NOW).revision
        if verb == "unregister":
            return rules.unregister(tx, TENANT, address, None, NOW).revision
    except NoSuchAgentError:
        return None
    agent = tx.agents.find(TENANT, address)
    embedded = [] if agent is None else [CardVectors(agent.id, agent.card_revision, b"v")]
    return tx.agents.revision() if tx.vectors.save(SPACE, embedded) else None


class Undone(Exception):
    """Ends a transaction that is to leave nothing."""


@pytest.mark.rule("G1", "G2", "A8")
def test_who_follows_skips_nothing_of_what_all_instances_do(store, instances):
    taken: list[int] = []
    done = threading.Event()

    def work(number: int) -> None:
        own, chance = instances[number], random.Random(number)
        for turn in range(TURNS):
            before = revision(own)
            with contextlib.suppress(Undone), within(own.transaction(), RegistryTables) as tx:
                made = {change(tx, chance) for _ in range(chance.randint(1, 3))} - {None}
                if turn % 5 == 0:
                    raise Undone
            if turn % 5:
                assert len(made) <= 1
                # Whoever began after a commit comes after it.
                assert all(one > before for one in made)
                taken.extend(made)

    def workers() -> None:
        together(*(lambda number=number: work(number) for number in range(len(instances))))
        done.set()

    def follow() -> None:
        place, known = FIRST, {}
        over = False
        while not over:
            # Asked before the look: so the last one sees all.
            over = done.is_set()
            with within(store.reading(), RegistryTables) as tx:
                while page := tx.agents.changes(place, SPACE, 3):
                    for one in page:
                        assert place < (one.revision, one.agent_id)
                        place = ChangeCursor(one.revision, one.agent_id)
                        known[one.agent_id] = one
                assert sorted(known.values(), key=lambda one: (one.revision, one.agent_id)) == tx.agents.changes(
                    FIRST, SPACE, ALL
                )

    together(workers, follow)
    # Every number was given once, and none was lost with what was taken back.
    assert sorted(taken) == list(range(1, len(taken) + 1))


@pytest.mark.rule("G1")
def test_one_mailbox_registered_everywhere_at_once_is_one_agent(store, instances):
    for turn in range(20):
        agents = []

        def one(number, turn=turn, agents=agents):
            with within(instances[number].transaction(), RegistryTables) as tx:
                agents.append(register(tx, f"b{turn}", str(number)))

        together(*(lambda number=number: one(number) for number in range(len(instances))))
        assert len({agent.id for agent in agents}) == 1
        assert sorted(agent.edition for agent in agents) == list(range(1, len(instances) + 1))
        with within(store.reading(), RegistryTables) as tx:
            assert tx.agents.find(TENANT, f"b{turn}") == max(agents, key=lambda agent: agent.edition)


@pytest.mark.rule("G2", "G3")
def test_a_late_report_keeps_the_agent(url, store, instances):
    with within(store.transaction(), RegistryTables) as tx:
        agent = register(tx, "a", ttl=1)
    late = NOW + 10**12
    removed = []

    def collect() -> None:
        with within(instances[0].transaction(), RegistryTables) as tx:
            removed.append(rules.collect_agents(tx, LIVENESS, rules.FIRST_SEEN, late, ALL)[0].agents)

    with within(store.transaction(), RegistryTables) as tx:
        rules.report(tx, TENANT, "a", None, b"", late)
        collector = threading.Thread(target=collect, daemon=True)
        collector.start()
        wait_for_a_lock(url)
    collector.join(DEADLINE)
    assert removed == [0]
    with within(store.reading(), RegistryTables) as tx:
        assert tx.agents.find(TENANT, "a").id == agent.id


@pytest.mark.rule("G1", "A8")
@pytest.mark.parametrize("kept", [True, False])
def test_a_later_revision_waits_for_the_earlier_transaction(url, store, instances, kept):
    later = []

    def second() -> None:
        with within(instances[0].transaction(), RegistryTables) as tx:
            later.append(register(tx, "b").revision)

    with contextlib.suppress(Undone), within(store.transaction(), RegistryTables) as tx:
        assert register(tx, "a").revision == 1
        other = threading.Thread(target=second, daemon=True)
        other.start()
        wait_for_a_lock(url)
        with within(instances[1].reading(), RegistryTables) as seen:
            assert seen.agents.revision() == 0
            assert seen.agents.changes(FIRST, SPACE, ALL) == []
        if not kept:
            raise Undone
    other.join(DEADLINE)
    assert later == [2 if kept else 1]
    assert revision(store) == later[0]
