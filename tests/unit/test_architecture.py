"""The rules do no I/O and own no clock; which package may import which is checked by import-linter (pyproject.toml)."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.parsing import parse

ROOT = Path(__file__).parents[2]
PACKAGES = ("conformance", "mediator", "pickup", "pipeline", "registry")

RULES = ("mediator/mailboxes", "pickup/rules", "registry/records.py", "registry/rules.py")
OUTSIDE_WORLD = {"time", "datetime", "random", "secrets", "os", "asyncio", "threading", "socket", "pathlib", "sqlite3"}
LIBRARIES = {"mediator/mailboxes/rows.py": {"orjson"}, "pickup/rules/tables.py": {"orjson"}}
"""What a module beside the rules may use all the same: rows hold a little JSON."""


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(part: str) -> list[Path]:
    found = [ROOT / part] if part.endswith(".py") else sorted((ROOT / part).rglob("*.py"))
    assert found, part
    return found


@pytest.mark.parametrize("part", RULES)
def test_rules_use_no_clock_no_io_and_no_library(part: str) -> None:
    allowed = (sys.stdlib_module_names - OUTSIDE_WORLD) | set(PACKAGES)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(part)
        for name in imports(path)
        if name.split(".")[0] not in allowed | LIBRARIES.get(str(path.relative_to(ROOT)), set())
    ]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_a_docstring(package: str) -> None:
    silent = [str(path) for path in modules(package) if not ast.get_docstring(parse(path.read_text()))]
    assert silent == []
