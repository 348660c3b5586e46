"""Agents are found, end to end: a slice of each set in a tenant of its own, asked by text and by meaning over NATS."""

import pytest

from registry.evaluation import MEASURES, rate_all
from tests.acceptance.registry.asking import embedded, registries
from tests.acceptance.registry.sets import sets, sliced
from tests.harness.service import Services

CARDS = 40
FAR_ABOVE_CHANCE = {"nDCG@10": 0.4, "Recall@10": 0.5}
"""Ten answers drawn by chance among forty cards would come to about .1 and .25."""


@pytest.mark.timeout(300)
@pytest.mark.rule("G1", "G3")
async def test_requests_find_their_agents_with_unchanged_cards(services: Services) -> None:
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
                for measure, least in FAR_ABOVE_CHANCE.items():
                    assert found[measure] > least, f"{registry.set.name}, {mode}: {found}"
    assert service.complaints() == []
