"""The control commands for operators: mailboxes, dead messages, the doctor and the status, for every tenant."""

import asyncio
import base64
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mediator import __version__
from mediator.broker import Broker
from mediator.config.settings import Settings
from mediator.errors import BadRequestError, UnavailableError
from mediator.http.health import Health, HealthReport
from mediator.mailboxes.address import DEFAULT_TENANT, parse_address
from mediator.mailboxes.bounds import MAX_ACK_WAIT, MAX_FETCH, MIN_ACK_WAIT
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Message
from mediator.mailboxes.querying import Query
from mediator.mailboxes.settling import DEAD_SLICE, Dead
from mediator.ops.control import ControlRequest, ControlServer, read_number, read_text
from mediator.ops.diagnosis import DoctorCheck, Finding, Level, diagnose
from mediator.ops.installation import CHECK_SECONDS, damage_findings, disk_findings, file_findings, journal_findings
from mediator.ops.journal import FOLDER as JOURNAL_FOLDER
from mediator.ops.mailbox_view import GroupView, MailboxView, inspect_mailbox
from mediator.ops.units import format_time
from mediator.store.base import Transaction

MAX_LISTED = 1000
PAYLOAD_START = 200
DEAD_BUDGET = 32 << 20
"""Bytes of dead messages read for one list; the answer has only the beginning of each."""
LATE = 5000
"""Milliseconds after its due time from which delayed mail counts as late."""
NEARLY = 0.9

Answer = dict[str, Any]


class ControlCommands:
    """The commands. Times in their answers are Unix seconds."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        health: Health,
        nats_url: str,
        http_port: int,
        further: Sequence[DoctorCheck],
    ) -> None:
        """``further``: what the doctor looks at beside what belongs to every service."""
        self._broker = broker
        self._settings = settings
        self._health = health
        self._nats_url = nats_url
        self._http_port = http_port
        self._further = further
        self._since = time.time()

    def register(self, control: ControlServer) -> None:
        """Register the commands."""
        for name, command in {
            "mailbox-list": self._list,
            "mailbox-show": self._show,
            "mailbox-set": self._set,
            "mailbox-delete": self._delete,
            "dead-list": self._dead_list,
            "dead-redrive": self._redrive,
            "dead-drop": self._drop,
            "doctor": self._doctor,
            "installation": self._installation,
            "overview": self._overview,
            "endpoints": self._endpoints,
        }.items():
            control.add_command(name, command)

    # Mailboxes.

    async def _list(self, request: ControlRequest) -> Answer:
        """List mailboxes in order of tenant and address; all tenants if none is named."""
        tenant, after_tenant = read_text(request, "tenant"), read_text(request, "after_tenant")
        prefix, after = read_text(request, "prefix"), read_text(request, "after")
        limit = read_number(request, "limit", 1, MAX_LISTED)

        def look(tx: Transaction, now: int) -> tuple[list[Mailbox], bool]:
            found: list[Mailbox] = []
            for name in [tenant] if tenant else tx.mailboxes.tenants():
                if name >= after_tenant and len(found) <= limit:
                    start = after if tenant or name == after_tenant else ""
                    found += _beginning_with(prefix, tx, name, start, limit + 1 - len(found), now)
            return found[:limit], len(found) > limit

        found, more = await self._broker.read(look)
        return {"mailboxes": [_listed(mailbox) for mailbox in found], "more": more}

    async def _show(self, request: ControlRequest) -> Answer:
        return _shown(await self._look(request), self._broker.bounds.default_ack_wait)

    async def _look(self, request: ControlRequest) -> MailboxView:
        tenant, address = _place(request)
        broker = self._broker
        return await broker.read(
            lambda tx, now: inspect_mailbox(tx, tenant, address, broker.bounds.tenant, now, broker.hooks)
        )

    async def _set(self, request: ControlRequest) -> Answer:
        ack_wait = None
        if request.get("ack_wait_ms") is not None:
            ack_wait = read_number(request, "ack_wait_ms", 0, MAX_ACK_WAIT)
            if 0 < ack_wait < MIN_ACK_WAIT:
                raise BadRequestError("ack_wait_ms", f"expected 0, or {MIN_ACK_WAIT} to {MAX_ACK_WAIT}")
        mailbox = await self._broker.set_ack_wait(*_place(request), ack_wait)
        return {"mail_address": mailbox.address, "ack_wait_ms": mailbox.ack_wait}

    async def _delete(self, request: ControlRequest) -> Answer:
        tenant, address = _place(request)
        await self._broker.delete_mailbox(tenant, address)
        return {"mail_address": address, "deleted": True}

    # Dead messages.

    async def _dead_list(self, request: ControlRequest) -> Answer:
        tenant, address = _place(request)
        limit = read_number(request, "limit", 1, MAX_FETCH)
        question = Query(tenant, address, limit=limit, budget=DEAD_BUDGET, dead_for=read_text(request, "group_name"))
        return {"messages": [_dead(message) for message in await self._broker.query(question)]}

    async def _redrive(self, request: ControlRequest) -> Answer:
        return {"redriven": await self._all(self._broker.redrive, request)}

    async def _drop(self, request: ControlRequest) -> Answer:
        return {"dropped": await self._all(self._broker.drop, request)}

    async def _all(self, verb: Any, request: ControlRequest) -> int:
        ids = request.get("msg_ids")
        if ids is not None and not (isinstance(ids, list) and all(type(item) is int and item >= 0 for item in ids)):
            raise BadRequestError("msg_ids", "expected a list of msg_ids")
        dead = Dead(*_place(request), read_text(request, "group_name"), ids)
        total = count = await verb(dead)
        while ids is None and count == DEAD_SLICE:
            count = await verb(dead)
            total += count
        return int(total)

    # The doctor.

    async def _doctor(self, request: ControlRequest) -> Answer:
        view = await self._look(request)
        return {"findings": _as_dicts(diagnose(view, self._broker.bounds, self._broker.clock()))}

    async def _installation(self, _request: ControlRequest) -> Answer:
        report = await self._health.report()
        files = await asyncio.to_thread(self._files)
        whole: list[Finding] = []
        try:
            whole += damage_findings(await self._broker.find_damage(CHECK_SECONDS))
            backlog, due = await self._broker.measure_backlog()
            further = [finding for examine in self._further for finding in await examine()]
        except UnavailableError:
            # The readiness check says why; the rest does not need the store.
            return {"findings": _as_dicts([*_readiness(report), *whole, *files])}
        return {"findings": _as_dicts([*_readiness(report), *self._load(backlog, due), *further, *whole, *files])}

    def _files(self) -> list[Finding]:
        folder = self._settings.data_dir
        return [
            *disk_findings(folder),
            *journal_findings(folder / JOURNAL_FOLDER, self._broker.clock()),
            *file_findings(folder),
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

    # Status.

    async def _endpoints(self, _request: ControlRequest) -> Answer:
        """Return where clients on this machine connect, and the certificate they see there, if known."""
        certificate = self._settings.gateway.tls_cert if self._settings.nats_url is None else None
        return {
            "nats": self._settings.client_nats_url or self._nats_url,
            "certificate": None if certificate is None else await asyncio.to_thread(certificate.read_text),
            "http_port": self._http_port,
        }

    async def _overview(self, _request: ControlRequest) -> Answer:
        settings, broker = self._settings, self._broker
        names = sorted(settings.tenants) or [DEFAULT_TENANT]
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


def _as_dicts(findings: list[Finding]) -> list[dict[str, str]]:
    return [asdict(finding) for finding in findings]


def _place(request: ControlRequest) -> tuple[str, str]:
    return read_text(request, "tenant") or DEFAULT_TENANT, parse_address(read_text(request, "mail_address"))


# Writing answers.


def _seconds(at: int | None) -> float | None:
    return None if at is None else at / 1000


def _beginning_with(prefix: str, tx: Transaction, tenant: str, after: str, limit: int, now: int) -> Iterator[Mailbox]:
    # Addresses are ordered by bytes, so those with a common prefix are adjacent.
    if prefix and not after:
        exact = tx.mailboxes.find(tenant, prefix)
        if exact is not None and exact.lives(now):
            yield exact
    for mailbox in tx.mailboxes.list(tenant, max(after, prefix), limit, now):
        if mailbox.address.startswith(prefix):
            yield mailbox


def _listed(mailbox: Mailbox) -> Answer:
    return {
        "mail_address": mailbox.address,
        "tenant": mailbox.tenant,
        "number": mailbox.no,
        "messages": mailbox.messages,
        "bytes": mailbox.bytes,
        "newest_at": _seconds(mailbox.last_at or None),
        "expire_at": _seconds(mailbox.expire_at),
        "retention": mailbox.retention.value,
    }


def _shown(view: MailboxView, default_ack_wait: int) -> Answer:
    mailbox = view.mailbox
    oldest = view.oldest
    return {
        **_listed(mailbox),
        "send_address": view.send_address,
        "created_at": _seconds(mailbox.created_at),
        "desc": mailbox.desc,
        "tags": list(mailbox.tags),
        "public": mailbox.public,
        "archive": mailbox.archive,
        "ack_wait_ms": mailbox.ack_wait,
        "default_ack_wait_ms": default_ack_wait,
        "connection": view.connection_no,
        "next_id": mailbox.next_id,
        "oldest": None if oldest is None else {"msg_id": oldest.msg_id, "created_at": _seconds(oldest.created_at)},
        "counted": view.counted,
        "lanes": [
            {
                "lane": lane.lane.name.lower(),
                "messages": lane.messages,
                "oldest_id": lane.oldest_id,
                "oldest_at": _seconds(lane.oldest_at),
            }
            for lane in view.lanes
        ],
        "delayed": {
            "messages": view.delayed.messages,
            "bytes": view.delayed.bytes,
            "next_due_at": _seconds(view.next_due),
        },
        "group_count": view.group_count,
        "groups": [_group(view, group) for group in view.groups],
    }


def _group(view: MailboxView, group: GroupView) -> Answer:
    return {
        "name": group.name,
        "settled": {lane.lane.name.lower(): settled for lane, settled in zip(view.lanes, group.settled, strict=True)},
        "waiting": group.waiting,
        "open": group.open,
        "exact": group.exact,
        "leased": group.leased,
        "due": group.due,
        "dead": group.dead,
        "dead_more": group.dead_more,
        "next_lease_end": _seconds(group.next_lease_end),
        "max_deliver": group.max_deliver,
    }


def _dead(message: Message) -> Answer:
    return {
        "msg_id": message.msg_id,
        "lane": message.lane.name.lower(),
        "created_at": _seconds(message.created_at),
        "deliveries": message.deliveries,
        "size": len(message.payload),
        "payload_start": base64.b64encode(message.payload[:PAYLOAD_START]).decode(),
    }
