"""Imports run one way: doors → service → domain; the domain does no I/O and owns no clock."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "mediator"

FORBIDDEN = {
    "mailboxes": ["mediator.store", "mediator.broker", "mediator.nats", "mediator.http", "mediator.settings"],
    "store": ["mediator.broker", "mediator.nats", "mediator.http", "mediator.service", "mediator.operators"],
    "broker.py": ["mediator.nats", "mediator.http", "mediator.service", "mediator.operators", "mediator.settings"],
    "housekeeping": ["mediator.nats", "mediator.http", "mediator.service", "mediator.cli"],
    "operators": ["mediator.nats", "mediator.service", "mediator.cli"],
    "nats": ["mediator.store.sql", "mediator.store.sqlite", "mediator.service", "mediator.cli", "mediator.settings"],
    "http": ["mediator.store", "mediator.nats", "mediator.service", "mediator.cli"],
    "service.py": ["mediator.cli"],
}
OUTSIDE_WORLD = {"time", "datetime", "random", "secrets", "os", "asyncio", "threading", "socket", "pathlib", "sqlite3"}
LIBRARIES = {"peewee", "playhouse", "psycopg", "nats", "aiohttp", "apscheduler", "orjson", "structlog"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(part: str) -> list[Path]:
    found = [ROOT / part] if part.endswith(".py") else sorted((ROOT / part).rglob("*.py"))
    assert found, part
    return found


@pytest.mark.parametrize("part", FORBIDDEN)
def test_imports_run_one_way(part: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(part)
        for name in imports(path)
        if any(name == barred or name.startswith(f"{barred}.") for barred in FORBIDDEN[part])
    ]
    assert wrong == []


def test_the_domain_knows_no_clock_no_input_and_no_library() -> None:
    wrong = [
        f"{path.name} imports {name}"
        for path in modules("mailboxes")
        for name in imports(path)
        if name.split(".")[0] in OUTSIDE_WORLD | LIBRARIES
    ]
    assert wrong == []


def test_every_module_says_in_its_first_line_what_it_is_in_charge_of() -> None:
    silent = [str(path) for path in sorted(ROOT.rglob("*.py")) if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []
