"""The doctor's findings about damaged pages, lost messages, and files that others may read."""

from collections.abc import Iterator
from pathlib import Path

from mediator.errors import MediatorError
from mediator.operators.diagnosis import Finding, Level
from mediator.private_files import exposed
from mediator.store.base import Integrity
from mediator.store.opening import database_path
from mediator.store.sqlite import find_damage

CHECK_SECONDS = 5.0
"""How long a look at the whole database may take while somebody waits for it."""
OFFLINE_SECONDS = 60.0
SHOWN = 10

_RESTORE = (
    "Stop the service, copy mediator.db, -wal and -shm aside, and put a backup back, or what "
    "`sqlite3 mediator.db .recover` saves; docs/operations.md says how."
)


def offline_findings(data_dir: Path) -> Iterator[Finding]:
    """Look at the whole database where no service runs, if there is one."""
    database = database_path(data_dir)
    if database.exists():
        try:
            yield from damage_findings(find_damage(database, OFFLINE_SECONDS))
        except MediatorError as error:
            yield Finding(Level.PROBLEM, f"The database cannot be read: {error}.", _RESTORE)


def damage_findings(found: Integrity) -> Iterator[Finding]:
    """Say what a look at the whole database found, and how far it came."""
    for problem in found.problems[:SHOWN]:
        yield Finding(Level.PROBLEM, f"The database is damaged: {problem}.", _RESTORE)
    if found.unchecked:
        yield Finding(
            Level.NOTE,
            f"The database is large: there was time to check {found.checked} of its tables, but not "
            f"{', '.join(found.unchecked)}.",
            "For all of it: `sqlite3 mediator.db 'PRAGMA quick_check'` on a copy or while the service is stopped.",
        )
    elif found.checked and not found.problems:
        yield Finding(Level.OK, "The database is intact.")


def missing_findings(missing: int) -> Iterator[Finding]:
    """Report how many messages the journal had at the last start and the database did not."""
    if missing:
        count = "1 message" if missing == 1 else f"{missing} messages"
        yield Finding(
            Level.PROBLEM,
            f"The database has lost {count} or more that the journal has as stored.",
            "If no backup was put back, its log was damaged: check the disk. The journal names the mailboxes.",
        )


def file_findings(data_dir: Path) -> Iterator[Finding]:
    """Say which files others may read that only the service should."""
    found = list(exposed(data_dir))
    for path in found[:SHOWN]:
        mode = path.lstat().st_mode & 0o777
        yield Finding(
            Level.PROBLEM,
            f"{path} has mode {mode:o}: others on this machine may read it.",
            "Take the permission away (chmod go=), or give the service a data directory and a user of its own.",
        )
