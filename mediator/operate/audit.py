"""The audit log: who changed what, by which way in, and how it ended."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import orjson
import structlog

from mediator.broker import Broker
from mediator.cleanup.collector import CleanupStep, SliceResult
from mediator.errors import MediatorError, NotAllowedError
from mediator.mailboxes.address import DEFAULT_TENANT, redact
from mediator.mailboxes.bounds import DAY
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.session import Table
from mediator.operate.operations import (
    FLAG,
    REDACTED,
    RIGHT,
    TEXT,
    Actor,
    Answer,
    Operation,
    OperationRequest,
    Right,
    Schema,
    about,
    limit,
    many,
    object_schema,
    operation,
    or_null,
    read_numbered,
    read_optional_time,
    whole,
)
from mediator.operate.records import AuditEntry
from mediator.store.base import Transaction

KEPT = 100_000
"""Entries that are kept at most."""
MAX_LISTED = 1000
MAX_REFUSED = 20
"""Different acts of one operator without the right to them that have an entry each within a day; further ones are
counted by operation, so that nobody without rights pushes out others' entries."""
MAX_FAILED = 1000
"""Acts that failed whose entries are remembered, to count repeats in them."""
NOT_OK = "failed"
"""Stands for every result but ``ok``; no error has this code."""
MAX_TEXT = 200
"""Characters of a field that are kept."""
_SECRET = ("password", "secret", "token", "payload")
"""Fields with such a word in their names are not kept."""

_log = structlog.get_logger("audit")


class AuditTable(Table):
    """The entries in SQL, in order of their numbers, which grow and never come again."""

    def add(self, entry: Mapping[str, Any]) -> int:
        """Keep an entry, forget the oldest beyond the bound, and return its number."""
        places = ", ".join("?" * len(entry))
        (entry_id,) = self._session.one(
            f"INSERT INTO audit_log ({', '.join(entry)}) VALUES ({places}) RETURNING no", tuple(entry.values())
        )
        self._execute("DELETE FROM audit_log WHERE no <= ?", (entry_id - KEPT,))
        return int(entry_id)

    def repeat(self, entry_id: int, at: int) -> bool:
        """Count an act once more in an entry; whether it is still there."""
        sql = "UPDATE audit_log SET times = times + 1, last_at = ? WHERE no = ? RETURNING no"
        return self._dialect.first(sql, (at, entry_id)) is not None

    def newest(self, wanted: Mapping[str, Any], limit: int) -> list[AuditEntry]:
        """Return entries that meet all conditions, such as ``{"no < ?": 7}``, the newest first."""
        names = [field.name for field in fields(AuditEntry)]
        where = " AND ".join(["no > 0", *wanted])
        sql = f"SELECT {', '.join(names)} FROM audit_log WHERE {where} ORDER BY no DESC LIMIT ?"
        return [_entry(**dict(zip(names, row, strict=True))) for row in self._execute(sql, (*wanted.values(), limit))]

    def forget(self, until: int, limit: int) -> int:
        """Remove at most ``limit`` entries that are older than a time; return how many."""
        oldest = list(self._execute("SELECT no, at FROM audit_log ORDER BY no LIMIT ?", (limit,)))
        old = [entry_id for entry_id, at in oldest if at < until]
        if old:
            self._execute("DELETE FROM audit_log WHERE no <= ?", (old[-1],))
        return len(old)


def _entry(*, at: int, fields: str, last_at: int | None, **others: Any) -> AuditEntry:
    return AuditEntry(at=at, fields=orjson.loads(fields), last_at=last_at or at, **others)


class OldAudits(CleanupStep):
    """Forgets entries of the audit log that are older than the settings keep them."""

    name = "audit_entries"

    def __init__(self, days: int) -> None:
        self._keep = days * DAY

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Forget at most ``limit`` entries."""
        count = tx.table(AuditTable).forget(now - self._keep, limit)
        return SliceResult(count, count >= limit, {self.name: count})


_Act = tuple[str, str, str, str, str, str]
"""Actor, way in, operation, result, tenant and fields; without the last two, all refused acts with that operation."""


class AuditLog:
    """Keeps what operators do, and lists it. Used on the event loop."""

    def __init__(self, broker: Broker, instance: str) -> None:
        self._broker = broker
        self._instance = instance
        self._failed: OrderedDict[_Act, tuple[int, int]] = OrderedDict()
        """The number and the time of the entry that counts an act which failed, the latest last."""

    async def record(self, actor: Actor, operation: Operation, request: OperationRequest, result: str) -> None:
        """Keep an act; see :data:`mediator.operate.operations.Audit`. If the store refuses it, the log has it alone.

        What fails again within a day is counted in the entry that there is; see also :data:`MAX_REFUSED`.
        """
        tenant = request.get("tenant")
        tenant = _text(tenant)[:MAX_TEXT] if isinstance(tenant, str) and tenant else DEFAULT_TENANT
        fields = orjson.dumps(_kept(operation, request)).decode()
        about = {"actor": actor.name, "via": actor.via, "operation": operation.name, "tenant": tenant, "result": result}
        key = actor.name, actor.via, operation.name, result, tenant, fields
        if result == NotAllowedError.code and key not in self._failed and self._refused(actor) >= MAX_REFUSED:
            key = *key[:4], "", ""
        former = self._failed.get(key)

        def write(tx: Transaction, now: int) -> tuple[int, int]:
            table = tx.table(AuditTable)
            if former is not None and now - former[1] < DAY and table.repeat(former[0], now):
                return former
            entry_id = table.add({"at": now, "instance": self._instance, **about, "fields": fields})
            tx.events.append(Event(EventType.OPERATED, now, tenant, 0, msg_id=entry_id))
            return entry_id, now

        # The log has no fields: they may name a mailbox (A7).
        _log.info("operator acted", **about)
        try:
            entry = await self._broker.write(write, even_when_full=True)
            if result != "ok":
                self._failed[key] = entry
                self._failed.move_to_end(key)
                if len(self._failed) > MAX_FAILED:
                    self._failed.popitem(last=False)
        except MediatorError as error:
            _log.error("an act is missing in the audit log", **about, reason=str(error))

    def _refused(self, actor: Actor) -> int:
        """Return how many different acts of an operator without the right to them have an entry each."""
        since, refused = self._broker.clock() - DAY, NotAllowedError.code
        return sum(key[::3] == (actor.name, refused) and at > since for key, (_, at) in self._failed.items() if key[5])

    @operation(
        "audit-list",
        Right.READ,
        "What operators changed, and which payloads they read, the newest first",
        object_schema(entries=many(AuditEntry.schema()), more=FLAG),
        fields={
            "before": or_null(whole("Entries older than this one.", 0, 2**63 - 1)),
            "actor": about(TEXT, "Of this operator alone."),
            "operation": about(TEXT, "Of this operation alone."),
            "since": or_null(about({"type": "number"}, "From this time on, Unix seconds.")),
            "until": or_null(about({"type": "number"}, "Before this time, Unix seconds.")),
            "result": about(TEXT, f"With this result alone; `{NOT_OK}`: with any but `ok`."),
            "limit": limit(MAX_LISTED),
        },
        path="/audit",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        limit, result = request["limit"], request.get("result", "")
        asked = {
            "no < ?": request.get("before"),
            "actor = ?": request.get("actor", "") or None,
            "operation = ?": request.get("operation", "") or None,
            "at >= ?": read_optional_time(request, "since"),
            "at < ?": read_optional_time(request, "until"),
            **({"result <> ?": "ok"} if result == NOT_OK else {"result = ?": result or None}),
        }
        wanted = {condition: value for condition, value in asked.items() if value is not None}
        found = await self._broker.read(lambda tx, _now: tx.table(AuditTable).newest(wanted, limit + 1))
        return {"entries": [one.to_json() for one in found[:limit]], "more": len(found) > limit}


def _kept(operation: Operation, request: OperationRequest) -> dict[str, Any]:
    """Return what the log keeps of a request: the fields of the operation without secrets and payloads."""
    return {
        name: _redacted(request[name]) if REDACTED in schema else _cut(request[name])
        for name, schema in operation.fields.items()
        if name in request and name != "tenant" and not _is_secret(name, schema)
    }


def _redacted(value: Any) -> Any:
    if not isinstance(value, str):
        # A list of addresses where one is expected, in a request that is refused.
        value = _cut(value)
    return redact(_text(value)) if isinstance(value, str) and read_numbered(value) is None else value


def _is_secret(name: str, schema: Schema) -> bool:
    return RIGHT in schema or bool(schema.get("writeOnly")) or any(word in name for word in _SECRET)


def _cut(value: Any) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    try:
        text = _text(value) if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    except (TypeError, ValueError, RecursionError):
        return f"{type(value).__name__} that is too large"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _text(text: str) -> str:
    """Return a text that every store takes."""
    return text.encode(errors="replace").decode().replace("\0", "\ufffd")
