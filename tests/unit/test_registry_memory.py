"""The memory of use in the index: who is lifted, by how much, and how far liars and newcomers get (G5–G7)."""

import numpy as np
import pytest

from mediator.mailboxes.bounds import DAY
from registry.index.keywords import IndexDocument
from registry.index.memory import DOUBT, HALF_LIFE, LARGE, MAX_LIFT, RememberedRequest, RequestMemory
from registry.index.tenant import IndexQuery, SearchFilter, TenantIndex
from registry.index.updater import IndexSet
from registry.records import SIGN, USEFUL, USELESS, ChangeCursor, Liveness, Vote

DIMS = 64


def unit(*rows):
    made = np.array(rows, np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


AXES = np.eye(DIMS, dtype=np.float32)
BOATS, TIDE = 1, 2


def request(no, vector, *votes, at=0) -> RememberedRequest:
    """``votes`` are pairs of agent and voter, or triples with a value."""
    full = [Vote(no, vote[0], vote[1], vote[2] if len(vote) > 2 else USEFUL, at) for vote in votes]
    return RememberedRequest(no, np.array([vector], np.float16), full)


def memory(*requests) -> RequestMemory:
    made = RequestMemory()
    made.put(requests)
    return made


def lift(remembered, agent=BOATS, vector=AXES[0], now=0) -> float:
    return remembered.lifts(vector, now).get(agent, 0.0)


@pytest.mark.rule("G5")
def test_a_request_alike_lifts_who_served_it():
    remembered = memory(request(1, AXES[0], (BOATS, 7)))
    assert lift(remembered) == pytest.approx(MAX_LIFT / 2)
    nearer, farther = unit(AXES[0] + 0.3 * AXES[1], AXES[0] + AXES[1])
    assert MAX_LIFT / 2 > lift(remembered, vector=nearer) > lift(remembered, vector=farther) > 0
    assert lift(remembered, vector=AXES[1]) == 0
    assert lift(remembered, TIDE) == 0


@pytest.mark.rule("G5")
def test_a_vote_fades():
    remembered = memory(request(1, AXES[0], (BOATS, 7)))
    assert lift(remembered, now=HALF_LIFE) == pytest.approx(MAX_LIFT * 0.5 / (0.5 + DOUBT))
    assert lift(remembered, now=200 * DAY) < 0.01


@pytest.mark.rule("G6")
def test_a_voter_counts_once_nearby():
    once = memory(request(1, AXES[0], (BOATS, 7)))
    often = memory(*(request(no, AXES[0], (BOATS, 7)) for no in range(50)))
    many = memory(*(request(no, AXES[0], (BOATS, no)) for no in range(50)))
    assert lift(often) == pytest.approx(lift(once))
    assert lift(once) < lift(many) < MAX_LIFT


@pytest.mark.rule("G6")
@pytest.mark.parametrize("liars", [1, 2])
def test_near_copies_do_not_crowd_others_out(liars):
    near, nearer = unit(*(AXES[0] + 0.6 * AXES[1:6])), unit(*(AXES[0] + 0.1 * AXES[10:40]))
    remembered = memory(*(request(no, row, (BOATS, no)) for no, row in enumerate(near, 1)))
    honest = lift(remembered)
    remembered.put(
        request(100 + no, row, *((TIDE, 90 + liar) for liar in range(liars)))
        for no, row in enumerate(np.tile(nearer, (20, 1)))
    )
    # Each liar counts as one more voter, who said something else.
    assert lift(remembered) == pytest.approx(honest * (5 + 1) / (5 + liars + 1), rel=0.1)
    assert lift(remembered, TIDE) < lift(remembered)


@pytest.mark.rule("G6")
def test_a_word_against_takes_no_more_than_one_gave():
    praised = memory(request(1, AXES[0], (BOATS, 7), (BOATS, 8), (BOATS, 9)))
    blamed = memory(request(1, AXES[0], (BOATS, 7), (BOATS, 8), (BOATS, 9), (BOATS, 6, USELESS)))
    fewer = memory(request(1, AXES[0], (BOATS, 7), (BOATS, 8)))
    assert lift(praised) > lift(blamed) == pytest.approx(lift(fewer)) == pytest.approx(MAX_LIFT * 2 / (2 + DOUBT))
    only = memory(request(1, AXES[0], (BOATS, 6, USELESS)))
    assert lift(only) == 0
    assert not only.has_praise_for(BOATS), "and it stays a newcomer"


@pytest.mark.rule("G5")
def test_a_weak_sign_counts_a_quarter():
    remembered = memory(request(1, AXES[0], (BOATS, 7, SIGN)))
    assert lift(remembered) == pytest.approx(MAX_LIFT * 0.25 / (0.25 + DOUBT))


@pytest.mark.rule("G7")
def test_what_is_forgotten_lifts_nobody():
    remembered = memory(request(1, AXES[0], (BOATS, 7)), request(2, AXES[0], (TIDE, 7)))
    remembered.remove([1, 99])
    assert lift(remembered) == 0
    assert not remembered.has_praise_for(BOATS)
    remembered.put([request(2, AXES[0], (BOATS, 7))])
    assert lift(remembered, TIDE) == 0
    assert len(remembered) == 1


def test_a_request_of_another_space_is_left_out():
    remembered = memory(request(1, AXES[0], (BOATS, 7)), request(2, AXES[0][:8], (TIDE, 7)))
    assert lift(remembered, TIDE) == 0
    assert remembered.lifts(AXES[0][:8], 0) == {}


# In a ranking.


def index(vectors) -> TenantIndex:
    """Agents 1, 2, … with these vectors and no words."""
    made = TenantIndex(Liveness())
    made.add([(no, IndexDocument({}, (), ())) for no in range(1, len(vectors) + 1)])
    made.add_vectors([(no, np.array([row], np.float16)) for no, row in enumerate(vectors, 1)])
    return made


def ranked(made, vector, *, remember=True) -> list[int]:
    found, _ = made.search(IndexQuery([[]], np.array([vector], np.float32), remember), SearchFilter(), 0)
    return found.agent_ids.tolist()


@pytest.mark.rule("G5")
def test_an_agent_is_lifted_from_anywhere():
    near = unit(*(AXES[0] + 0.1 * AXES[n % DIMS] for n in range(1, 301)))
    made = index([*near, AXES[40]])
    assert 301 not in ranked(made, AXES[0])
    made.remember([request(no, AXES[0], (301, no)) for no in range(1000, 1064)])
    assert 301 in ranked(made, AXES[0])
    assert 301 not in ranked(made, AXES[0], remember=False)


@pytest.mark.rule("G7")
def test_a_new_agent_is_not_buried():
    made = index(unit(AXES[0] + 0.5 * AXES[1], AXES[0] + 0.7 * AXES[2], AXES[0] + 2 * AXES[3]))
    made.remember([request(no, AXES[0], (2, no)) for no in range(1000, 1064)])
    assert ranked(made, AXES[0])[0] == 2
    # The best newcomer stays in front of one that fits worse, and right behind who is known.
    assert ranked(made, AXES[0]) == [2, 1, 3]
    made.remember([request(no, AXES[0], (2, no), (1, no)) for no in range(1000, 1064)])
    assert ranked(made, AXES[0]) == [1, 2, 3]


@pytest.mark.rule("G6", "G7")
def test_a_removed_agent_is_lifted_no_more():
    made = index(AXES[:3])
    made.remember([request(9, AXES[0], (3, 7))])
    made.remove([3])
    assert ranked(made, AXES[0]) == [1, 2]


@pytest.mark.rule("G6")
def test_liars_do_not_get_far():
    """A tenth of the askers lie for one agent on whatever they ask; the others tell the truth."""
    random = np.random.default_rng(5)
    topics = unit(*random.standard_normal((40, DIMS)))
    served = unit(*(topics + 2.5 * unit(*random.standard_normal((40, DIMS)))))
    liars_agent = 41
    made = index([*served, unit(random.standard_normal(DIMS))[0]])

    def asked(topic):
        return unit(topics[topic] + 0.8 * unit(random.standard_normal(DIMS))[0])[0]

    def measure():
        found = [(topic, ranked(made, asked(topic))) for topic in list(range(40)) * 5]
        right, first, shown = np.mean(
            [(each[0] == topic + 1, each[0] == liars_agent, liars_agent in each[:3]) for topic, each in found], axis=0
        )
        return right, first, shown

    truth, _, _ = measure()
    votes = []
    for no in range(1000):
        voter, topic = no % 100, int(random.integers(40))
        votes.append(request(no, asked(topic), (liars_agent if voter < 10 else topic + 1, voter)))
    made.remember(votes)
    with_liars, first, shown = measure()
    # Of all requests, 51 % find the right agent first without a memory, and 99 % or more with this one.
    assert with_liars > 0.9 > truth
    # The liars' agent is among the first three where their votes are many by chance, and leads nowhere.
    assert first <= 0.01
    assert shown < 0.25


def test_a_large_memory_finds_the_same(monkeypatch):
    monkeypatch.setattr("registry.index.memory.LARGE", 2_000)
    assert LARGE > 2_000
    random = np.random.default_rng(5)
    topics = unit(*random.standard_normal((50, DIMS)))
    made = index(AXES[:50])
    asked = unit(*(topics.repeat(60, axis=0) + 0.6 * unit(*random.standard_normal((3_000, DIMS)))))
    made.remember([request(no, row, (no // 60 + 1, no)) for no, row in enumerate(asked)])

    def first() -> list[int]:
        return [ranked(made, row)[0] for row in topics]

    # By their topic's requests, not by their vectors.
    assert first() == list(range(1, 51))
    while made.optimize():
        pass
    assert first() == list(range(1, 51))


def test_agents_do_not_wait_for_what_is_remembered():
    indexes = IndexSet("", cursor=ChangeCursor(5, 1 << 62))
    assert indexes.has(4)
    assert indexes.requests < ChangeCursor(4, 0)
