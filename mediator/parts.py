"""The interface between the service and its parts, which bring doors and features without the core knowing them.

A part is a Python package that offers an instance of :class:`Part` under the entry-point group ``mediator.parts``::

    [project.entry-points."mediator.parts"]
    echo = "echo_door:part"

The service finds all installed parts at startup. A part brings a section of the settings, migrations, commands of
``mediator``, steps of the clean-up, and, while the service runs, whatever it registers with
:class:`mediator.host.Host`: NATS verbs, HTTP routes, health and doctor checks, jobs, operations for operators, and
pages of the console. Every command loads the module that the entry point names, so it should import heavy libraries
only inside its methods. Nothing below ``app.py`` and the commands looks for parts: what they bring is handed in.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mediator.errors import SetupError

if TYPE_CHECKING:
    import typer

    from mediator.backup import BackupScope
    from mediator.cleanup.collector import CleanupStep
    from mediator.host import Host
    from mediator.settings.settings import Settings
    from mediator.settings.types import PartSettings
    from mediator.store.base import Transaction
    from mediator.verify.checks import VerifyCheck

GROUP = "mediator.parts"


class Part:
    """A slice of the service. Subclass it, override what the part brings, and name an instance in an entry point."""

    name: str
    """Names the part in errors, and its section of the settings; the name of the entry point is the same."""
    migrations: Path | None = None
    """A folder of numbered migrations (playhouse.migrations) for tables of the part's own.

    Their history is kept in the table ``schema_migration_<name>``.
    """
    known_numbers: Sequence[str] = ()
    """Tables whose numbers others know, so that not even a restored database may give one of them again."""

    def settings(self) -> "type[PartSettings] | None":
        """Return the class of the part's section of the settings, read with ``settings.section(MySettings)``."""
        return None

    def add_commands(self, app: "typer.Typer") -> None:
        """Add commands and groups of commands to ``mediator``."""

    key_files: Sequence[str] = ()
    """The names of the files in the data directory that may hold :meth:`keys`; a restore writes no others."""

    def keys(self, settings: "Settings") -> Mapping[str, bytes]:
        """Return the keys without which the part's rows are of no use, by their file's name in the data directory.

        For backups; such a key may also come from the settings, and is missing before the first start.
        """
        return {}

    def cleanup_steps(self, settings: "Settings") -> "Sequence[CleanupStep]":
        """Return what the clean-up does for this part, in the service and in ``mediator cleanup`` without one."""
        return ()

    def verify_checks(self, settings: "Settings") -> "Sequence[VerifyCheck]":
        """Return what ``mediator verify`` checks of this part, beside a service or without one."""
        return ()

    def forget_address(self, tx: "Transaction", tenant: str, address: str, now: int) -> Mapping[str, int]:
        """Remove what the part keeps in the database of who has an address, in the transaction that ends its mailbox.

        The mailbox, if there is one, is locked already. Returns how much was removed, by kind.
        """
        return {}

    def forget_files(self, settings: "Settings", tenant: str, address: str) -> "ForgottenFiles | None":
        """Remove what the part keeps of an address in files, in the process of ``mediator forget``; None: nothing."""
        return None

    def open(self, host: "Host") -> AbstractAsyncContextManager[None]:
        """Run the part: register with ``host`` on the way in, and close what was opened on the way out.

        The doors open after all parts and close before them.
        """
        return nullcontext()


class ForgottenFiles(NamedTuple):
    """What ``mediator forget`` removed from files, by kind, and what it could not, with what to do."""

    removed: Mapping[str, int]
    left: str = ""


@cache
def find_parts() -> tuple[Part, ...]:
    """Load the installed parts, in order of their names.

    Raises :class:`SetupError` naming the part that cannot be loaded, or that two distributions both bring.
    """
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    for one, other in pairwise(found):
        if one.name == other.name:
            raise SetupError(f"part {one.name}: both {_origin(one)} and {_origin(other)} bring it; uninstall one")
    return tuple(map(_load, found))


@cache
def installed_settings() -> "type[Settings]":
    """Return the settings with a section for each installed part; raises :class:`SetupError` where two collide."""
    from mediator.settings.settings import with_parts

    parts = find_parts()
    sections = {part.name: kind for part in parts if (kind := part.settings()) is not None}
    migrations = {part.name: part.migrations for part in parts if part.migrations is not None}
    return with_parts(sections, migrations)


def cleanup_steps(settings: "Settings") -> "list[CleanupStep]":
    """Return what the clean-up does for the installed parts."""
    return [step for part in find_parts() for step in part.cleanup_steps(settings)]


def verify_checks(settings: "Settings") -> "list[VerifyCheck]":
    """Return what ``mediator verify`` checks of the installed parts."""
    return [check for part in find_parts() for check in part.verify_checks(settings)]


def backup_scope(settings: "Settings") -> "BackupScope":
    """Return what a backup has to know of the installed parts."""
    from mediator.backup import BackupScope

    parts = find_parts()
    return BackupScope(
        keys={name: key for part in parts for name, key in part.keys(settings).items()},
        key_files=[name for part in parts for name in part.key_files],
        known_numbers=[name for part in parts for name in part.known_numbers],
    )


def _load(entry: EntryPoint) -> Part:
    try:
        part = entry.load()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SetupError(
            f"part {entry.name}: {_origin(entry)} cannot be loaded ({reason}); update or uninstall it"
        ) from error
    if not isinstance(part, Part) or part.name != entry.name:
        raise SetupError(f"part {entry.name}: {_origin(entry)} is no Part of this name")
    return part


def _origin(entry: EntryPoint) -> str:
    distribution = "" if entry.dist is None else f" of {entry.dist.name}"
    return f"{entry.value}{distribution}"
