"""Operations on mailboxes, of every tenant: list, rank, show, diagnose, change and delete them."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT, NUMBERED, finds_address, parse_address, redact
from mediator.mailboxes.bounds import MAX_ACK_WAIT, MIN_ACK_WAIT
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.ports import MailboxRow
from mediator.operate.diagnosis import GroupView, MailboxView, diagnose, inspect_mailbox
from mediator.operate.operations import (
    ADDRESS,
    COUNT,
    FINDINGS,
    FLAG,
    LANE,
    PLACE,
    TEXT,
    TEXTS,
    TIME,
    Answer,
    OperationRequest,
    Right,
    Schema,
    about,
    is_allowed,
    limit,
    many,
    obj,
    operation,
    or_null,
    read_number,
    read_numbered,
    read_text,
    show_secret,
    table,
    whole,
)
from mediator.store.base import Transaction

MAX_LISTED = 1000
PREFIX = "Addresses that begin so; without the right `read-payload`, more than four characters find a whole address."

_LISTED: dict[str, Schema] = {
    "mail_address": ADDRESS,
    "tenant": TEXT,
    "number": about(COUNT, "`id:` and this number stand for its address in other requests."),
    "messages": COUNT,
    "bytes": COUNT,
    "newest_at": or_null(TIME),
    "expire_at": or_null(TIME),
    "retention": TEXT,
}
_GROUP = obj(
    name=TEXT,
    settled=table({"type": "integer"}),
    waiting=COUNT,
    open=COUNT,
    exact=FLAG,
    leased=COUNT,
    delayed=COUNT,
    due=COUNT,
    dead=COUNT,
    dead_more=FLAG,
    next_lease_end=or_null(TIME),
    next_delay_end=or_null(TIME),
    max_deliver=or_null(COUNT),
)
_SHOWN = obj(
    **_LISTED,
    send_address=ADDRESS,
    created_at=TIME,
    desc=TEXT,
    tags=TEXTS,
    public=FLAG,
    archive=FLAG,
    ack_wait_ms=or_null(COUNT),
    default_ack_wait_ms=COUNT,
    connection=or_null(COUNT),
    next_id=COUNT,
    oldest=or_null(obj(msg_id=COUNT, created_at=TIME)),
    counted=COUNT,
    lanes=many(obj(lane=LANE, messages=COUNT, oldest_id=or_null(COUNT), oldest_at=or_null(TIME))),
    delayed=obj(messages=COUNT, bytes=COUNT, next_due_at=or_null(TIME)),
    group_count=COUNT,
    groups=many(_GROUP),
)

_PATH = "/mailboxes/{mail_address}"
LOOKED_AT: Final = 10_000
"""Mailboxes that are compared; the index has them in order of address and no other."""
MAX_RANKED: Final = 1000
ORDERS: Final = ("address", "depth", "size", "age", "rate")
FRESH_SECONDS: Final = 4.0
"""What was read serves other requests for so long."""
RATE_SECONDS: Final = 60.0
"""Rates are of the time since an earlier look, which a later one replaces after so long."""
MIN_RATE_SECONDS: Final = 5.0
MAX_KEPT: Final = 4
"""Questions whose looks are remembered."""


class MailboxOperations:
    """The operations. Times in their answers are Unix seconds."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @operation(
        "mailbox-list",
        Right.READ,
        "Mailboxes in order of tenant and address; of all tenants if none is named",
        obj(mailboxes=many(obj(**_LISTED)), more=FLAG),
        fields={
            "tenant": about(TEXT, "Of this tenant alone."),
            "prefix": about(TEXT, PREFIX),
            "after_tenant": about(TEXT, "With `after`: the tenant of the last mailbox of the page before."),
            "after": about(TEXT, "The last address of the page before, or `id:` and its number."),
            "limit": limit(MAX_LISTED),
        },
        path="/mailboxes",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        """List mailboxes in order of tenant and address; all tenants if none is named."""
        tenant, after_tenant = read_text(request, "tenant"), read_text(request, "after_tenant")
        prefix, last = read_text(request, "prefix"), read_text(request, "after")
        limit = read_number(request, "limit", 1, MAX_LISTED)

        whole = is_allowed(Right.READ_PAYLOAD)

        def look(tx: Transaction, now: int) -> tuple[list[Mailbox], bool]:
            found: list[Mailbox] = []
            after = _page_end(tx, tenant or after_tenant, last, whole=whole)
            for name in [tenant] if tenant else tx.mailboxes.tenants():
                if name >= after_tenant and len(found) <= limit:
                    start = after if tenant or name == after_tenant else ""
                    found += _beginning_with(prefix, tx, name, start, limit + 1 - len(found), now, whole=whole)
            return found[:limit], len(found) > limit

        found, more = await self._broker.read(look)
        return {"mailboxes": [_listed(mailbox) for mailbox in found], "more": more}

    @operation("mailbox-show", Right.READ, "One mailbox in detail", _SHOWN, fields=PLACE, path=_PATH)
    async def _show(self, request: OperationRequest) -> Answer:
        return _shown(await self._look(request), self._broker.bounds.default_ack_wait)

    async def _look(self, request: OperationRequest) -> MailboxView:
        tenant, address = read_place(request)
        broker = self._broker
        return await broker.read(
            lambda tx, now: inspect_mailbox(tx, tenant, address, broker.bounds.tenant, now, broker.hooks)
        )

    @operation(
        "mailbox-set",
        Right.OPERATE,
        "Change how long a message is leased to the member of a group that fetched it",
        obj(mail_address=ADDRESS, ack_wait_ms=or_null(COUNT)),
        fields={
            **PLACE,
            "ack_wait_ms": or_null(whole("Milliseconds; 0: no lease; null or absent: the default.", 0, MAX_ACK_WAIT)),
        },
        method="PATCH",
        path=_PATH,
    )
    async def _set(self, request: OperationRequest) -> Answer:
        ack_wait = None
        if request.get("ack_wait_ms") is not None:
            ack_wait = read_number(request, "ack_wait_ms", 0, MAX_ACK_WAIT)
            if 0 < ack_wait < MIN_ACK_WAIT:
                raise BadRequestError("ack_wait_ms", f"expected 0, or {MIN_ACK_WAIT} to {MAX_ACK_WAIT}")
        mailbox = await self._broker.set_ack_wait(*read_place(request), ack_wait)
        return {"mail_address": mailbox.address, "ack_wait_ms": mailbox.ack_wait}

    @operation(
        "mailbox-delete",
        Right.OPERATE,
        "Delete a mailbox with all its mail",
        obj(mail_address=ADDRESS, deleted=FLAG),
        fields=PLACE,
        method="DELETE",
        path=_PATH,
    )
    async def _delete(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        await self._broker.delete_mailbox(tenant, address)
        return {"mail_address": address, "deleted": True}

    @operation(
        "doctor", Right.READ, "Why a mailbox is stuck", obj(findings=FINDINGS), fields=PLACE, path=f"{_PATH}/doctor"
    )
    async def _doctor(self, request: OperationRequest) -> Answer:
        view = await self._look(request)
        named = show_secret(view.mailbox.address, Right.READ_PAYLOAD)
        return {"findings": [asdict(one) for one in diagnose(view, named, self._broker.bounds, self._broker.clock())]}


def read_place(request: OperationRequest) -> tuple[str, str]:
    """Return the tenant and address that a request names; :class:`BadRequestError` when the address is none."""
    return read_text(request, "tenant") or DEFAULT_TENANT, parse_address(read_text(request, "mail_address"))


async def find_address(broker: Broker, tenant: str, number: int) -> str | None:
    """Return the address of a tenant's mailbox by its number; None if no such mailbox lives."""

    def look(tx: Transaction, now: int) -> str | None:
        mailbox = tx.mailboxes.by_no([number]).get(number)
        known = mailbox is not None and mailbox.tenant == tenant and mailbox.lives(now)
        return mailbox.address or None if mailbox is not None and known else None

    return await broker.read(look)


def seconds(at: int | None) -> float | None:
    """Return milliseconds since the epoch as Unix seconds."""
    return None if at is None else at / 1000


def _page_end(tx: Transaction, tenant: str, last: str, *, whole: bool) -> str:
    """Return the address behind which a page begins. Whoever sees no addresses names one that there is (A7)."""
    if (number := read_numbered(last)) is not None:
        mailbox = tx.mailboxes.by_no([number]).get(number)
    elif whole or not last:
        return last
    else:
        mailbox = tx.mailboxes.find(tenant, last)
    if mailbox is None or mailbox.tenant != tenant or not mailbox.address:
        raise BadRequestError("after", f"expected {NUMBERED} and the number of the last mailbox of the page before")
    return mailbox.address


def _beginning_with(
    prefix: str, tx: Transaction, tenant: str, after: str, limit: int, now: int, *, whole: bool
) -> Iterator[Mailbox]:
    # Addresses are ordered by bytes, so those with a common prefix are adjacent.
    if prefix and not after:
        exact = tx.mailboxes.find(tenant, prefix)
        if exact is not None and exact.lives(now):
            yield exact
    for mailbox in tx.mailboxes.list(tenant, max(after, prefix), limit, now):
        if mailbox.address.startswith(prefix) and finds_address(prefix, mailbox.address, whole=whole):
            yield mailbox


def _listed(mailbox: Mailbox) -> Answer:
    return {
        "mail_address": mailbox.address,
        "tenant": mailbox.tenant,
        "number": mailbox.no,
        "messages": mailbox.messages,
        "bytes": mailbox.bytes,
        "newest_at": seconds(mailbox.last_at or None),
        "expire_at": seconds(mailbox.expire_at),
        "retention": mailbox.retention.value,
    }


def _shown(view: MailboxView, default_ack_wait: int) -> Answer:
    mailbox = view.mailbox
    oldest = view.oldest
    return {
        **_listed(mailbox),
        "send_address": view.send_address,
        "created_at": seconds(mailbox.created_at),
        "desc": mailbox.desc,
        "tags": list(mailbox.tags),
        "public": mailbox.public,
        "archive": mailbox.archive,
        "ack_wait_ms": mailbox.ack_wait,
        "default_ack_wait_ms": default_ack_wait,
        "connection": view.connection_no,
        "next_id": mailbox.next_id,
        "oldest": None if oldest is None else {"msg_id": oldest.msg_id, "created_at": seconds(oldest.created_at)},
        "counted": view.counted,
        "lanes": [
            {
                "lane": lane.lane.name.lower(),
                "messages": lane.messages,
                "oldest_id": lane.oldest_id,
                "oldest_at": seconds(lane.oldest_at),
            }
            for lane in view.lanes
        ],
        "delayed": {
            "messages": view.delayed.messages,
            "bytes": view.delayed.bytes,
            "next_due_at": seconds(view.next_due),
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
        "delayed": group.delayed,
        "due": group.due,
        "dead": group.dead,
        "dead_more": group.dead_more,
        "next_lease_end": seconds(group.next_lease_end),
        "next_delay_end": seconds(group.next_delay_end),
        "max_deliver": group.max_deliver,
    }


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
            "limit": limit(MAX_RANKED),
        },
        path="/mailbox-ranking",
    )
    async def _rank(self, request: OperationRequest) -> Answer:
        tenant, prefix = read_text(request, "tenant"), read_text(request, "prefix")
        skip, limit = read_number(request, "skip", 0, LOOKED_AT), read_number(request, "limit", 1, MAX_RANKED)
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
            "mailboxes": [_ranked(row, rates.get(row.no)) for row in rows[skip : skip + limit]],
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


def _ranked(row: MailboxRow, rate: float | None) -> Answer:
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
