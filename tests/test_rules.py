"""Every rule of docs/protocol.md has a test that names it, and no test names a rule that is not there.

Tests name rules with the marker ``rule``. The files are read, not run, so this holds whichever tests were chosen.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.harness.parsing import parse

TESTS = Path(__file__).parent
PROTOCOL = TESTS.parent / "docs" / "protocol.md"

SECTIONS = "ANMSFKQCGED"

Use = tuple[str, str]
"""A rule, and where a marker names it."""


def stated() -> list[str]:
    """Return the numbers of all rules, in the order of the page."""
    return re.findall(r"^\s*[-*]?\s*\*\*([A-Z]\d+)\*\*", PROTOCOL.read_text(encoding="utf-8"), re.MULTILINE)


def named(text: str, where: str) -> Iterator[Use]:
    """Return what the markers in a file name; a marker that is not plain strings counts as naming what it shows."""
    for node in ast.walk(parse(text, where)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "rule"
            and ast.unparse(node.func.value) in ("pytest.mark", "mark")
        ):
            place = f"{where}:{node.lineno}"
            if not node.args:
                yield "nothing", place
            for argument in node.args:
                plain = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                yield (argument.value if plain else ast.unparse(argument)), place


@cache
def all_named() -> list[Use]:
    """Return what the markers of all test files name."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)}
    return [
        use for path, text in texts.items() if "mark.rule" in text for use in named(text, str(path.relative_to(TESTS)))
    ]


def test_the_page_numbers_its_rules_without_a_gap():
    rules = stated()
    assert len(rules) == len(set(rules)), "a rule is stated twice"
    for section in SECTIONS:
        numbers = [int(rule[1:]) for rule in rules if rule[0] == section]
        assert numbers, f"section {section} states no rule"
        assert numbers == list(range(1, len(numbers) + 1)), f"section {section} leaves out a number"
    assert {rule[0] for rule in rules} == set(SECTIONS)


def test_every_rule_has_a_test():
    covered = {rule for rule, _ in all_named()}
    missing = [rule for rule in stated() if rule not in covered]
    assert not missing, f"{len(missing)} rules have no test that names them: {', '.join(missing)}"


def test_every_marker_names_a_rule():
    rules = set(stated())
    wrong = [f"{where} names {rule}" for rule, where in all_named() if rule not in rules]
    assert not wrong, "these are no rules of docs/protocol.md:\n" + "\n".join(wrong)


def test_markers_are_found_wherever_they_stand():
    text = """
import pytest
pytestmark = pytest.mark.rule("A1")
@pytest.mark.rule("A2", "A3")
class TestIt:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=[pytest.mark.rule("A4")])])
    @pytest.mark.rule(SOME)
    async def test_it(self): ...
    @pytest.mark.rule()
    def test_more(self): ...
@rule("A9")
def step(): ...
"""
    assert sorted(named(text, "f")) == [
        ("A1", "f:3"),
        ("A2", "f:4"),
        ("A3", "f:4"),
        ("A4", "f:6"),
        ("SOME", "f:7"),
        ("nothing", "f:9"),
    ]
