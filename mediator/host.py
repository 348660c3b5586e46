"""What a running service offers to its parts: where they register doors, checks, jobs, operations and pages."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.console.console import Console
from mediator.errors import SetupError
from mediator.http.callers import HttpCallers
from mediator.http.health import Check, Health
from mediator.metrics import Metrics
from mediator.nats.verbs import SendListener, VerbHandler
from mediator.operate.access import Access
from mediator.operate.diagnosis import DoctorCheck
from mediator.operate.operations import Operations
from mediator.operate.scheduler import Scheduler
from mediator.operate.surroundings import Surroundings
from mediator.settings.settings import Settings
from mediator.tenants.directory import TenantDirectory


class Host:
    """What a running service offers to its parts."""

    def __init__(
        self,
        settings: Settings,
        *,
        broker: Broker,
        metrics: Metrics,
        health: Health,
        scheduler: Scheduler,
        operations: Operations,
        announcer: Callable[[str], Announcer | None],
        app: web.Application,
        http_port: int,
        tenants: TenantDirectory,
        callers: HttpCallers,
        access: Access,
        console: Console,
        surroundings: Surroundings,
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
        self.surroundings = surroundings
        """Watches public URLs, certificates and clocks."""
        self.verbs: dict[str, tuple[str, VerbHandler, Mapping[str, Any]]] = {}
        self.doctor_checks: list[DoctorCheck] = []
        self.send_listeners: list[SendListener] = []
        self._health = health
        self._scheduler = scheduler
        self.operations = operations
        """What operators can ask for: ``operations.add(Operation(…))``."""
        self.announcer = announcer
        """Returns a way to reach the other instances on this database, by a topic; None where there are no others."""

    def add_verb(self, subject: str, name: str, handler: VerbHandler, empty: Mapping[str, Any] | None = None) -> None:
        """Answer NATS requests on ``$mq9.AI.<subject>``; ``name`` is the verb in metrics.

        ``empty`` are the reply's fields, beside ``error``, when the request failed (N1).

        Raises :class:`SetupError` when another part answers them already.
        """
        if subject in self.verbs:
            raise SetupError(f"two parts answer requests on {subject}; uninstall one of them")
        self.verbs[subject] = name, handler, empty or {}

    def add_send_listener(self, heard: SendListener) -> None:
        """Call ``heard`` with tenant, connection and address after each SEND over NATS that succeeded.

        The connection is that of :data:`mediator.request_context.connection`. ``heard`` runs on the event loop, and
        must be quick.
        """
        self.send_listeners.append(heard)

    def add_health_check(self, name: str, check: Check) -> None:
        """Have ``/readyz`` ask ``check``, which returns None or what is wrong."""
        self._health.add(name, check)

    def add_doctor_check(self, check: DoctorCheck) -> None:
        """Have ``mediator doctor`` show what ``check`` finds."""
        self.doctor_checks.append(check)

    def add_job(self, job: Callable[[], Awaitable[None]], seconds: int, name: str = "") -> None:
        """Run ``job`` every so many seconds, for the first time at once; operators see its name."""
        self._scheduler.add_job(job, seconds, name)
