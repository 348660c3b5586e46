"""Keeps the table in docs/errors.md whole: it and the tree in mediator/errors.py say the same."""

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from mediator import errors
from mediator.errors import MediatorError

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
ROW = re.compile(
    r"^\| `(?P<code>[a-z_]+)` \| (?P<status>\d{3}) \| `(?P<text>[^`]+)` \| (?P<retry>yes|no) \| (?P<when>.+) \|$"
)


class Row(NamedTuple):
    code: str
    status: int
    text: str
    retry: bool
    when: str


def table() -> list[Row]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = []
    for line in lines[2:]:  # below the heading and its rule
        match = ROW.match(line)
        assert match, f"not a row of five cells as the others: {line}"
        rows.append(Row(match["code"], int(match["status"]), match["text"], match["retry"] == "yes", match["when"]))
    return rows


def tree(root: type[MediatorError] = MediatorError) -> list[type[MediatorError]]:
    found = [root]
    for child in root.__subclasses__():
        # A test may derive an error of its own; only the package's are promised to callers.
        if child.__module__.split(".")[0] == "mediator":
            found += tree(child)
    return found


def text_pattern(cls: type[MediatorError]) -> str:
    """The text with the name of each argument in braces where its value will stand."""
    if "__init__" not in vars(cls) and cls.__init__ is Exception.__init__:
        return str(cls("{text}"))
    names = list(inspect.signature(cls).parameters)
    return str(cls(*(f"{{{name}}}" for name in names)))


def test_every_error_is_in_the_table_and_every_row_in_the_tree() -> None:
    in_table, in_tree = {row.code for row in table()}, {cls.code for cls in tree()}
    assert in_tree - in_table == set(), "missing in docs/errors.md"
    assert in_table - in_tree == set(), "in docs/errors.md, but not in the tree"


def test_a_code_names_one_error_and_has_one_row() -> None:
    for codes in ([row.code for row in table()], [cls.code for cls in tree()]):
        assert [code for code, count in Counter(codes).items() if count > 1] == []


def test_the_tree_stands_in_one_module() -> None:
    assert {cls.__module__ for cls in tree()} == {errors.__name__}


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.code)
def test_the_row_says_what_the_error_does(cls: type[MediatorError]) -> None:
    (row,) = [row for row in table() if row.code == cls.code]
    assert (row.status, row.retry, row.text) == (cls.status, cls.retry, text_pattern(cls))
    assert row.when.endswith(".")
