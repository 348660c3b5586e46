"""Weak signs of use: which messages are one, and how many are kept (G8)."""

from collections.abc import AsyncIterator

import pytest

from mediator.errors import NoSuchAgentError
from registry.search.feedback import MAX_CONNECTIONS, MAX_FOUND, SIGN_SECONDS, Sign, WeakSigns
from tests.harness.waiting import until

pytestmark = pytest.mark.rule("G8")
BOATS = Sign("default", "q1", "user ann", "agent.boats")


class Kept:
    """Signs as they are stored, at a time of the test's choice."""

    def __init__(self) -> None:
        self.now = 0.0
        self.signs: list[Sign] = []
        self.weak = WeakSigns(self.store, lambda: self.now)

    async def store(self, sign: Sign) -> None:
        if sign.address == "agent.gone":
            raise NoSuchAgentError(sign.address)
        self.signs.append(sign)

    def find(self, *addresses: str, connection: int = 1, query_id: str = "q1") -> None:
        self.weak.record_search("default", connection, query_id, "user ann", addresses)

    async def send(self, *addresses: str, connection: int = 1, tenant: str = "default") -> list[Sign]:
        """Send, then find and send something more, and return what was stored before that."""
        before = len(self.signs)
        self.find("agent.last", connection=0)
        for address in addresses:
            self.weak.record_send(tenant, connection, address)
        self.weak.record_send("default", 0, "agent.last")
        await until(lambda: self.signs[-1:] and self.signs[-1].address == "agent.last")
        stored = self.signs[before:-1]
        self.signs.clear()
        return stored


@pytest.fixture
async def kept() -> AsyncIterator[Kept]:
    kept = Kept()
    kept.weak.start()
    yield kept
    await kept.weak.stop()


async def test_the_first_message_to_a_found_agent_is_a_sign(kept: Kept) -> None:
    kept.find("agent.tides", "agent.boats")
    assert await kept.send("agent.boats", "agent.boats", "agent.other") == [BOATS]
    kept.find("agent.boats", query_id="q2")
    assert await kept.send("agent.boats") == [BOATS._replace(query_id="q2")]


@pytest.mark.parametrize("what", ["connection", "tenant"])
async def test_only_who_found_an_agent_gives_a_sign(kept: Kept, what: str) -> None:
    kept.find("agent.boats")
    other = {"connection": 2} if what == "connection" else {"tenant": "globex"}
    assert await kept.send("agent.boats", **other) == []  # type: ignore[arg-type]


async def test_a_message_long_after_the_search_is_no_sign(kept: Kept) -> None:
    kept.find("agent.boats")
    kept.find("agent.tides")
    kept.now = SIGN_SECONDS - 1
    assert await kept.send("agent.boats") == [BOATS]
    kept.now = SIGN_SECONDS
    assert await kept.send("agent.tides") == []


async def test_a_sign_that_cannot_be_kept_is_dropped(kept: Kept) -> None:
    kept.find("agent.gone", "agent.boats")
    assert await kept.send("agent.gone", "agent.boats") == [BOATS]


async def test_what_was_found_is_bounded(kept: Kept) -> None:
    many = [f"agent.a{n}" for n in range(MAX_FOUND + 1)]
    kept.find(*many)
    assert [sign.address for sign in await kept.send(*many)] == many[:-1], "the best ones are kept"
    kept.find("agent.boats")
    for connection in range(2, MAX_CONNECTIONS + 2):
        kept.find("agent.boats", connection=connection)
    assert await kept.send("agent.boats") == []
    assert await kept.send("agent.boats", connection=3) == [BOATS]
