"""The stores every conformance test runs on: SQLite and PostgreSQL."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from tests.harness.postgres import Server
from tests.harness.stores import ram_path

KINDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


class Opened:
    """A store, and the way to open it again on the same data."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open = open_store
        self.store = open_store()

    def close(self) -> None:
        """Close whichever store is open now."""
        self.store.close()

    def reopen(self) -> Store:
        """Close the store, as a restart would, and open its successor."""
        self.store.close()
        self.store = self._open()
        return self.store


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which store the test runs on."""
    kind: str = request.param
    return kind


@pytest.fixture
def new_store(kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[[], Opened]]:
    """Make as many empty stores as a test wants, each with data of its own."""
    with contextlib.ExitStack() as stack:

        def make() -> Opened:
            opened = Opened(_opener(kind, request, stack))
            stack.callback(opened.close)
            return opened

        yield make


def _opener(kind: str, request: pytest.FixtureRequest, stack: contextlib.ExitStack) -> Callable[[], Store]:
    if kind == "sqlite":
        path = ram_path()
        return lambda: SqliteStore(path)
    server: Server = request.getfixturevalue("postgres")
    # Its driver is an extra: asked for after the fixture, which skips without it.
    from mediator.store.postgres import PostgresStore

    url = stack.enter_context(server.emptied())
    return lambda: PostgresStore(url)


@pytest.fixture
def opened(new_store: Callable[[], Opened]) -> Opened:
    """An empty store that a test may reopen in its midst."""
    return new_store()


@pytest.fixture
def store(opened: Opened) -> Store:
    """An empty store."""
    return opened.store


@pytest.fixture
def reopen(opened: Opened) -> Callable[[], Store]:
    """Close the store and open it again on the same data; what is left must be what was committed."""
    return opened.reopen
