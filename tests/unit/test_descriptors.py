"""Open files are divided so that every door has some, and none more than it wants."""

import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.system.limits import divide


@pytest.mark.parametrize(
    ("wanted", "available", "given"),
    [
        ({"a": 10, "b": 20}, 100, {"a": 10, "b": 20}),
        ({"a": 10, "b": 20}, 20, {"a": 10, "b": 10}),
        ({"a": 2, "b": 100, "c": 100}, 52, {"a": 2, "b": 25, "c": 25}),
        ({"a": 5, "b": 5}, -7, {"a": 1, "b": 1}),
    ],
)
def test_each_gets_what_it_wants_or_an_equal_part(
    wanted: dict[str, int], available: int, given: dict[str, int]
) -> None:
    assert divide(wanted, available) == given


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 1000), min_size=1), st.integers(0, 5000))
def test_no_more_is_given_than_there_is(wanted: dict[str, int], available: int) -> None:
    given = divide(wanted, available)
    assert sum(given.values()) <= max(available, len(wanted))
    assert all(1 <= given[name] <= wanted[name] for name in wanted)
    assert sum(given.values()) == sum(wanted.values()) or sum(given.values()) >= min(available, sum(wanted.values()))


def test_every_door_works_where_few_files_may_be_open() -> None:
    code = (
        "from mediator.system.limits import budget_files; "
        "print(sorted(budget_files({'a': 1000, 'b': 1000, 'c': 20}).values()))"
    )
    few = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert few.stdout == "[20, 54, 54]\n"
