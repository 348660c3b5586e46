"""Why an agent is found where it is: what of its card matches a request, and what is not said (G3, G4)."""

import os

import numpy as np
import orjson
import pytest

from mediator.mailboxes.address import new_address
from registry.cards.card import read_card
from registry.index.analysis import analyze
from registry.index.keywords import IndexDocument
from registry.index.tenant import IndexQuery, SearchFilter, TenantIndex
from registry.records import Agent, Liveness
from registry.requests import Explanation, KeywordMatch
from registry.search.searcher import explain
from registry.search.snapshots import ExplainedRequest

SEND_ONLY = "send." + "0" * 40
SKILLS = [{"id": "pay", "name": "Pay"}, {"id": "refund"}]
UNITS = np.eye(3, dtype=np.float16)


def agent(no: int, address: str = "clerk.inbox", shown: str = "", **card: object) -> Agent:
    """Return an agent as others see it, with the address ``shown`` in place of its own."""
    data = orjson.dumps({"mailbox": address, **card}).replace(address.encode(), (shown or address).encode())
    return Agent(no, "default", shown or address, "", data, 0, 1, 0, 0, 0, None, 1, 1)


def index_of(*agents: Agent, own: str = "") -> TenantIndex:
    index = TenantIndex(Liveness())
    index.add([(one.id, IndexDocument.of(read_card(_own(one, own)))) for one in agents])
    return index


def _own(one: Agent, own: str) -> bytes:
    return one.card.replace(SEND_ONLY.encode(), own.encode()) if own else one.card


def why(index: TenantIndex, text: str, vectors: np.ndarray | None, *agents: Agent) -> dict[int, Explanation]:
    query = IndexQuery([analyze(text)], vectors)
    found, _ = index.search(query, SearchFilter(), 0)
    page = [(place, one) for place, no in enumerate(found.agent_ids.tolist()) for one in agents if one.id == no]
    explanations = explain(index, ExplainedRequest(text, found.shares), [text], vectors, page)
    for (place, _), each in zip(page, explanations, strict=True):
        parts = [part.score for part in (each.keywords, each.vectors) if part is not None]
        assert sum(parts) == pytest.approx(float(found.scores[place]), abs=1e-6)
    return {one.id: each for (_, one), each in zip(page, explanations, strict=True)}


@pytest.mark.rule("G3")
def test_words_of_the_request_are_named_as_written():
    clerk = agent(1, description="Pays invoices in getRates style", name="Clerk")
    other = agent(2, "b", description="Pays nobody")
    explained = why(index_of(clerk, other), "Paying an INVIOCE by the rates, please", None, clerk, other)
    assert explained[1] == Explanation(KeywordMatch(1.0, ("invioce", "rates", "paying")))
    assert explained[2].keywords.words == ("paying",)
    assert explained[2].vectors is None


@pytest.mark.rule("G3")
def test_the_nearest_skill_is_named_with_its_cosine():
    clerk, bare, new = agent(1, skills=SKILLS), agent(2, "b"), agent(3, "c", description="refund")
    index = index_of(clerk, bare, new)
    index.add_vectors([(1, UNITS), (2, UNITS[1:2])])
    explained = why(index, "refund", np.array([[0, 0.6, 0.8]], np.float32), clerk, bare, new)
    near = explained[1].vectors
    assert (near.card, near.skill.id, near.skill_cosine) == pytest.approx((0, "refund", 0.8), abs=1e-3)
    assert (explained[2].vectors.card, explained[2].vectors.skill) == (pytest.approx(0.6, abs=1e-3), None)
    assert explained[2].keywords is None
    assert explained[3].vectors.score > 0, "estimated from its keywords"
    assert explained[3].vectors.card is None


@pytest.mark.rule("G4")
def test_an_explanation_tells_nothing_of_a_hidden_address():
    own = new_address(os.urandom)
    hidden = agent(1, own, SEND_ONLY, description=f"Write to {own} for pay", skills=[{"name": f"ask {own}"}])
    index = index_of(hidden, own=own)
    index.add_vectors([(1, UNITS[:2])])
    guesses = " ".join(dict.fromkeys([own, *analyze(own)]))
    explained = why(index, f"{guesses} pay", np.array([[0, 1, 0]], np.float32), hidden)
    assert explained[1].keywords.words == ("pay",)
    assert explained[1].vectors.skill.name == f"ask {SEND_ONLY}"
    assert own not in repr(explained)


@pytest.mark.rule("G3")
def test_an_agent_that_left_meanwhile_is_explained_by_its_score():
    clerk = agent(1, description="pay")
    index = index_of(clerk)
    found, _ = index.search(IndexQuery([analyze("pay")], None), SearchFilter(), 0)
    index.remove([1])
    explained = explain(index, ExplainedRequest("pay", found.shares), ["pay"], None, [(0, clerk)])
    assert explained == [Explanation(KeywordMatch(1.0, ()))]
