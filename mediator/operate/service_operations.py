"""Operations about the service itself: the doctor, its status, where its doors are, and its settings."""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import structlog

from mediator import __version__
from mediator.broker import Broker
from mediator.errors import BadRequestError, MediatorError, SetupError, StoreDamagedError, UnavailableError
from mediator.http.health import Health
from mediator.journal import FOLDER as JOURNAL_FOLDER
from mediator.journal.segments import read_gaps
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.mailboxes.bounds import DAY
from mediator.operate.backlog import BacklogMeter
from mediator.operate.diagnosis import DoctorCheck, Finding, Level
from mediator.operate.findings import RecentRefusals, backlog_findings, readiness_findings
from mediator.operate.operations import (
    ANY,
    COUNT,
    FLAG,
    LOGIN,
    TEXT,
    TEXTS,
    TIME,
    Answer,
    OperationRequest,
    Right,
    about,
    many,
    object_schema,
    operation,
    or_null,
    table,
)
from mediator.operate.surroundings import certificate_findings
from mediator.operate.units import format_bytes, format_count, format_time
from mediator.settings.settings import TOKENS, Settings
from mediator.store.base import Integrity
from mediator.store.opening import database_path
from mediator.store.sqlite_file import find_damage
from mediator.system.private_files import exposed
from mediator.tenants.directory import TenantDirectory

CHECK_SECONDS = 5.0
"""Time limit for checking the whole database while an operator waits."""
OFFLINE_SECONDS = 60.0
FREE_PART = 0.05
FREE_BYTES = 1 << 30
"""The disk is nearly full with less than this free, or less than :data:`FREE_PART` of it."""
LARGE_WAL = 256 << 20
"""Bytes of a write-ahead log that is too long."""
SHOWN = 10

_RESTORE = (
    "Stop the service, copy mediator.db, -wal and -shm aside, and restore a backup, or what "
    "`sqlite3 mediator.db .recover` saves; see docs/operations.md."
)
LATE = 5000
"""Milliseconds after its due time from which delayed mail counts as late."""
NEARLY = 0.9
FRESH_SECONDS = 15.0
_NATS = about(TEXT, "URLs; a login in them leaves by the control socket alone.", **{LOGIN: True})
_log = structlog.get_logger("operators")


def offline_findings(data_dir: Path) -> Iterator[Finding]:
    """Check the directory and the whole database, if there is one, while no service runs."""
    if data_dir.is_dir() and not os.access(data_dir, os.W_OK):
        yield Finding(
            Level.PROBLEM,
            f"{data_dir} cannot be written: no service can start there.",
            "Make it writable for the user that runs the service, unless it is read-only on purpose: verify, backup "
            "and Spark read it as it is.",
            code="data_dir_read_only",
        )
    database = database_path(data_dir)
    if database.exists():
        try:
            yield from damage_findings(find_damage(database, OFFLINE_SECONDS))
        except StoreDamagedError as error:
            yield Finding(Level.PROBLEM, f"The database cannot be read: {error}.", _RESTORE, code="database_unreadable")
        except MediatorError as error:
            yield Finding(Level.PROBLEM, f"The database cannot be read: {error}.", code="database_unreadable")


def damage_findings(found: Integrity) -> Iterator[Finding]:
    """Report the result of a check of the whole database."""
    for problem in found.problems[:SHOWN]:
        yield Finding(Level.PROBLEM, f"The database is damaged: {problem}.", _RESTORE, code="database_damaged")
    if found.unchecked:
        yield Finding(
            Level.NOTE,
            f"The database is large: {found.checked} of its tables were checked in time, but not "
            f"{', '.join(found.unchecked)}.",
            "To check all of it: `sqlite3 mediator.db 'PRAGMA quick_check'` on a copy or while the service is stopped.",
        )
    elif found.checked and not found.problems:
        yield Finding(Level.OK, "The database is intact.")


def missing_findings(missing: int) -> Iterator[Finding]:
    """Report how many messages the journal had and the database lacked at the last start."""
    if missing:
        count = "1 message" if missing == 1 else f"{missing} messages"
        yield Finding(
            Level.PROBLEM,
            f"The database has lost at least {count} that the journal has as stored.",
            "Unless a backup was restored, its write-ahead log was damaged: check the disk. The journal has the "
            "numbers of the mailboxes.",
            code="messages_missing",
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
            code="file_readable_by_others",
        )


def disk_findings(data_dir: Path) -> Iterator[Finding]:
    """Report free disk space and the size of the write-ahead log; needs no running service."""
    try:
        disk = shutil.disk_usage(data_dir)
    except OSError as error:
        text = f"cannot read the disk usage of {data_dir}: {error.strerror}."
        yield Finding(Level.PROBLEM, text, code="disk_unknown")
        return
    free = f"{format_bytes(disk.free)} of {format_bytes(disk.total)} are free under {data_dir}."
    if disk.free < min(FREE_BYTES, disk.total * FREE_PART):
        yield Finding(
            Level.PROBLEM,
            free,
            "Free some space: on a full disk every SEND is refused. `mediator cleanup` frees that of expired mail.",
            code="disk_nearly_full",
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
            code="write_ahead_log_large",
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
        code="journal_gaps",
    )


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
        backlog: BacklogMeter,
        refusals: RecentRefusals,
    ) -> None:
        """``further``: what the doctor looks at beside what belongs to every service."""
        self._broker = broker
        self._settings = settings
        self._tenants = tenants
        self._health = health
        self._nats_url = nats_url
        self._http_port = http_port
        self._further = further
        self._backlog = backlog
        self._refusals = refusals
        self._since = time.time()
        self._damage: asyncio.Task[Integrity] | None = None
        self._damage_at = 0.0
        """When the last check for damage began, by the steady clock."""

    @operation(
        "installation",
        Right.READ,
        "What the doctor finds about the service",
        object_schema(findings=many(Finding.schema())),
        fields={"quick": about(FLAG, "Leave out what reads the whole database.")},
        path="/doctor",
    )
    async def _installation(self, request: OperationRequest) -> Answer:
        """Return problems first: whoever looks at night reads the top."""
        found = await self.find(quick=request.get("quick") is True)
        order = list(Level)
        found.sort(key=lambda finding: -order.index(finding.level))
        return {"findings": [finding.to_json() for finding in found]}

    async def find(self, *, quick: bool = True) -> list[Finding]:
        """Return what the doctor finds; ``quick`` leaves out what reads the whole database."""
        report, backlog = await self._health.report(), await self._backlog.current()
        found = [
            *readiness_findings(report),
            *self._refusals.findings(),
            *backlog_findings(backlog, self._tenants.living, self._broker.quotas.of, self._settings.lag_minutes),
            *await asyncio.to_thread(self._files),
        ]
        try:
            if not quick:
                found += damage_findings(await self._find_damage())
            waiting, due = await self._broker.read(lambda tx, _now: (tx.outbox.backlog(), tx.delays.next_due()))
            found += self._load(waiting, due)
            found += [finding for examine in self._further for finding in await examine()]
        except UnavailableError:
            # The readiness check says why; the rest does not need the store.
            pass
        return found

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
            *certificate_findings(self._settings.certificates),
        ]

    def _load(self, backlog: int, due: int | None) -> Iterator[Finding]:
        settings, broker = self._settings, self._broker
        if settings.store.interval is not None:
            yield Finding(
                Level.NOTE,
                f'store.sync is "interval": {settings.durability}.',
                "Set it to always where no mail that was accepted may be lost.",
            )
        late = broker.clock() - due if due is not None else 0
        if late > LATE:
            yield Finding(
                Level.PROBLEM,
                f"Delayed mail is late: the first was due {format_time((due or 0) / 1000)}.",
                "The log says why the release failed.",
                code="delayed_mail_late",
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
                    code=f"{option}_nearly_reached",
                )

    @operation(
        "endpoints",
        Right.READ,
        "Where clients connect, and the certificate they see there",
        object_schema(nats=_NATS, certificate=or_null(TEXT), http_port=COUNT),
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
        object_schema(
            version=TEXT,
            pid=COUNT,
            instance=TEXT,
            since=TIME,
            nats=_NATS,
            http_port=COUNT,
            data_dir=TEXT,
            database=TEXT,
            durability=about(TEXT, "What an answer of success survives (docs/durability.md)."),
            ready=FLAG,
            checks=table(TEXT),
            pending=COUNT,
            waiting=COUNT,
            tenants=table(object_schema(messages=COUNT, bytes=COUNT)),
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
            "durability": settings.durability,
            "ready": report.ready,
            "checks": report.checks,
            "pending": broker.pending,
            "waiting": broker.waiting,
            "tenants": {name: {"messages": held.messages, "bytes": held.bytes} for name, held in usage.items()},
        }


class SettingsOperations:
    """The operations ``settings`` and ``operators-reload``."""

    def __init__(self, settings: Settings, take: Callable[[Settings], None]) -> None:
        """``take`` is called with the settings whose operators hold from then on."""
        self._settings = settings
        self._take = take
        self._turn = asyncio.Lock()
        """Held while the settings are read: no older ones take the place of newer ones."""

    @operation(
        "settings",
        Right.READ,
        "The settings in force, where each came from, and what it means; secrets are masked",
        object_schema(
            options=many(
                object_schema(
                    option=TEXT,
                    value=ANY,
                    source=about(TEXT, "`default`, `the command line`, a file, or the variable of the environment."),
                    description=about(TEXT, "What it protects, and when to change it."),
                    variable=about(TEXT, "The variable of the environment that sets it."),
                )
            )
        ),
        path="/settings",
    )
    async def _list(self, _request: OperationRequest) -> Answer:
        return {"options": self._settings.in_force()}

    @operation(
        "operators-reload",
        Right.ADMIN,
        "Reload the operators' tokens from the settings",
        object_schema(
            source=about(TEXT, "Where the tokens are from: a file, a variable, `default` if nowhere."),
            added=about(TEXTS, "Names of operators that are new."),
            removed=about(TEXTS, "Those that have no token any more, whose sessions are over."),
            changed=about(TEXTS, "Those with another token or other roles."),
            waiting=about(TEXTS, "Other options that differ from those in force; a restart takes them over."),
        ),
        method="POST",
        path="/operators/reload",
    )
    async def _reload(self, _request: OperationRequest) -> Answer:
        async with self._turn:
            return await self._read_again()

    async def _read_again(self) -> Answer:
        try:
            newer = await asyncio.to_thread(self._settings.read_again)
        except SetupError as error:
            raise BadRequestError("settings", f"nothing was changed: {error}") from None
        before, now = _tokens(self._settings), _tokens(newer)
        taken, waiting = self._settings.with_operators_of(newer)
        if self._settings.has_operators and not taken.has_operators:
            why = "without a token local.token would make an operator; restart the service for that"
            raise BadRequestError("operators.tokens", f"nothing was changed: {why}")
        self._settings = taken
        self._take(taken)
        changes = {
            "added": sorted(now.keys() - before.keys()),
            "removed": sorted(before.keys() - now.keys()),
            "changed": sorted(name for name in now.keys() & before.keys() if now[name] != before[name]),
        }
        _log.info("operators reloaded", **changes)
        return {"source": newer.source_of(TOKENS), **changes, "waiting": waiting}


def _tokens(settings: Settings) -> dict[str, set[tuple[str, tuple[str, ...]]]]:
    """Return what each operator may sign in with, and with which roles."""
    found: dict[str, set[tuple[str, tuple[str, ...]]]] = {}
    for token in settings.operators.tokens:
        found.setdefault(token.name, set()).add((token.token.get_secret_value(), tuple(sorted(token.roles))))
    return found
