"""Operations about the service itself: the doctor, its status, and where its doors are."""

import asyncio
import os
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import asdict

from mediator import __version__
from mediator.broker import Broker
from mediator.errors import UnavailableError
from mediator.http.health import Health, HealthReport
from mediator.journal import FOLDER as JOURNAL_FOLDER
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.ops.diagnosis import DoctorCheck, Finding, Level
from mediator.ops.installation import (
    CHECK_SECONDS,
    certificate_findings,
    damage_findings,
    disk_findings,
    file_findings,
    journal_findings,
)
from mediator.ops.operations import Answer, OperationRequest, Right, operation
from mediator.ops.schemas import COUNT, FINDINGS, FLAG, LOGIN, TEXT, TIME, about, obj, or_null, table
from mediator.ops.units import format_time
from mediator.settings.settings import Settings
from mediator.store.base import Integrity
from mediator.tenants.directory import TenantDirectory

LATE = 5000
"""Milliseconds after its due time from which delayed mail counts as late."""
NEARLY = 0.9
FRESH_SECONDS = 15.0
_NATS = about(TEXT, "URLs; a login in them leaves by the control socket alone.", **{LOGIN: True})


class ServiceOperations:
    """The operations ``installation``, ``overview`` and ``endpoints``."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        tenants: TenantDirectory,
        health: Health,
        nats_url: str,
        http_port: int,
        further: Sequence[DoctorCheck],
    ) -> None:
        """``further``: what the doctor looks at beside what belongs to every service."""
        self._broker = broker
        self._settings = settings
        self._tenants = tenants
        self._health = health
        self._nats_url = nats_url
        self._http_port = http_port
        self._further = further
        self._since = time.time()
        self._damage: asyncio.Task[Integrity] | None = None
        self._damage_at = 0.0
        """When the last check for damage began, by the steady clock."""

    @operation(
        "installation",
        Right.READ,
        "What the doctor finds about the service",
        obj(findings=FINDINGS),
        fields={"quick": about(FLAG, "Leave out what reads the whole database.")},
        path="/doctor",
    )
    async def _installation(self, request: OperationRequest) -> Answer:
        report = await self._health.report()
        files = await asyncio.to_thread(self._files)
        whole: list[Finding] = []
        try:
            if request.get("quick") is not True:
                whole += damage_findings(await self._find_damage())
            backlog, due = await self._broker.measure_backlog()
            further = [finding for examine in self._further for finding in await examine()]
        except UnavailableError:
            # The readiness check says why; the rest does not need the store.
            return {"findings": _dicts([*_readiness(report), *whole, *files])}
        return {"findings": _dicts([*_readiness(report), *self._load(backlog, due), *further, *whole, *files])}

    def _find_damage(self) -> Awaitable[Integrity]:
        """Check the whole database, one check at a time, whose result everybody gets who asks soon after it began."""
        now = time.monotonic()
        if self._damage is None or (self._damage.done() and now - self._damage_at > FRESH_SECONDS):
            self._damage = asyncio.create_task(self._broker.find_damage(CHECK_SECONDS), name="check for damage")
            self._damage_at = now
        return asyncio.shield(self._damage)

    def _files(self) -> list[Finding]:
        folder = self._settings.data_dir
        return [
            *disk_findings(folder),
            *journal_findings(folder / JOURNAL_FOLDER, self._broker.clock()),
            *file_findings(folder),
            *certificate_findings(
                {"gateway.tls_cert": self._settings.gateway.tls_cert, "nats_cert": self._settings.nats_cert}
            ),
        ]

    def _load(self, backlog: int, due: int | None) -> Iterator[Finding]:
        settings, broker = self._settings, self._broker
        late = broker.clock() - due if due is not None else 0
        if late > LATE:
            yield Finding(
                Level.PROBLEM,
                f"Delayed mail is late: the first was due {format_time((due or 0) / 1000)}.",
                "The log says why the release failed.",
            )
        for what, use, limit, option in (
            ("requests wait inside the service", broker.pending, settings.max_pending, "max_pending"),
            ("FETCHes wait for mail", broker.waiting, settings.max_waiting, "max_waiting"),
            ("messages wait for the archive", backlog, settings.archive_limit, "archive_limit"),
        ):
            if use >= limit * NEARLY:
                yield Finding(
                    Level.PROBLEM,
                    f"{use} {what}, the limit is {limit}: above it requests are refused.",
                    f"Find out what is blocked, or raise {option}.",
                )

    @operation(
        "endpoints",
        Right.READ,
        "Where clients connect, and the certificate they see there",
        obj(nats=_NATS, certificate=or_null(TEXT), http_port=COUNT),
        path="/endpoints",
    )
    async def _endpoints(self, _request: OperationRequest) -> Answer:
        """Return where clients on this machine connect, and the certificate they see there, if known."""
        certificate = self._settings.gateway.tls_cert if self._settings.nats_url is None else None
        return {
            "nats": self._settings.client_nats_url or self._nats_url,
            "certificate": None if certificate is None else await asyncio.to_thread(certificate.read_text),
            "http_port": self._http_port,
        }

    @operation(
        "overview",
        Right.READ,
        "The instance that answers, whether it is ready, and the use of each tenant",
        obj(
            version=TEXT,
            pid=COUNT,
            instance=TEXT,
            since=TIME,
            nats=_NATS,
            http_port=COUNT,
            data_dir=TEXT,
            database=TEXT,
            ready=FLAG,
            checks=table(TEXT),
            pending=COUNT,
            waiting=COUNT,
            tenants=table(obj(messages=COUNT, bytes=COUNT)),
        ),
        path="/overview",
    )
    async def _overview(self, _request: OperationRequest) -> Answer:
        settings, broker = self._settings, self._broker
        names = sorted({*(settings.tenants or [DEFAULT_TENANT]), *self._tenants.living})
        report = await self._health.report()
        usage = await broker.measure_usage(names)
        return {
            "version": __version__,
            "pid": os.getpid(),
            "instance": settings.instance,
            "since": self._since,
            "nats": self._nats_url,
            "http_port": self._http_port,
            "data_dir": str(settings.data_dir),
            "database": "sqlite" if settings.database_url is None else "postgresql",
            "ready": report.ready,
            "checks": report.checks,
            "pending": broker.pending,
            "waiting": broker.waiting,
            "tenants": {name: {"messages": held.messages, "bytes": held.bytes} for name, held in usage.items()},
        }


def _readiness(report: HealthReport) -> Iterator[Finding]:
    if report.ready:
        yield Finding(Level.OK, f"The service is ready: {', '.join(report.checks)}.")
    for name, said in report.checks.items():
        if said != "ok":
            yield Finding(Level.PROBLEM, f"{name}: {said}", "The service's log says more.")


def _dicts(findings: list[Finding]) -> list[dict[str, str]]:
    return [asdict(finding) for finding in findings]
