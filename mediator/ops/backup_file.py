"""The file of a backup: a tar with the database as an SQLite file, keys if wanted, and last a manifest of them.

Any SQLite opens ``mediator.db``. A file that ends too early has no manifest. :data:`FORMAT` counts up when older
programs cannot read a file any more.
"""

import hashlib
import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Annotated

import orjson
from pydantic import BaseModel, Field, ValidationError

from mediator.errors import SetupError
from mediator.store.sqlite_copy import Progress
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
