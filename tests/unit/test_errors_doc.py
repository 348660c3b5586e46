"""Keeps the table in docs/errors.md whole: it and the tree in mediator/errors.py say the same."""

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web

from mediator import errors
from mediator.errors import MediatorError
from mediator.http.app import CODES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
ROW = re.compile(
    r"^\| `(?P<code>[a-z_]+)` \| (?P<status>\d{3}) \| `(?P<text>[^`]+)` \| (?P<retry>yes|no) \| (?P<when>.+) \|$"
)


HTTP_ROW = re.compile(r"^\| `(?P<code>[a-z_]+)` \| (?P<status>\d{3}) \| .+\. \|$")
OF_AIOHTTP = (web.HTTPNotFound, web.HTTPMethodNotAllowed, web.HTTPRequestEntityTooLarge, web.HTTPExpectationFailed)
"""What aiohttp answers by itself."""


class Row(NamedTuple):
    code: str
    status: int
    text: str
    retry: bool
    when: str


def section(number: int) -> list[str]:
    """The lines of a table."""
    text = PAGE.read_text(encoding="utf-8").split("\n## ")[number]
    return [line for line in text.splitlines() if line.startswith("|")]


def table() -> list[Row]:
    lines = section(0)
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
    if "text" in vars(cls) and cls is not MediatorError:
        return str(cls())
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


def test_what_http_answers_by_itself_is_in_the_table() -> None:
    rows = [HTTP_ROW.match(line) for line in section(1)[2:]]
    assert all(rows)
    sources = [path for part in ("mediator", "pickup", "registry") for path in (ROOT / part).rglob("*.py")]
    raised = {name for path in sources for name in re.findall(r"web\.(HTTP[A-Z]\w+)", path.read_text("utf-8"))}
    kinds = {getattr(web, name) for name in raised - {"HTTPException"}} | {*OF_AIOHTTP}
    assert {kind.status_code for kind in kinds} | {504} == {*CODES}
    assert {int(row["status"]): row["code"] for row in rows if row} == CODES
