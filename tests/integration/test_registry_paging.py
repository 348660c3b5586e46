"""Pages of DISCOVER: without repeats or holes while agents come and go (G3, N7)."""

import pytest

from mediator.errors import BadRequestError
from registry.requests import AgentReference, Explanation
from tests.harness.directory import Instance, instance
from tests.harness.stores import ram_store

pytestmark = pytest.mark.rule("G3")


@pytest.fixture
async def registry():
    async with instance(ram_store()) as made:
        for n in range(50):
            await made.register(f"a{n}", "paints " * (1 + n % 5) + f"houses number{n}")
        yield made


@pytest.mark.parametrize("asked", [{}, {"text": "paints houses"}, {"semantic": "paints houses"}])
@pytest.mark.parametrize("by_cursor", [True, False])
async def test_pages_fit_together_while_agents_come_and_go(registry: Instance, asked: dict[str, str], by_cursor: bool):
    before = [agent.name for agent in (await registry.discover(limit=100, **asked)).agents]
    seen: list[str] = []
    page, number = await registry.discover(limit=7, **asked), 1
    gone = set()
    while True:
        seen += [agent.name for agent in page.agents]
        if page.next is None:
            break
        await registry.register(f"new{number}", "paints paints paints houses houses")
        leaving = next(name for name in reversed(before) if name not in seen and name not in gone)
        await registry.directory.unregister("default", AgentReference(name=leaving))
        gone.add(leaving)
        number += 1
        if by_cursor:
            page = await registry.discover(limit=7, cursor=page.next)
        else:
            page = await registry.discover(limit=7, page=number, **asked)
    assert len(seen) == len(set(seen))
    assert not [name for name in seen if name.startswith("new")]
    assert [name for name in before if name not in gone] == [name for name in seen if name not in gone]


async def test_pages_by_cursor_are_explained_like_the_first(registry: Instance):
    asked = {"text": "paints houses number7", "explain": True}
    whole = (await registry.discover(limit=50, **asked)).explanations
    page, seen = await registry.discover(limit=20, **asked), []
    while True:
        assert [why.keywords.score for why in page.explanations] == pytest.approx(page.scores)
        seen += page.explanations
        if page.next is None:
            break
        assert (await registry.discover(limit=1, cursor=page.next)).explanations is None
        page = await registry.discover(limit=20, cursor=page.next, explain=True)
    assert seen == whole
    assert seen[0].keywords.words == ("number7", "paints", "houses")
    listed = await registry.discover(limit=2, explain=True)
    assert listed.explanations == [Explanation()] * 2
    assert (await registry.discover(limit=2, cursor=listed.next, explain=True)).explanations == [Explanation()] * 2
    plain = await registry.discover(limit=20, text="paints houses number7")
    assert plain.explanations is None
    with pytest.raises(BadRequestError, match="explain: the first page was asked for without it"):
        await registry.discover(cursor=plain.next, explain=True)


async def test_a_cursor_is_valid_for_its_tenant_alone(registry: Instance):
    page = await registry.discover(text="paints")
    for tenant, cursor in (
        ("other", page.next),
        ("default", "nonsense"),
        ("default", f"{page.next}.5"),
        ("default", ""),
    ):
        with pytest.raises(BadRequestError, match="cursor: not known"):
            await registry.discover(tenant, cursor=cursor)


@pytest.mark.rule("N7")
async def test_a_page_stops_at_its_bytes_with_one_agent_at_least(registry: Instance):
    names: list[str] = []
    page = await registry.discover(budget=1000, limit=100)
    while True:
        assert len(page.agents) >= 1
        assert sum(len(agent.card) for agent in page.agents) <= 1000
        names += [agent.name for agent in page.agents]
        if page.next is None:
            break
        page = await registry.discover(budget=1000, limit=100, cursor=page.next)
    assert names == [f"a{n}" for n in range(50)]
    assert len((await registry.discover(budget=1)).agents) == 1


async def test_a_note_says_that_search_by_meaning_is_off(registry: Instance):
    page = await registry.discover(semantic="number7")
    assert page.mode == "semantic"
    assert page.note == "answered by keywords: search by meaning is turned off"
    assert page.agents[0].name == "a7"
