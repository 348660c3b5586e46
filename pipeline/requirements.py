"""Checks that the installed Spark is recent enough for the pipeline."""

import re
from importlib.metadata import version

from mediator.errors import SetupError

OLDEST = (4, 2)
"""The first release whose stream sources in Python say how much they take at once."""


def check_installed() -> None:
    """Raise :class:`SetupError` with the remedy unless this Python's pyspark is new enough."""
    check_version(version("pyspark"), "pyspark", "pip install --upgrade 'agent-mediator[pipeline]'")


def check_version(found: str, what: str, remedy: str) -> None:
    """Raise :class:`SetupError` for a version of Spark before :data:`OLDEST`."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise SetupError(f"{what} is {found}, the pipeline needs {'.'.join(map(str, OLDEST))} or newer: {remedy}")
