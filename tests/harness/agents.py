"""The registry for tests: its verbs over any store, beside those of the mailboxes, each one transaction."""

from typing import Any

from mediator.mailboxes.bounds import Bounds
from mediator.store.base import Store
from registry import rules
from registry.records import (
    Agent,
    AgentChange,
    ChangeCursor,
    LastSeenCursor,
    Liveness,
    Registration,
    State,
    UnembeddedCard,
)
from registry.tables import RegistryTables
from tests.harness.broker import START, TENANT, Broker

SPACE = "model/3/1"
FIRST = ChangeCursor(0, 0)
ALL = 1 << 30


def card(address: str, text: str = "") -> bytes:
    """Return a card, another one for each text; no reader of JSON would write it so."""
    return f'{{"mailbox" :\t"mq9://host/{address}",  "description": "{text}"}}'.encode()


def registration(
    address: str, name: str = "", text: str = "", *, tenant: str = TENANT, ttl: int | None = None, **more: Any
) -> Registration:
    return Registration(
        tenant,
        address,
        name,
        more.pop("card", card(address, text)),
        more.pop("terms", b"terms of " + text.encode()),
        ttl,
        **more,
    )


class Agency(Broker):
    """The broker of the tests, and what the registry adds to it."""

    tables = RegistryTables

    def __init__(
        self,
        store: Store,
        liveness: Liveness | None = None,
        limit: int = 0,
        bounds: Bounds | None = None,
        now: int = START,
    ) -> None:
        super().__init__(store, bounds, now)
        self.liveness = liveness or Liveness()
        self.limit = limit

    def put(self, new: Registration) -> tuple[Agent, bool]:
        return self.run(lambda tx: rules.register(tx, self.liveness, self.limit, new, self.now))

    def register(self, address: str, name: str = "", text: str = "", **more: Any) -> Agent:
        return self.put(registration(address, name, text, **more))[0]

    def take(self, *read: tuple[Registration, bytes], space: str = SPACE) -> rules.BulkOutcome:
        ready = [rules.EmbeddedRegistration(*each) for each in read]
        return self.run(lambda tx: rules.register_many(tx, self.liveness, self.limit, TENANT, space, ready, self.now))

    def unregister(self, address: str | None = None, name: str | None = None, tenant: str = TENANT) -> Agent:
        return self.run(lambda tx: rules.unregister(tx, tenant, address, name, self.now))

    def report(
        self, address: str | None = None, name: str | None = None, status: bytes = b"{}", tenant: str = TENANT
    ) -> Agent:
        return self.run(lambda tx: rules.report(tx, tenant, address, name, status, self.now))

    def find(self, address: str, tenant: str = TENANT) -> Agent | None:
        with self.reading() as tx:
            return tx.agents.find(tenant, address)

    def state(self, address: str) -> State:
        agent = self.find(address)
        return self.liveness.state(agent.ttl, agent.seen_at, self.now)

    def changes(self, after: ChangeCursor = FIRST, limit: int = ALL, space: str = SPACE) -> list[AgentChange]:
        with self.reading() as tx:
            return tx.agents.changes(after, space, limit)

    def missing(self, space: str = SPACE, limit: int = ALL) -> list[UnembeddedCard]:
        """Look for agents without vectors until there are no more."""
        found: list[UnembeddedCard] = []
        after: int | None = 0
        with self.reading() as tx:
            while after is not None:
                some, after = tx.vectors.missing(space, after, limit, self.now + 1)
                found += some
        return found

    def revision(self) -> int:
        with self.reading() as tx:
            return tx.agents.revision()

    def collect_agents(self, limit: int = 1000) -> int:
        """Run slices of the clean-up of agents to their end, and return how many it removed."""
        after: LastSeenCursor | None = rules.FIRST_SEEN
        removed = 0
        while after is not None:
            place = after
            collected, after = self.run(
                lambda tx: rules.collect_agents(tx, self.liveness, place, self.now, limit)  # noqa: B023
            )
            removed += collected.agents
        return removed

    def forget_removed(self, limit: int = 1000) -> int:
        return self.run(lambda tx: rules.forget_removed_agents(tx, self.now, limit))
