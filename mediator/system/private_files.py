"""Files and folders that only the service's user may read, whatever the umask."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

OTHERS = 0o077
"""The permissions of everybody but the owner."""
MAX_LOOKED_AT = 10_000
"""Files of one folder that are checked."""

_KEYS = ("didcomm.key", ".didcomm.key.*", "local.token", ".local.token.*")
_PRIVATE = ("mediator.db*", "control.sock", *_KEYS, "journal", "nats")
"""What the service keeps private in a data directory."""
_OURS = (*_PRIVATE, "clock.json", ".clock.json.*", "models", "lake")
"""All that the service writes there; other files mean that somebody else uses the directory, too."""
_WITHIN = ("journal", "nats")


def make_folder(path: Path) -> None:
    """Make a folder with mode 700, with its missing parents; an existing one stays as it is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_file(path: Path, flags: int) -> int:
    """Open a file as :func:`os.open` does, with mode 600 from its creation; an existing file gets it now."""
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    about = os.fstat(file)
    if about.st_mode & OTHERS and about.st_uid == os.geteuid():
        os.fchmod(file, 0o600)
    return file


def make_file(path: Path) -> None:
    """Make an empty file with mode 600 if it does not exist."""
    os.close(open_file(path, os.O_RDWR | os.O_CREAT))


def make_secret(path: Path, content: bytes) -> None:
    """Make a file with mode 600 that has this content, unless it is there.

    It is written under another name and then linked: of two processes that make it together, one content wins.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()
    # What depends on the secret is durable, so its directory entry must be too.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def exposed(data_dir: Path) -> Iterator[Path]:
    """Yield what other users may read: the data directory, and the service's own files in it."""
    if not data_dir.is_dir():
        # A file named by mistake belongs to somebody else.
        return
    if _is_exposed(data_dir):
        yield data_dir
    for path in _entries(data_dir):
        if not _is_any(path, _PRIVATE):
            continue
        if _is_exposed(path):
            yield path
        if path.name in _WITHIN:
            yield from filter(_is_exposed, _entries(path))


def restrict_permissions(data_dir: Path) -> list[Path]:
    """Make exposed files private that belong to this user and to the service alone.

    A data directory with other files in it stays as it is: they may be meant for others.
    """
    narrowed = []
    for path in list(exposed(data_dir)):
        # A file may be gone by now; `mediator doctor` reports one that cannot be changed.
        with suppress(OSError):
            about = path.lstat()
            if about.st_uid == os.geteuid() and (
                path != data_dir or all(_is_any(entry, _OURS) for entry in _entries(data_dir))
            ):
                path.chmod(stat.S_IMODE(about.st_mode) & ~OTHERS)
                narrowed.append(path)
    return narrowed


def _is_any(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _is_exposed(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return not stat.S_ISLNK(mode) and bool(mode & OTHERS)


def _entries(folder: Path) -> Iterator[Path]:
    # A folder that cannot be listed fails with a clear error where it is used.
    with suppress(OSError):
        yield from islice(folder.iterdir(), MAX_LOOKED_AT)
