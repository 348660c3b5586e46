"""The doctor's findings about the installation: database, disk, journal, and files that others may read."""

import os
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from mediator.errors import MediatorError, StoreDamagedError
from mediator.journal.segments import read_gaps
from mediator.mailboxes.bounds import DAY
from mediator.ops.diagnosis import Finding, Level
from mediator.ops.units import format_bytes, format_count, format_time
from mediator.store.base import Integrity
from mediator.store.opening import database_path
from mediator.store.sqlite_file import find_damage
from mediator.system.private_files import exposed

CHECK_SECONDS = 5.0
"""Time limit for checking the whole database while an operator waits."""
OFFLINE_SECONDS = 60.0
FREE_PART = 0.05
FREE_BYTES = 1 << 30
"""The disk is nearly full with less than this free, or less than :data:`FREE_PART` of it."""
LARGE_WAL = 256 << 20
"""Bytes of a write-ahead log that is too long."""
EXPIRES_SOON = timedelta(days=14)
SHOWN = 10

_RESTORE = (
    "Stop the service, copy mediator.db, -wal and -shm aside, and restore a backup, or what "
    "`sqlite3 mediator.db .recover` saves; see docs/operations.md."
)


def offline_findings(data_dir: Path) -> Iterator[Finding]:
    """Check the directory and the whole database, if there is one, while no service runs."""
    if data_dir.is_dir() and not os.access(data_dir, os.W_OK):
        yield Finding(
            Level.PROBLEM,
            f"{data_dir} cannot be written: no service can start there.",
            "Make it writable for the user that runs the service, unless it is read-only on purpose: verify, backup "
            "and Spark read it as it is.",
        )
    database = database_path(data_dir)
    if database.exists():
        try:
            yield from damage_findings(find_damage(database, OFFLINE_SECONDS))
        except StoreDamagedError as error:
            yield Finding(Level.PROBLEM, f"The database cannot be read: {error}.", _RESTORE)
        except MediatorError as error:
            yield Finding(Level.PROBLEM, f"The database cannot be read: {error}.")


def damage_findings(found: Integrity) -> Iterator[Finding]:
    """Report the result of a check of the whole database."""
    for problem in found.problems[:SHOWN]:
        yield Finding(Level.PROBLEM, f"The database is damaged: {problem}.", _RESTORE)
    if found.unchecked:
        yield Finding(
            Level.NOTE,
            f"The database is large: {found.checked} of its tables were checked in time, but not "
            f"{', '.join(found.unchecked)}.",
            "To check all of it: `sqlite3 mediator.db 'PRAGMA quick_check'` on a copy or while the service is stopped.",
        )
    elif found.checked and not found.problems:
        yield Finding(Level.OK, "The database is intact.")


def certificate_findings(files: Mapping[str, Path | None], now: datetime | None = None) -> Iterator[Finding]:
    """Report certificates that have expired or will soon; ``files`` by the option that names each."""
    now = now or datetime.now(UTC)
    for option, file in files.items():
        if file is None:
            continue
        try:
            ends = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
        except (OSError, ValueError):
            yield Finding(
                Level.PROBLEM, f"{option}: {file.name} cannot be read as a certificate.", "Put a PEM file there."
            )
            continue
        if ends - now < EXPIRES_SOON:
            when = "has expired" if ends <= now else "expires"
            yield Finding(
                Level.PROBLEM,
                f"{option}: the certificate {when} on {ends:%Y-%m-%d %H:%M} UTC.",
                "Replace the file by a renewed one; new connections use it at once.",
            )


def missing_findings(missing: int) -> Iterator[Finding]:
    """Report how many messages the journal had and the database lacked at the last start."""
    if missing:
        count = "1 message" if missing == 1 else f"{missing} messages"
        yield Finding(
            Level.PROBLEM,
            f"The database has lost at least {count} that the journal has as stored.",
            "Unless a backup was restored, its write-ahead log was damaged: check the disk. The journal has the "
            "numbers of the mailboxes.",
        )


def file_findings(data_dir: Path) -> Iterator[Finding]:
    """Report files that other users may read."""
    found = list(exposed(data_dir))
    for path in found[:SHOWN]:
        mode = path.lstat().st_mode & 0o777
        yield Finding(
            Level.PROBLEM,
            f"{path} has mode {mode:o}: other users of this machine may read it.",
            "Remove the permission (chmod go=), or give the service its own user and data directory.",
        )


def disk_findings(data_dir: Path) -> Iterator[Finding]:
    """Report free disk space and the size of the write-ahead log; needs no running service."""
    try:
        disk = shutil.disk_usage(data_dir)
    except OSError as error:
        yield Finding(Level.PROBLEM, f"cannot read the disk usage of {data_dir}: {error.strerror}.")
        return
    free = f"{format_bytes(disk.free)} of {format_bytes(disk.total)} are free under {data_dir}."
    if disk.free < min(FREE_BYTES, disk.total * FREE_PART):
        yield Finding(
            Level.PROBLEM,
            free,
            "Free some space: on a full disk every SEND is refused. `mediator cleanup` frees that of expired mail.",
        )
    else:
        yield Finding(Level.OK, free)
    database = database_path(data_dir)
    if not database.exists():
        return
    wal = database.with_name(f"{database.name}-wal")
    size = wal.stat().st_size if wal.exists() else 0
    if size > LARGE_WAL:
        yield Finding(
            Level.PROBLEM,
            f"The write-ahead log has grown to {format_bytes(size)}.",
            "A process outside the service holds a long read on the database: end it.",
        )
    else:
        yield Finding(
            Level.OK, f"The database has {format_bytes(database.stat().st_size)}, its log {format_bytes(size)}."
        )


def journal_findings(folder: Path, now: int) -> Iterator[Finding]:
    """Report events that are missing in the journal; ``now``: milliseconds since the epoch."""
    gaps = read_gaps(folder)
    if not gaps:
        return
    events = sum(gap["events"] for gap in gaps)
    since, until = min(gap["from"] for gap in gaps), max(gap["to"] for gap in gaps)
    yield Finding(
        Level.PROBLEM if any(now - gap["at"] < DAY for gap in gaps) else Level.NOTE,
        f"The journal has gaps: {format_count(events, 'event')} between {format_time(since / 1000)} and "
        f"{format_time(until / 1000)} were dropped before they were read.",
        "Read the journal more often, or raise journal.total_mb; the mail itself is untouched.",
    )
