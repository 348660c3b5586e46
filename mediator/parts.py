"""The interface between the service and its parts, which bring doors and features without the core knowing them.

A part is a Python package that offers an instance of :class:`Part` under the entry-point group ``mediator.parts``::

    [project.entry-points."mediator.parts"]
    echo = "echo_door:part"

The service finds all installed parts at startup. A part brings a section of the settings, migrations, commands of
``mediator``, steps of the clean-up, and, while the service runs, whatever it registers with its :class:`Host`: NATS
verbs, HTTP routes, health and doctor checks, jobs, operations for operators, and pages of the console. Every command
loads the module that the entry point names, so it should import heavy libraries only inside its methods.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mediator.errors import SetupError

if TYPE_CHECKING:
    from aiohttp import web

    from mediator.admin.access import Access
    from mediator.broker import Broker
    from mediator.cli.options import CommandGroup
    from mediator.config.settings import Settings
    from mediator.config.types import PartSettings
    from mediator.console.console import Console
    from mediator.http.callers import HttpCallers
    from mediator.http.health import Check, Health
    from mediator.nats.verbs import SendListener, VerbHandler
    from mediator.ops.collector import CleanupStep
    from mediator.ops.diagnosis import DoctorCheck
    from mediator.ops.metrics import Metrics
    from mediator.ops.operations import Operations
    from mediator.ops.scheduler import Scheduler
    from mediator.ops.verify.checks import VerifyCheck
    from mediator.store.base import Transaction
    from mediator.tenants.directory import TenantDirectory

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

    def add_commands(self, app: "CommandGroup") -> None:
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


class Announcer(Protocol):
    """Broadcasts to all instances on one database, this one included; a lost or too large message is not repeated."""

    async def publish(self, data: bytes) -> None:
        """Send to all instances."""

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        """Call ``heard`` with each message, on the event loop."""


class Host:
    """What a running service offers to its parts."""

    def __init__(
        self,
        settings: "Settings",
        *,
        broker: "Broker",
        metrics: "Metrics",
        health: "Health",
        scheduler: "Scheduler",
        operations: "Operations",
        announcer: "Callable[[str], Announcer | None]",
        app: "web.Application",
        http_port: int,
        tenants: "TenantDirectory",
        callers: "HttpCallers",
        access: "Access",
        console: "Console",
    ) -> None:
        """``app`` takes routes until the parts are open.

        ``callers`` says who makes a request, ``access`` which operator it comes from, sessions of browsers too.
        """
        self.tenants = tenants
        """All tenants, which may change while the service runs."""
        self.settings = settings
        self.broker = broker
        self.metrics = metrics
        self.app = app
        self.http_port = http_port
        self.callers = callers
        self.access = access
        self.console = console
        """The pages for operators; see :mod:`mediator.console.pages` for how to add some."""
        self.verbs: dict[str, tuple[str, VerbHandler, Mapping[str, Any]]] = {}
        self.doctor_checks: list[DoctorCheck] = []
        self.send_listeners: list[SendListener] = []
        self._health = health
        self._scheduler = scheduler
        self.operations = operations
        """What operators can ask for: ``operations.add(Operation(…))``."""
        self.announcer = announcer
        """Returns a way to reach the other instances on this database, by a topic; None where there are no others."""

    def add_verb(self, subject: str, name: str, handler: "VerbHandler", empty: Mapping[str, Any] | None = None) -> None:
        """Answer NATS requests on ``$mq9.AI.<subject>``; ``name`` is the verb in metrics.

        ``empty`` are the reply's fields, beside ``error``, when the request failed (N1).

        Raises :class:`SetupError` when another part answers them already.
        """
        if subject in self.verbs:
            raise SetupError(f"two parts answer requests on {subject}; uninstall one of them")
        self.verbs[subject] = name, handler, empty or {}

    def add_send_listener(self, heard: "SendListener") -> None:
        """Call ``heard`` with tenant, connection and address after each SEND over NATS that succeeded.

        The connection is that of :data:`mediator.callers.connection`. It runs on the event loop, and must be quick.
        """
        self.send_listeners.append(heard)

    def add_health_check(self, name: str, check: "Check") -> None:
        """Have ``/readyz`` ask ``check``, which returns None or what is wrong."""
        self._health.add(name, check)

    def add_doctor_check(self, check: "DoctorCheck") -> None:
        """Have ``mediator doctor`` show what ``check`` finds."""
        self.doctor_checks.append(check)

    def add_job(self, job: Callable[[], Awaitable[None]], seconds: int, name: str = "") -> None:
        """Run ``job`` every so many seconds, for the first time at once; operators see its name."""
        self._scheduler.add_job(job, seconds, name)


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
