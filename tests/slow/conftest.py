"""The order of slow tests, and what they print although they passed: a test records it as the property ``printed``."""

from pathlib import Path
from typing import Any

import pytest

FIRST = ("spark", "test_state_machines.py", "crash", "newcomers", "test_package.py")
"""Files and folders of tests that take minutes: begun at the end, they would leave the other processes idle."""
LAST = "rules"
"""A folder of hundreds of short tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin what takes long first."""

    def rank(item: pytest.Item) -> int:
        here = Path(__file__).parent
        name = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        return FIRST.index(name) if name in FIRST else len(FIRST) + (name == LAST)

    items.sort(key=rank)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "printed":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(value)
