"""The processes of an acceptance test, and their logs in the report of one that failed."""

from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.service import Services
from tests.postgres import postgres

__all__ = ["postgres"]

SERVICES = pytest.StashKey[Services]()


@pytest.fixture
async def services(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Services]:
    """Make services of this test's own; they end with it."""
    services = Services(tmp_path)
    request.node.stash[SERVICES] = services
    try:
        yield services
    finally:
        services.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Show the end of each process's log with the failure."""
    report = yield
    services = item.stash.get(SERVICES, None)
    if report.failed and services is not None:
        for name, said in services.logs():
            report.sections.append((f"log of {name}", said))
    return report
