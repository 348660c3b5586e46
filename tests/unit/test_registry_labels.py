import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from registry.index.keywords import LabelIndex

SLOTS = st.integers(0, 7)
WORDS = st.lists(st.sampled_from(["news", "sport", "wetter", "天气", "a b"]), max_size=3, unique=True)


def having(labels: LabelIndex, *words: str) -> set[int]:
    among = np.ones(8, np.bool_)
    labels.filter(words, among)
    return set(np.flatnonzero(among).tolist())


@given(st.lists(st.one_of(st.tuples(SLOTS, WORDS), st.tuples(SLOTS, st.none())), max_size=60), WORDS)
def test_marks_are_those_of_a_dictionary(steps: list[tuple[int, list[str] | None]], asked: list[str]):
    labels, kept = LabelIndex(), dict[int, list[str]]()
    for slot, words in steps:
        labels.remove([slot])
        kept.pop(slot, None)
        if words is not None:
            labels.add(slot, words)
            kept[slot] = words
    expected = {slot for slot in range(8) if set(asked) <= set(kept.get(slot, ()))}
    assert having(labels, *asked) == expected


def test_removed_labels_make_room():
    labels = LabelIndex()
    for turn in range(300):
        labels.remove([turn % 3])
        labels.add(turn % 3, [f"label {turn}", "same"])
    assert having(labels, "same") == {0, 1, 2}
    assert having(labels, "label 299") == {2}
    assert having(labels, "label 3") == set()


@given(
    st.lists(st.tuples(st.integers(0, 40), WORDS), max_size=60, unique_by=lambda one: one[0]),
    st.lists(st.integers(0, 60), max_size=50),
    st.lists(st.integers(0, 60), max_size=50),
)
def test_many_are_removed_in_one_go_as_one_by_one(
    there: list[tuple[int, list[str]]], first: list[int], then: list[int]
):
    labels = LabelIndex()
    for slot, words in there:
        labels.add(slot, words)
    labels.remove(first)
    labels.remove(then)
    among = np.ones(61, np.bool_)
    labels.filter(["news"], among)
    assert set(np.flatnonzero(among)) == {slot for slot, words in there if "news" in words} - {*first, *then}
