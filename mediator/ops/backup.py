"""Backs up, restores and moves the whole database, with the keys that are kept beside it if wanted."""

import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mediator import __version__
from mediator.config.settings import Settings
from mediator.errors import SetupError, UnavailableError
from mediator.ops.backup_file import DATABASE, FORMAT, BackupFile, BackupManifest, write_backup
from mediator.ops.journal import FOLDER, count_accepted
from mediator.store.opening import database_path, make_data_dir
from mediator.store.sqlite_copy import (
    Progress,
    altered_objects,
    check_sqlite,
    connect,
    copy_sqlite,
    count_rows,
    foreign_objects,
    prepare,
)
from mediator.store.sqlite_file import hold
from mediator.system.private_files import open_file

IDS_PER_MILLISECOND = 100
"""More msg_ids than any mailbox can give; measured are fewer than that for a whole service."""
MIN_SKIP = 1_000_000
"""Ids that are skipped at least, whatever the clocks say."""
WORKING = ".mediator-backup-"
"""How the names of folders begin in which a backup is made or read."""
_NUMBERED = ("mailbox",)
"""The tables of the core whose numbers others know: a send-only address hides one, the journal and the lake name it."""


@dataclass(frozen=True, slots=True)
class BackupScope:
    """What the parts have that is not in the rows of their tables, or that others know of these."""

    keys: Mapping[str, bytes]
    """The keys that are there, by their file's name in the data directory (``Part.keys``)."""
    key_files: Collection[str]
    """The names that a file of keys may have (``Part.key_files``)."""
    known_numbers: Sequence[str]
    """Tables whose numbers others know (``Part.known_numbers``)."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did."""

    manifest: BackupManifest
    skipped: int
    """How many msg_ids each mailbox skips."""
    later: int
    """Messages that came after the backup, says the journal in the data directory."""
    missing_keys: list[str]
    """Keys that are needed, and neither in the backup nor in the data directory or the settings."""


def backup(
    settings: Settings, scope: BackupScope, file: Path, *, with_keys: bool, on_progress: Progress
) -> BackupManifest:
    """Write a backup of the database to the new file ``file``, whether a service runs or not, and return what is in it.

    It has everything that was committed before it began. The folder needs room for two copies of the database
    meanwhile. Raises :class:`SetupError` when the file exists or there is no database, :class:`StoreDamagedError` when
    the database is damaged, :class:`UnavailableError` when it does not answer.
    """
    if file.exists():
        raise SetupError(f"{file} is there already; nothing was written")
    keys = scope.keys if with_keys else {}
    with _working_folder(file.absolute().parent) as folder:
        copy = folder / DATABASE
        taken_at = _now()
        if settings.store_url is None:
            copy_sqlite(_existing_database(settings), copy, on_progress)
        else:
            from mediator.store.postgres_copy import copy_postgres

            copy_postgres(settings.store_url, copy, settings.migrations_of_parts, on_progress)
        check_sqlite(copy)
        manifest = BackupManifest(
            format=FORMAT,
            version=__version__,
            instance=settings.instance,
            database="sqlite" if settings.store_url is None else "postgresql",
            taken_at=taken_at,
            rows=_count(copy),
            left_out=[name for name in scope.keys if name not in keys],
            files={},
        )
        written = folder / "backup.tar"
        manifest = write_backup(written, copy, keys, manifest, on_progress)
        written.rename(file)
        _sync(file.absolute().parent)
    return manifest


def restore(settings: Settings, scope: BackupScope, file: Path, *, on_progress: Progress) -> Restored:
    """Make the database of the settings, which must not exist yet, from a backup of either kind of database.

    No number that was given out after the backup is given again. Raises :class:`SetupError` when there is a database
    already, or the file is damaged or no backup; :class:`SchemaError` when a newer program made it;
    :class:`StoreHeldError` when a service runs; :class:`UnavailableError` when the database cannot be written. Nothing
    was changed then.
    """
    with closing(BackupFile(file)) as source, _prepared_folder(settings) as folder:
        manifest = source.manifest
        if unknown := sorted(set(manifest.keys) - set(scope.key_files)):
            raise SetupError(f"{file.name} lists a key that no part of this program has: {unknown[0][:80]}")
        keys = {name: source.key(name) for name in manifest.keys}
        for name, key in keys.items():
            if scope.keys.get(name, key).strip() != key.strip():
                raise SetupError(f"{name} here is another key than the backup's; remove it, or the one in the settings")
        copy = folder / DATABASE
        source.extract_database(copy, on_progress)
        with closing(connect(copy)) as connection:
            foreign = foreign_objects(connection, settings.migrations_of_parts)
        if foreign:
            raise SetupError(f"{file.name} is no backup: its database has a {foreign[0]}, which no migration makes")
        if _count(copy) != manifest.rows:
            raise SetupError(f"{file.name} is damaged: its tables have other numbers of rows than its list")
        skip = max(MIN_SKIP, (_now() - manifest.taken_at) * IDS_PER_MILLISECOND)
        prepare(copy, settings.migrations_of_parts, skip, [*_NUMBERED, *scope.known_numbers])
        with closing(connect(copy)) as connection:
            altered = altered_objects(connection, settings.migrations_of_parts)
        if altered:
            raise SetupError(f"{file.name} is no backup: its {altered[0]} is declared otherwise than migrations do")
        later = count_accepted(settings.data_dir / FOLDER, manifest.taken_at)
        for name, key in keys.items():
            if name not in scope.keys:
                _write_key(settings.data_dir / name, key)
        _install(settings, copy, on_progress)
        return Restored(manifest, skip, later, [name for name in manifest.left_out if name not in scope.keys])


def migrate_to(settings: Settings, url: str, *, on_progress: Progress) -> Mapping[str, int]:
    """Copy the SQLite database of a service that does not run into the empty PostgreSQL database at ``url``.

    The file stays as it is. Returns the number of rows of each table. Raises :class:`SetupError` when the settings or
    the target do not fit, :class:`StoreHeldError` when the service runs, :class:`UnavailableError` when PostgreSQL does
    not answer; the target is empty then.
    """
    if settings.store_url is not None:
        raise SetupError("database_url: the service's database is PostgreSQL already")
    from mediator.store.postgres_copy import fill_postgres

    path = _existing_database(settings)
    with closing(hold(path)):
        prepare(path, settings.migrations_of_parts, 0, ())
        fill_postgres(url, path, settings.migrations_of_parts, on_progress)
        return _count(path)


def _now() -> int:
    return time.time_ns() // 1_000_000


def _existing_database(settings: Settings) -> Path:
    path = database_path(settings.data_dir)
    if not path.exists():
        raise SetupError(f"data_dir: no database in {settings.data_dir}")
    return path


def _count(path: Path) -> dict[str, int]:
    with closing(connect(path)) as connection:
        return count_rows(connection)


@contextmanager
def _working_folder(parent: Path) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix=WORKING, dir=parent) as folder:
            yield Path(folder)
    except OSError as error:
        raise UnavailableError(f"cannot write in {parent}: {error.strerror}") from error


@contextmanager
def _prepared_folder(settings: Settings) -> Iterator[Path]:
    """Hold the data directory, which has no database yet, and make a working folder in it."""
    make_data_dir(settings.data_dir)
    path = database_path(settings.data_dir)
    with ExitStack() as stack:
        if settings.store_url is None:
            stack.enter_context(closing(hold(path)))
            # What is left of a write-ahead log would be taken for the restored database's.
            for file in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
                if file.exists():
                    raise SetupError(f"data_dir: {file} is there already; move it away, or name another --data-dir")
        yield stack.enter_context(_working_folder(settings.data_dir))


def _install(settings: Settings, database: Path, on_progress: Progress) -> None:
    if settings.store_url is not None:
        from mediator.store.postgres_copy import fill_postgres

        fill_postgres(settings.store_url, database, settings.migrations_of_parts, on_progress)
        return
    _sync(database)
    database.rename(database_path(settings.data_dir))
    _sync(settings.data_dir)


def _write_key(path: Path, key: bytes) -> None:
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
