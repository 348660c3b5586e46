"""What the registry keeps, in memory: agents, their terms and vectors, and removals."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mediator.agents.ports import ChangePlace, Reread, SeenPlace, Silent, Unembedded
from mediator.agents.records import Agent, Change, Embedded, Registration
from mediator.store.memory_table import Undo, Undoable


@dataclass
class Registry:
    """All tables of the registry."""

    agents: dict[int, Agent] = field(default_factory=dict)
    addresses: dict[tuple[str, str], int] = field(default_factory=dict)
    terms: dict[int, bytes] = field(default_factory=dict)
    vectors: dict[tuple[str, int], Embedded] = field(default_factory=dict)
    removed: dict[int, Change] = field(default_factory=dict)
    revision: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class Agents(Undoable):
    """See :class:`mediator.agents.ports.Agents`."""

    def __init__(self, data: Registry, undo: Undo) -> None:
        super().__init__(undo)
        self._data = data
        self._taken: int | None = None

    def take_revision(self) -> int:
        """Return the revision of what this transaction changes."""
        if self._taken is None:
            self._undo.append(partial(setattr, self._data, "revision", self._data.revision))
            self._data.revision += 1
            self._taken = self._data.revision
        return self._taken

    def find(self, tenant: str, address: str) -> Agent | None:
        no = self._data.addresses.get((tenant, address))
        return None if no is None else self._data.agents[no]

    def named(self, tenant: str, name: str, limit: int) -> list[int]:
        found = (no for no, kept in self._data.agents.items() if (kept.tenant, kept.name) == (tenant, name))
        return sorted(found)[:limit]

    def add(self, new: Registration, ttl: int, now: int) -> Agent:
        revision = self.take_revision()
        agent = Agent(
            no=next(self._data.numbers),
            tenant=new.tenant,
            address=new.address,
            name=new.name,
            card=new.card,
            ttl=ttl,
            edition=1,
            registered_at=now,
            updated_at=now,
            seen_at=now,
            status=None,
            revision=revision,
            card_revision=revision,
        )
        self._set(self._data.addresses, (new.tenant, new.address), agent.no)
        self._set(self._data.terms, agent.no, new.terms)
        return self.keep(agent)

    def replace(self, agent: Agent, new: Registration, ttl: int, now: int) -> Agent:
        revision = self.take_revision()
        kept = replace(agent, name=new.name, card=new.card, ttl=ttl, updated_at=now, seen_at=now, revision=revision)
        if new.card != agent.card:
            kept = replace(kept, edition=agent.edition + 1, card_revision=revision)
        self._set(self._data.terms, agent.no, new.terms)
        return self.keep(kept)

    def seen(self, agent: Agent, status: bytes, now: int) -> Agent:
        return self.keep(replace(agent, status=status, seen_at=now, revision=self.take_revision()))

    def keep(self, agent: Agent) -> Agent:
        """Keep an agent as it is now."""
        self._set(self._data.agents, agent.no, agent)
        return agent

    def remove(self, no: int, now: int) -> None:
        gone = self._data.agents.get(no)
        if gone is None:
            return
        self._pop(self._data.agents, no)
        self._pop(self._data.addresses, (gone.tenant, gone.address))
        self._pop(self._data.terms, no)
        for place in [place for place in self._data.vectors if place[1] == no]:
            self._pop(self._data.vectors, place)
        tombstone = Change(self.take_revision(), no, gone.tenant, 0, 0, now, 0, removed=True)
        self._set(self._data.removed, no, tombstone)

    def count(self, tenant: str) -> int:
        return sum(1 for kept in self._data.agents.values() if kept.tenant == tenant)

    def pick(self, numbers: Sequence[int]) -> dict[int, Agent]:
        return {no: self._data.agents[no] for no in numbers if no in self._data.agents}

    def terms(self, numbers: Sequence[int]) -> dict[int, bytes]:
        return {no: self._data.terms[no] for no in numbers if no in self._data.terms}

    def set_terms(self, terms: Sequence[Reread]) -> None:
        for one in terms:
            kept = self._data.agents.get(one.no)
            if kept is not None and kept.card_revision == one.card_revision:
                self._set(self._data.terms, one.no, one.terms)

    def revision(self) -> int:
        return self._data.revision

    def changes(self, after: ChangePlace, space: str, limit: int) -> list[Change]:
        there = (self._change(agent, space) for agent in self._data.agents.values())
        found = [one for one in (*there, *self._data.removed.values()) if _place(one) > after]
        return sorted(found, key=_place)[:limit]

    def _change(self, agent: Agent, space: str) -> Change:
        vectors = self._data.vectors.get((space, agent.no))
        embedded = 0 if vectors is None else vectors.card_revision
        return Change(agent.revision, agent.no, agent.tenant, agent.card_revision, agent.ttl, agent.seen_at, embedded)

    def unseen(self, since: int, after: SeenPlace, limit: int) -> list[Silent]:
        found = [kept for kept in self._data.agents.values() if kept.ttl and kept.seen_at <= since]
        places = sorted(SeenPlace(kept.seen_at, kept.no) for kept in found)
        agents = [self._data.agents[place.no] for place in places if place > after]
        return [Silent(one.no, one.tenant, one.address, one.ttl, one.seen_at) for one in agents[:limit]]

    def forget_removed(self, before: int, limit: int) -> int:
        old = [no for no, tombstone in self._data.removed.items() if tombstone.seen_at < before]
        for no in old[:limit]:
            self._pop(self._data.removed, no)
        return len(old[:limit])


class Vectors(Undoable):
    """See :class:`mediator.agents.ports.Vectors`."""

    def __init__(self, data: Registry, undo: Undo, agents: Agents) -> None:
        super().__init__(undo)
        self._data = data
        self._agents = agents

    def put(self, space: str, embedded: Sequence[Embedded]) -> int:
        kept = {one.no: one for one in embedded if self._current(one)}
        for one in kept.values():
            self._set(self._data.vectors, (space, one.no), one)
            self._agents.keep(replace(self._data.agents[one.no], revision=self._agents.take_revision()))
        return len(kept)

    def _current(self, embedded: Embedded) -> bool:
        agent = self._data.agents.get(embedded.no)
        return agent is not None and agent.card_revision == embedded.card_revision

    def read(self, space: str, numbers: Sequence[int]) -> dict[int, Embedded]:
        return {no: self._data.vectors[space, no] for no in numbers if (space, no) in self._data.vectors}

    def missing(self, space: str, after: int, limit: int, updated_before: int) -> tuple[list[Unembedded], int | None]:
        waiting = [
            Unembedded(no, agent.card_revision, agent.card)
            for no, agent in sorted(self._data.agents.items())
            if no > after and agent.updated_at < updated_before and not self._has(space, no)
        ]
        return waiting[:limit], waiting[limit - 1].no if len(waiting) > limit else None

    def _has(self, space: str, no: int) -> bool:
        vectors = self._data.vectors.get((space, no))
        return vectors is not None and self._current(vectors)

    def count(self, space: str) -> int:
        return sum(1 for of, _ in self._data.vectors if of == space)

    def spaces(self) -> list[str]:
        return sorted({space for space, _ in self._data.vectors})

    def drop(self, space: str, limit: int) -> int:
        gone = sorted(place for place in self._data.vectors if place[0] == space)[:limit]
        for place in gone:
            self._pop(self._data.vectors, place)
        return len(gone)


def _place(change: Change) -> ChangePlace:
    return ChangePlace(change.revision, change.no)
