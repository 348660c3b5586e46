"""The registry against a model: random verbs in random order, in two tenants, and somebody who follows (G1–G3).

The model is a dictionary of agents and one of removals. It knows the revision of every change, so whoever follows page
by page, with changes between the pages, must come to hold exactly what is there.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mediator.errors import BadRequestError, NoSuchAgentError, QuotaExceededError
from mediator.store.base import Store
from registry import rules
from registry.records import (
    Agent,
    AgentChange,
    CardVectors,
    ChangeCursor,
    Liveness,
    Registration,
    UnembeddedCard,
    UpdatedTerms,
)
from registry.tables import RegistryTables
from tests.harness.agents import ALL, FIRST, Agency, registration
from tests.harness.broker import DAY, SECOND, TENANT
from tests.harness.stores import ram_store, within
from tests.harness.verified import assert_intact

OTHER = "other"
ADDRESSES = ("a", "b.c", "d")
NAMES = ("", "Weather", "Zoë \0 📱")
SPACES = ("model/3/1", "model/3/2")
LIMIT = 2
LIVENESS = Liveness(default_ttl=10 * SECOND, grace=60 * SECOND, keep=DAY)

tenants = st.sampled_from([TENANT, TENANT, OTHER])
addresses = st.sampled_from(ADDRESSES)
names = st.sampled_from(NAMES)
texts = st.sampled_from(["", "rain", "snow"])
spaces = st.sampled_from(SPACES)
ttls = st.sampled_from([None, 0, SECOND, 3600 * SECOND])
requests = st.builds(
    lambda address, name, text, tenant, ttl: registration(address, name, text, tenant=tenant, ttl=ttl),
    addresses,
    names,
    texts,
    tenants,
    ttls,
)


class Undone(Exception):
    """Ends a transaction that is to leave nothing."""


@dataclass
class Follower:
    """What somebody knows who reads changes page by page."""

    space: str
    place: ChangeCursor = FIRST
    known: dict[int, AgentChange] = field(default_factory=dict)

    def learn(self, changes: Sequence[AgentChange]) -> None:
        for change in changes:
            assert self.place < place(change)
            self.place = place(change)
            if change.removed:
                self.known.pop(change.agent_id, None)
            else:
                self.known[change.agent_id] = change


def machine(store_factory: Callable[[], Store]) -> type[RuleBasedStateMachine]:
    """Return the machine over a store."""

    class Directory(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.store = store_factory()
            self.agency = Agency(self.store, LIVENESS, LIMIT)
            self.agents: dict[int, Agent] = {}
            self.terms: dict[int, bytes] = {}
            self.vectors: dict[tuple[str, int], CardVectors] = {}
            self.removed: dict[int, AgentChange] = {}
            self.forgotten: set[int] = set()
            self.numbered = 0
            self.revision = 0
            self.followers = [Follower(space) for space in SPACES]

        @property
        def now(self) -> int:
            return self.agency.now

        def at(self, tenant: str, address: str) -> Agent | None:
            found = (kept for kept in self.agents.values() if (kept.tenant, kept.address) == (tenant, address))
            return next(found, None)

        def called(self, tenant: str, name: str) -> list[Agent]:
            return [kept for _, kept in sorted(self.agents.items()) if (kept.tenant, kept.name) == (tenant, name)]

        def of(self, tenant: str) -> int:
            return sum(1 for kept in self.agents.values() if kept.tenant == tenant)

        # Registrations.

        @rule(requests=st.lists(requests, min_size=1, max_size=4))
        def register(self, requests: list[Registration]) -> None:
            """Register several in one transaction, as a group commit does."""
            revision, refused = self.revision + 1, 0
            with within(self.store.transaction(), RegistryTables) as tx:
                for new in requests:
                    before = self.at(new.tenant, new.address)
                    if before is None and self.of(new.tenant) >= LIMIT:
                        with pytest.raises(QuotaExceededError):
                            rules.register(tx, LIVENESS, LIMIT, new, self.now)
                        refused += 1
                        continue
                    agent, created = rules.register(tx, LIVENESS, LIMIT, new, self.now)
                    assert created == (before is None)
                    expected = self.expected(new, before, revision, agent.id)
                    assert agent == expected
                    self.agents[agent.id], self.terms[agent.id] = expected, new.terms
            if refused < len(requests):
                self.revision = revision

        def expected(self, new: Registration, before: Agent | None, revision: int, no: int) -> Agent:
            if before is None:
                assert no > self.numbered
                self.numbered = no
                changed = True
                status, registered_at, edition = None, self.now, 0
            else:
                assert no == before.id
                changed = before.card != new.card
                status, registered_at, edition = before.status, before.registered_at, before.edition
            return Agent(
                id=no,
                tenant=new.tenant,
                address=new.address,
                name=new.name,
                card=new.card,
                ttl=LIVENESS.default_ttl if new.ttl is None else new.ttl,
                edition=edition + changed,
                registered_at=registered_at,
                updated_at=self.now,
                seen_at=self.now,
                status=status,
                revision=revision,
                card_revision=revision if changed or before is None else before.card_revision,
            )

        @rule(new=requests)
        def register_in_vain(self, new: Registration) -> None:
            with contextlib.suppress(Undone), within(self.store.transaction(), RegistryTables) as tx:
                rules.register(tx, LIVENESS, 0, new, self.now)
                for agent in self.agents.values():
                    tx.agents.remove(agent.id, self.now)
                raise Undone

        @rule(tenant=tenants, address=st.none() | addresses, name=names, removes=st.booleans())
        def report_or_unregister(self, tenant: str, address: str | None, name: str, removes: bool) -> None:
            if address is not None:
                matches = [agent for agent in [self.at(tenant, address)] if agent is not None]
            else:
                matches = self.called(tenant, name) if name else []
            verb = self.agency.unregister if removes else self.agency.report
            if address is None and (not name or len(matches) > 1):
                with pytest.raises(BadRequestError):
                    verb(address, name, tenant=tenant)
                return
            if not matches:
                with pytest.raises(NoSuchAgentError):
                    verb(address, name, tenant=tenant)
                return
            self.revision += 1
            [agent] = matches
            if removes:
                assert verb(address, name, tenant=tenant) == replace(agent, revision=self.revision)
                self.lose(agent.id)
                return
            status = b"%d" % self.now
            expected = replace(agent, status=status, seen_at=self.now, revision=self.revision)
            assert self.agency.report(address, name, status, tenant) == expected
            self.agents[agent.id] = expected

        def lose(self, no: int) -> None:
            agent = self.agents.pop(no)
            del self.terms[no]
            self.vectors = {place: kept for place, kept in self.vectors.items() if place[1] != no}
            self.removed[no] = AgentChange(self.revision, no, agent.tenant, 0, 0, self.now, 0, removed=True)

        # Vectors and terms.

        @precondition(lambda self: self.agents)
        @rule(space=spaces, data=st.data(), old=st.booleans())
        def embed(self, space: str, data: st.DataObject, old: bool) -> None:
            numbers = data.draw(st.lists(st.sampled_from(sorted(self.agents)), min_size=1, max_size=3, unique=True))
            kept = [CardVectors(no, self.agents[no].card_revision, b"%d" % self.revision) for no in numbers]
            embedded = [*kept, CardVectors(self.numbered + 1, self.revision, b"")]
            if old:
                # The first of them was registered anew while it was encoded.
                embedded[0] = replace(kept.pop(0), card_revision=0)
            assert self.agency.run(lambda tx: tx.vectors.save(space, embedded)) == len(kept)
            if kept:
                self.revision += 1
            for one in kept:
                self.vectors[space, one.agent_id] = one
                self.agents[one.agent_id] = replace(self.agents[one.agent_id], revision=self.revision)

        @rule(requests=st.lists(requests, min_size=1, max_size=4), tenant=tenants, space=spaces)
        def take(self, requests: list[Registration], tenant: str, space: str) -> None:
            """Register several with vectors that somebody else made, all or none."""
            read = [rules.EmbeddedRegistration(replace(new, tenant=tenant), b"of " + new.card) for new in requests]
            wanted = {each.new.address: each for each in read}
            before = {address: self.at(tenant, address) for address in wanted}
            added = sum(agent is None for agent in before.values())

            def taken() -> rules.BulkOutcome:
                return self.agency.run(
                    lambda tx: rules.register_many(tx, LIVENESS, LIMIT, tenant, space, read, self.now)
                )

            if added and self.of(tenant) + added > LIMIT:
                with pytest.raises(QuotaExceededError):
                    taken()
                return
            done, revision = taken(), self.revision + 1
            counts = {"added": added, "replaced": 0, "embedded": 0, "unchanged": 0}
            for address, (new, vectors) in wanted.items():
                agent = before[address]
                if agent is None or agent.card != new.card:
                    there = self.agency.find(address, tenant)
                    self.agents[there.id] = self.expected(new, agent, revision, there.id)
                    self.terms[there.id] = new.terms
                    counts["replaced"] += agent is not None
                    agent = self.agents[there.id]
                elif (kept := self.vectors.get((space, agent.id))) and kept.card_revision == agent.card_revision:
                    counts["unchanged"] += 1
                    continue
                else:
                    counts["embedded"] += 1
                self.vectors[space, agent.id] = CardVectors(agent.id, agent.card_revision, vectors)
                self.agents[agent.id] = replace(agent, revision=revision)
                self.revision = revision
            assert done._asdict() == {**counts, "revision": self.revision}

        @rule(space=spaces, limit=st.integers(1, 3))
        def drop(self, space: str, limit: int) -> None:
            gone = sorted(place for place in self.vectors if place[0] == space)[:limit]
            assert self.agency.run(lambda tx: tx.vectors.drop(space, limit)) == len(gone)
            for place in gone:
                del self.vectors[place]
            # Nobody follows a space that is not used any more.
            self.followers = [one if one.space != space else Follower(space) for one in self.followers]

        @precondition(lambda self: self.agents)
        @rule(data=st.data(), old=st.booleans())
        def read_anew(self, data: st.DataObject, old: bool) -> None:
            agent = self.agents[data.draw(st.sampled_from(sorted(self.agents)))]
            terms = b"anew %d" % self.now
            reread = [
                UpdatedTerms(agent.id, agent.card_revision - old, terms),
                UpdatedTerms(self.numbered + 1, 1, terms),
            ]
            self.agency.run(lambda tx: tx.agents.set_terms(reread))
            if not old:
                self.terms[agent.id] = terms

        # Time.

        @rule(span=st.sampled_from([1, SECOND, 10 * SECOND, 3600 * SECOND, DAY]))
        def tick(self, span: int) -> None:
            self.agency.advance(span)

        @rule(limit=st.integers(1, 3))
        def clean_up(self, limit: int) -> None:
            since = self.now - LIVENESS.grace - LIVENESS.keep
            silent = sorted((one.seen_at, one.id) for one in self.agents.values() if one.ttl and one.seen_at <= since)
            over = 0
            for start in range(0, len(silent), limit):
                gone = [no for _, no in silent[start : start + limit] if self.over(self.agents[no])]
                if gone:
                    self.revision += 1
                for no in gone:
                    self.lose(no)
                over += len(gone)
            assert self.agency.collect_agents(limit) == over

        def over(self, agent: Agent) -> bool:
            gone_at = LIVENESS.gone_at(agent.ttl, agent.seen_at)
            return gone_at is not None and gone_at + LIVENESS.keep <= self.now

        @rule(limit=st.integers(1, 3))
        def forget_removed(self, limit: int) -> None:
            old = {no for no, one in self.removed.items() if one.seen_at < self.now - rules.REMEMBERED}
            before = {one.agent_id for one in self.agency.changes() if one.removed}
            assert self.agency.forget_removed(limit) == min(limit, len(old))
            gone = before - {one.agent_id for one in self.agency.changes() if one.removed}
            assert gone <= old
            for no in gone:
                del self.removed[no]
            self.forgotten |= gone

        # Following.

        @rule(follower=st.integers(0, len(SPACES) - 1), limit=st.integers(1, 3))
        def follow(self, follower: int, limit: int) -> None:
            one = self.followers[follower]
            page = self.agency.changes(one.place, limit, one.space)
            assert page == [change for change in self.changes(one.space) if place(change) > one.place][:limit]
            one.learn(page)

        def changes(self, space: str) -> list[AgentChange]:
            """Return all there is to follow."""
            there = [
                AgentChange(
                    revision=agent.revision,
                    agent_id=no,
                    tenant=agent.tenant,
                    card_revision=agent.card_revision,
                    ttl=agent.ttl,
                    seen_at=agent.seen_at,
                    embedded=self.vectors[space, no].card_revision if (space, no) in self.vectors else 0,
                )
                for no, agent in self.agents.items()
            ]
            return sorted([*there, *self.removed.values()], key=place)

        # What must hold always.

        @invariant()
        def every_agent_is_there_as_it_is(self) -> None:
            with within(self.store.reading(), RegistryTables) as tx:
                assert tx.agents.revision() == self.revision
                assert tx.agents.pick(range(1, self.numbered + 2)) == self.agents
                assert tx.agents.terms(range(1, self.numbered + 2)) == self.terms
                for tenant in (TENANT, OTHER):
                    assert tx.agents.count(tenant) == self.of(tenant)
                    for address in ADDRESSES:
                        assert tx.agents.find(tenant, address) == self.at(tenant, address)
                    for name in NAMES:
                        assert tx.agents.named(tenant, name, ALL) == [one.id for one in self.called(tenant, name)]

        @invariant()
        def every_vector_is_there_or_missing(self) -> None:
            with within(self.store.reading(), RegistryTables) as tx:
                assert tx.vectors.spaces() == sorted({space for space, _ in self.vectors})
                for space in SPACES:
                    kept = {no: one for (of, no), one in self.vectors.items() if of == space}
                    assert tx.vectors.read(space, range(1, self.numbered + 2)) == kept
                    lacking = [
                        UnembeddedCard(no, agent.card_revision, agent.card)
                        for no, agent in sorted(self.agents.items())
                        if no not in kept or kept[no].card_revision != agent.card_revision
                    ]
                    assert self.agency.missing(space, limit=2) == lacking
                    assert tx.vectors.count(space) == len(kept)

        def teardown(self) -> None:
            for one in self.followers:
                while page := self.agency.changes(one.place, 2, one.space):
                    one.learn(page)
                # Who was away for longer than removals are remembered may hold some that are gone.
                known = {no: change for no, change in one.known.items() if no not in self.forgotten}
                assert known == {change.agent_id: change for change in self.changes(one.space) if not change.removed}
            assert_intact(self.store, but="vector_shape")
            self.store.close()

    Directory.TestCase.settings = settings(
        max_examples=40,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return Directory


def place(change: AgentChange) -> ChangeCursor:
    return ChangeCursor(change.revision, change.agent_id)


@pytest.mark.rule("G1", "G2", "G3")
class TestSqlite(machine(ram_store).TestCase):
    """The machine over a store on a RAM disk."""
