"""Imports run one way: doors → service → domain; the domain does no I/O and owns no clock."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mediator", "pickup", "pipeline", "registry")

FORBIDDEN = {
    "mediator/mailboxes": [
        "mediator.mediation",
        "mediator.store",
        "mediator.broker",
        "mediator.nats",
        "mediator.http",
        "mediator.settings",
        "pickup",
    ],
    "mediator/mediation": [
        "mediator.store",
        "mediator.broker",
        "mediator.nats",
        "mediator.http",
        "mediator.settings",
        "pickup",
    ],
    "mediator/agents": [
        "mediator.mediation",
        "mediator.store",
        "mediator.broker",
        "mediator.nats",
        "mediator.http",
        "mediator.settings",
        "pickup",
        "registry",
    ],
    "mediator/runs": [
        "mediator.mailboxes",
        "mediator.mediation",
        "mediator.agents",
        "mediator.store",
        "mediator.broker",
        "mediator.nats",
        "mediator.http",
        "mediator.settings",
        "pickup",
        "registry",
        "pipeline",
    ],
    "mediator/store": [
        "mediator.broker",
        "mediator.nats",
        "mediator.http",
        "mediator.service",
        "mediator.operators",
        "pickup",
        "registry",
    ],
    "mediator/broker.py": [
        "mediator.nats",
        "mediator.http",
        "mediator.service",
        "mediator.operators",
        "mediator.settings",
        "pickup",
        "registry",
    ],
    "mediator/housekeeping": ["mediator.nats", "mediator.http", "mediator.service", "mediator.cli"],
    "mediator/operators": ["mediator.nats", "mediator.service", "mediator.cli"],
    "mediator/nats": [
        "mediator.store.sql",
        "mediator.store.sqlite",
        "mediator.service",
        "mediator.cli",
        "mediator.settings",
    ],
    "mediator/gateway": [
        "mediator.broker",
        "mediator.http",
        "mediator.mailboxes",
        "mediator.service",
        "mediator.settings",
        "mediator.store",
        "mediator.cli",
        "registry",
        "pickup",
    ],
    "mediator/http": ["mediator.store", "mediator.nats", "mediator.service", "mediator.cli"],
    "mediator/service.py": ["mediator.cli"],
    "registry": [
        "mediator.store.sql",
        "mediator.store.sqlite",
        "mediator.store.postgres",
        "mediator.nats",
        "mediator.service",
        "mediator.cli",
        "pickup",
        "pipeline",
    ],
    "pipeline": [
        "mediator.broker",
        "mediator.store",
        "mediator.nats",
        "mediator.http",
        "mediator.service",
        "mediator.cli",
        "pickup",
    ],
    "pipeline/lake": ["registry", "pipeline.embedding"],
    "pipeline/reports": ["registry", "pipeline.embedding"],
    "pipeline/source": ["registry", "pipeline.embedding"],
    "pickup": [
        "registry",
        "mediator.store.sql",
        "mediator.store.sqlite",
        "mediator.store.postgres",
        "mediator.nats",
        "mediator.service",
        "mediator.cli",
    ],
}
DOMAIN = ("mediator/mailboxes", "mediator/mediation", "mediator/agents", "mediator/runs")
OUTSIDE_WORLD = {"time", "datetime", "random", "secrets", "os", "asyncio", "threading", "socket", "pathlib", "sqlite3"}


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


@pytest.mark.parametrize("part", DOMAIN)
def test_the_domain_knows_no_clock_no_input_and_no_library(part: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(part)
        for name in imports(path)
        if name.split(".")[0] not in (sys.stdlib_module_names - OUTSIDE_WORLD) | {"mediator"}
    ]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_in_its_first_line_what_it_is_in_charge_of(package: str) -> None:
    silent = [str(path) for path in modules(package) if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []
