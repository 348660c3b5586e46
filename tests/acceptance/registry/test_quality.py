"""Agents are found, end to end: a slice of each set in a tenant of its own, asked by text and by meaning over NATS."""

import pytest

from registry.evaluation import MEASURES, rate_all
from tests.acceptance.registry.asking import embedded, registries
from tests.acceptance.registry.sets import sets, sliced
from tests.acceptance.service import Services

CARDS = 40
ABOVE_CHANCE = 0.4
"""Of ten answers among forty cards, drawn by chance, a quarter of the right ones would be there; and .04 in front."""


@pytest.mark.timeout(300)
@pytest.mark.rule("G1", "G3")
async def test_requests_find_their_agents_and_cards_come_back_byte_for_byte(services: Services) -> None:
    wanted = [sliced(each, CARDS) for each in sets()]
    async with registries(services, wanted) as (service, filled):
        for registry in filled:
            await registry.fill()
        await embedded(service, sum(len(each.catalog.cards) for each in wanted))
        for registry in filled:
            for mode in ("text", "semantic"):
                answers = await registry.answers(mode)
                assert answers.notes == set(), f"{registry.set.name}: vectors are there"
                assert answers.ranked.keys() == {case.qid for case in registry.set.cases}
                means = rate_all(registry.set.cases, answers.ranked).mean(axis=0)
                found = dict(zip(MEASURES, means.tolist(), strict=True))
                where = f"{registry.set.name}, {mode}: {found}"
                assert found["Recall@10"] > 2 * ABOVE_CHANCE or mode == "text", where
                assert found["Recall@10"] > ABOVE_CHANCE, where
                assert found["nDCG@10"] > ABOVE_CHANCE, where
    assert service.complaints() == []
