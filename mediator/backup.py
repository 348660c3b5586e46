"""Backs up, restores and moves the whole database, with the keys that are kept beside it if wanted.

The file of a backup is a tar: the database as an SQLite file, keys if wanted, and last a manifest of them.

Any SQLite opens ``mediator.db``. A file that ends too early has no manifest. :data:`FORMAT` counts up when older
programs cannot read a file any more.
"""

import hashlib
import io
import os
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import orjson
from pydantic import BaseModel, Field, ValidationError

from mediator import __version__
from mediator.errors import SetupError, UnavailableError
from mediator.journal import FOLDER, count_accepted
from mediator.settings.settings import Settings
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
from mediator.system.gentle_copy import GentleCopy
from mediator.system.private_files import open_file

FORMAT = 1
DATABASE = "mediator.db"
MANIFEST = "manifest.json"
KEYS = "keys/"
"""The folder of keys in the file; each is named as in the data directory."""
CHUNK = 1 << 20
MAX_MEMBERS = 100
MAX_MANIFEST = 1 << 20
MAX_KEY = 1 << 16
IDS_PER_MILLISECOND = 100
"""More msg_ids than any mailbox can give; measured are fewer than that for a whole service."""
MIN_SKIP = 1_000_000
"""Ids that are skipped at least, whatever the clocks say."""
WORKING = ".mediator-backup-"
"""How the names of folders begin in which a backup is made or read."""
_NUMBERED = ("mailbox",)
"""The tables of the core whose numbers others know: a send-only address hides one, the journal and the lake name it."""


class BackupMember(BaseModel):
    """A file in a backup."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class BackupManifest(BaseModel):
    """What a backup holds, and when and of what it was made."""

    format: int
    version: str
    """Of the program that made it."""
    instance: str
    database: str
    """``sqlite`` or ``postgresql``: where the rows came from."""
    taken_at: int
    """All that was committed before is in it; milliseconds since the epoch."""
    rows: dict[str, int]
    """How many rows each table has."""
    left_out: list[str]
    """The names of the keys that are needed and not in it."""
    files: dict[str, BackupMember]

    @property
    def keys(self) -> list[str]:
        """The names of the keys in it."""
        return [name.removeprefix(KEYS) for name in self.files if name.startswith(KEYS)]


class _Measured:
    """Reads a file and computes what its manifest says of it."""

    def __init__(self, file: IO[bytes], size: int, what: str, on_progress: Progress, gentle: GentleCopy | None) -> None:
        self._file = file
        self._size = size
        self._what = what
        self._on_progress = on_progress
        self._gentle = gentle
        self._done = 0
        self._hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        self._done += len(data)
        if self._gentle is not None:
            self._gentle.written(len(data))
        self._on_progress(self._what, self._done, self._size)
        return data

    @property
    def member(self) -> BackupMember:
        return BackupMember(bytes=self._done, sha256=self._hash.hexdigest())


def write_backup(
    path: Path, database: Path, keys: Mapping[str, bytes], manifest: BackupManifest, on_progress: Progress
) -> BackupManifest:
    """Write the new file ``path``, readable by its owner only, and return its manifest with the files in it.

    It is on the disk before this returns.
    """
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        # Headers of this form hold any size; those of the default would take some blocks more for large files.
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
            gentle = GentleCopy(file.fileno())
            with database.open("rb") as source:
                size = os.fstat(source.fileno()).st_size
                files = {DATABASE: _add(tar, DATABASE, source, size, on_progress, gentle)}
            for name, key in keys.items():
                files[KEYS + name] = _add(tar, KEYS + name, io.BytesIO(key), len(key), on_progress, None)
            manifest = manifest.model_copy(update={"files": files})
            text = orjson.dumps(manifest.model_dump(), option=orjson.OPT_INDENT_2)
            _add(tar, MANIFEST, io.BytesIO(text), len(text), on_progress, None)
        file.flush()
        os.fsync(file.fileno())
    return manifest


def _add(
    tar: tarfile.TarFile, name: str, source: IO[bytes], size: int, on_progress: Progress, gentle: GentleCopy | None
) -> BackupMember:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o600, int(time.time())
    measured = _Measured(source, size, "written", on_progress, gentle)
    tar.addfile(entry, measured)  # type: ignore[arg-type]
    return measured.member


class BackupFile:
    """A backup that is read. Close it when done."""

    def __init__(self, path: Path) -> None:
        """Open the file and read its manifest.

        Raises :class:`SetupError` when it is no backup, damaged, incomplete, or of a newer program; :class:`OSError`
        when it cannot be read.
        """
        self._path = path
        self._file = path.open("rb")
        try:
            self._members = self._find_members()
            self.manifest = self._read_manifest()
        except BaseException:
            self._file.close()
            raise

    def _damaged(self, why: str) -> SetupError:
        return SetupError(f"{self._path.name} {why}")

    def _find_members(self) -> dict[str, tuple[int, int]]:
        """Return where each file begins and how many bytes it has.

        Headers are read one by one, and only those of the form that :func:`write_backup` writes. Extended ones, with
        which tarfile recurses, goes back in the file, or reads one file as another, are no ordinary files.
        """
        members: dict[str, tuple[int, int]] = {}
        total = self._file.seek(0, os.SEEK_END)
        begin = 0
        while begin < total:
            self._file.seek(begin)
            block = self._file.read(tarfile.BLOCKSIZE)
            if not block.strip(b"\0"):
                break
            try:
                header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.HeaderError:
                raise self._damaged("is damaged" if members else "is no backup, or its beginning is damaged") from None
            if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                raise self._damaged(f"is no backup: {header.name[:80]} is no ordinary file")
            if header.name in members:
                raise self._damaged(f"is no backup: it has files that are not in its list, a second {header.name[:80]}")
            if len(members) == MAX_MEMBERS:
                raise self._damaged(f"is no backup: it has more than {MAX_MEMBERS} files")
            begin += tarfile.BLOCKSIZE
            if not 0 <= header.size <= total - begin:
                raise self._damaged("is incomplete: its end, which lists its contents, is missing")
            members[header.name] = begin, header.size
            begin += -(-header.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if not members:
            raise self._damaged("is no backup, or its beginning is damaged")
        return members

    def _read_manifest(self) -> BackupManifest:
        if MANIFEST not in self._members:
            raise self._damaged("is incomplete: its end, which lists its contents, is missing")
        try:
            begin, size = self._members[MANIFEST]
            self._file.seek(begin)
            read = orjson.loads(self._file.read(min(size, MAX_MANIFEST)))
            if isinstance(read, dict) and isinstance(read.get("format"), int) and read["format"] > FORMAT:
                raise SetupError(
                    f"{self._path.name} was made by a newer version, {read.get('version')}, in a form that this one "
                    "does not know; use that version"
                )
            manifest = BackupManifest.model_validate(read)
        except (ValidationError, ValueError):
            raise self._damaged("is damaged: its list of contents cannot be read") from None
        if DATABASE not in manifest.files or not set(manifest.files) <= set(self._members):
            raise self._damaged("is damaged: it lacks files of its list")
        if set(self._members) != {*manifest.files, MANIFEST}:
            raise self._damaged("is no backup: it has files that are not in its list")
        for name, listed in manifest.files.items():
            if self._members[name][1] != listed.bytes:
                raise self._damaged(f"is damaged: {name} has another size than its list says")
        if any(Path(name).name != name or name.startswith(".") for name in manifest.keys):
            raise self._damaged("is damaged: a key has the name of a path")
        if any(manifest.files[KEYS + name].bytes > MAX_KEY for name in manifest.keys):
            raise self._damaged(f"is no backup: a key has more than {MAX_KEY} bytes")
        return manifest

    def extract_database(self, target: Path, on_progress: Progress) -> None:
        """Write the database to a new file; :class:`SetupError` when it is not as it was."""
        with os.fdopen(open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            self._extract(DATABASE, file, on_progress)

    def key(self, name: str) -> bytes:
        """Return a key; :class:`SetupError` when it is not as it was."""
        held = io.BytesIO()
        self._extract(KEYS + name, held, lambda *_: None)
        return held.getvalue()

    def _extract(self, name: str, target: IO[bytes], on_progress: Progress) -> None:
        begin, left = self._members[name]
        measured = _Measured(self._file, left, "read", on_progress, None)
        self._file.seek(begin)
        while data := measured.read(min(left, CHUNK)):
            target.write(data)
            left -= len(data)
        if measured.member != self.manifest.files[name]:
            raise self._damaged(f"is damaged: {name} is not as the backup was made")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
