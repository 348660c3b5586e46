"""What ``mediator verify`` finds in a store that a test has used."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mediator.parts import verify_checks
from mediator.store.base import Store
from mediator.store.snapshots import Ask
from mediator.verify.checks import Installation
from mediator.verify.database import mailbox_checks
from mediator.verify.report import VerifyReport, verify
from pickup.maintenance import mediation_checks
from registry.maintenance import registry_checks
from tests.harness.core import make_settings
from tests.harness.service import Service


class StoreSnapshots:
    """Snapshots of an open store, of whatever kind."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.shared = not store.quick

    @contextmanager
    def open(self) -> Iterator[Ask]:
        with self._store.reading() as tx:
            yield tx.session.dialect.execute


def damage_in(store: Store | StoreSnapshots) -> list[str]:
    """Return what the checks of the core and of the parts find in the tables, as text."""
    installation = Installation(store if isinstance(store, StoreSnapshots) else StoreSnapshots(store), Path())
    checks = [*mailbox_checks(), *mediation_checks(), *registry_checks()]
    found = [damage for check in checks for damage in check.run(installation, lambda _part: None)]
    return [f"{damage.kind.code}: {example}" for damage in found for example in damage.examples]


def damage_of(service: Service) -> list[str]:
    """Return what ``mediator verify`` finds in the data of a service, beside it or without it."""
    settings = make_settings(data_dir=service.data_dir, database_url=service.options.get("database_url"))
    found = verify(settings, verify_checks(settings), lambda _title, _part: None).damage
    return [f"{damage.kind.code}: {example}" for damage in found for example in damage.examples]


def assert_intact(store: Store, *, but: str = "-") -> None:
    """Fail when a store that was only used has rows that ``verify`` would call damaged; ``but`` names one kind."""
    assert [text for text in damage_in(store) if not text.startswith(but)] == []


def verify_all(data_dir: Path) -> VerifyReport:
    """Run all checks on the SQLite database and the journal of a data directory."""
    settings = make_settings(data_dir=data_dir)
    return verify(settings, verify_checks(settings), lambda _title, _part: None)
