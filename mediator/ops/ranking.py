"""The operation ``mailbox-rank``: the fullest, oldest or busiest of the mailboxes whose addresses begin alike."""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.mailboxes.address import finds_address, redact
from mediator.mailboxes.ports import MailboxRow
from mediator.ops.mailbox_operations import PREFIX, seconds
from mediator.ops.operations import Answer, OperationRequest, Right, is_allowed, operation, read_number, read_text
from mediator.ops.schemas import ADDRESS, COUNT, FLAG, TEXT, TIME, about, limit, many, obj, or_null, whole
from mediator.store.base import Transaction

LOOKED_AT: Final = 10_000
"""Mailboxes that are compared; the index has them in order of address and no other."""
MAX_LISTED: Final = 1000
ORDERS: Final = ("address", "depth", "size", "age", "rate")
FRESH_SECONDS: Final = 4.0
"""What was read serves other requests for so long."""
RATE_SECONDS: Final = 60.0
"""Rates are of the time since an earlier look, which a later one replaces after so long."""
MIN_RATE_SECONDS: Final = 5.0
MAX_KEPT: Final = 4
"""Questions whose looks are remembered."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look found."""

    at: float
    rows: list[MailboxRow]

    def next_ids(self) -> dict[int, int]:
        return {row.no: row.next_id for row in self.rows}


@dataclass(slots=True)
class _Question:
    """The last look for a tenant and a prefix, and what an earlier one found, for rates."""

    look: _Look
    since: float
    next_ids: dict[int, int]


_ROW = obj(
    mail_address=ADDRESS,
    tenant=TEXT,
    number=COUNT,
    kind=TEXT,
    retention=TEXT,
    messages=COUNT,
    bytes=COUNT,
    newest_at=or_null(TIME),
    oldest_at=or_null(TIME),
    expire_at=or_null(TIME),
    rate=about(or_null({"type": "number"}), "Messages a second that came lately; null: not known yet."),
)


class RankingOperations:
    """The operation, and the looks that it compares."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._questions: OrderedDict[tuple[str, str], _Question] = OrderedDict()
        self._looking = asyncio.Lock()

    @operation(
        "mailbox-rank",
        Right.READ,
        "Mailboxes by depth, size, age of the oldest message, or rate",
        obj(
            mailboxes=many(_ROW),
            looked_at=about(COUNT, "How many mailboxes were compared."),
            complete=about(FLAG, f"Whether these are all; at most {LOOKED_AT} are compared."),
        ),
        fields={
            "tenant": about(TEXT, "Of this tenant alone."),
            "prefix": about(TEXT, PREFIX),
            "order": {"type": "string", "enum": list(ORDERS), "default": "depth"},
            "skip": whole("Leave out the first.", 0, LOOKED_AT, default=0),
            "limit": limit(MAX_LISTED),
        },
        path="/mailbox-ranking",
    )
    async def _rank(self, request: OperationRequest) -> Answer:
        tenant, prefix = read_text(request, "tenant"), read_text(request, "prefix")
        skip, limit = read_number(request, "skip", 0, LOOKED_AT), read_number(request, "limit", 1, MAX_LISTED)
        order = read_text(request, "order")
        if order not in ORDERS:
            raise BadRequestError("order", f"expected one of {', '.join(ORDERS)}")
        # One at a time: each may read thousands of rows.
        async with self._looking:
            question = await self._ask(tenant, prefix)
        look = question.look
        rates = _rates(question)
        now = look.at * 1000
        keys = {
            "depth": lambda row: -row.messages,
            "size": lambda row: -row.bytes,
            "age": lambda row: now if row.oldest_at is None else row.oldest_at,
            "rate": lambda row: -rates.get(row.no, 0),
        }
        if is_allowed(Right.READ_PAYLOAD):
            rows = look.rows
        else:
            # By what is shown: the order of the addresses would tell about the rest of them.
            rows = [row for row in look.rows if finds_address(prefix, row.address, whole=False)]
            rows.sort(key=lambda row: (row.tenant, redact(row.address)))
        if order in keys:
            rows = sorted(rows, key=keys[order])
        return {
            "mailboxes": [_shown(row, rates.get(row.no)) for row in rows[skip : skip + limit]],
            "looked_at": len(rows),
            "complete": len(rows) < LOOKED_AT,
        }

    async def _ask(self, tenant: str, prefix: str) -> _Question:
        question = self._questions.pop((tenant, prefix), None)
        now = time.time()
        if question is None or now - question.look.at > FRESH_SECONDS:
            look = _Look(now, await self._broker.read(lambda tx, at: _survey(tx, tenant, prefix, at)))
            if question is None or now - question.look.at > RATE_SECONDS:
                question = _Question(look, now, look.next_ids())
            elif now - question.since > RATE_SECONDS:
                question = _Question(look, question.look.at, question.look.next_ids())
            else:
                question.look = look
        self._questions[tenant, prefix] = question
        while len(self._questions) > MAX_KEPT:
            self._questions.popitem(last=False)
        return question


def _survey(tx: Transaction, tenant: str, prefix: str, now: int) -> list[MailboxRow]:
    found: list[MailboxRow] = []
    for name in [tenant] if tenant else tx.mailboxes.tenants():
        found += tx.mailboxes.survey(name, prefix, LOOKED_AT - len(found), now)
    return found


def _rates(question: _Question) -> dict[int, float]:
    """Return messages a second since the earlier look, of the mailboxes that were there."""
    spent = question.look.at - question.since
    if spent < MIN_RATE_SECONDS:
        return {}
    before = question.next_ids
    return {row.no: (row.next_id - before[row.no]) / spent for row in question.look.rows if row.no in before}


def _shown(row: MailboxRow, rate: float | None) -> Answer:
    return {
        "mail_address": row.address,
        "tenant": row.tenant,
        "number": row.no,
        "kind": row.kind.value,
        "retention": row.retention.value,
        "messages": row.messages,
        "bytes": row.bytes,
        "newest_at": seconds(row.last_at or None),
        "oldest_at": seconds(row.oldest_at),
        "expire_at": seconds(row.expire_at),
        "rate": rate,
    }
