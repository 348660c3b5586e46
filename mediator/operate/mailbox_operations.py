"""Operations on mailboxes, of every tenant: create, list, rank, show, diagnose, change, purge and delete them."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from mediator.broker import Broker
from mediator.errors import BadRequestError, MailboxExistsError
from mediator.fields import Fields
from mediator.mailboxes import creating, moving
from mediator.mailboxes.address import DEFAULT_TENANT, NUMBERED, finds_address, parse_address, redact
from mediator.mailboxes.bounds import MAX_ACK_WAIT, MAX_DESC, MAX_IDS, MAX_TAG, MAX_TAGS, MIN_ACK_WAIT, Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.mailbox import Mailbox, MailboxRow, Retention
from mediator.mailboxes.tables.backlog import Backlogs, MailboxBacklog
from mediator.operate.diagnosis import Finding, Inspection, diagnose, inspect_mailbox, summarize
from mediator.operate.operations import (
    ADDRESS,
    COUNT,
    FLAG,
    PLACE,
    REDACTED,
    TENANT,
    TEXT,
    TEXTS,
    Answer,
    OperationRequest,
    Right,
    about,
    is_allowed,
    limit,
    many,
    object_schema,
    operation,
    or_null,
    read_numbered,
    show_secret,
    whole,
)
from mediator.operate.records import MailboxSummary, MailboxView, RankedMailbox
from mediator.store.base import Transaction

MAX_LISTED = 1000
PURGE_SECONDS: Final = 120.0
PREFIX = "Addresses that begin so; without the right `read-payload`, more than four characters find a whole address."

MAX_TTL_SECONDS: Final = 100 * 366 * 86400
_ACK_WAIT = or_null(whole("Milliseconds; 0: no lease; null or absent: the default.", 0, MAX_ACK_WAIT))

_PATH = "/mailboxes/{mail_address}"
LOOKED_AT: Final = 10_000
"""Mailboxes that are compared; the index has them in order of address and no other."""
MAX_RANKED: Final = 1000
ORDERS: Final = ("address", "depth", "size", "age", "rate")
FRESH_SECONDS: Final = 4.0
"""What was read serves other requests for so long."""
RATE_SECONDS: Final = 60.0
"""Rates are of the time since an earlier snapshot, which is replaced after this time."""
MIN_RATE_SECONDS: Final = 5.0
MAX_KEPT: Final = 4
"""Listings that are remembered."""


class MailboxOperations:
    """The operations. Times in their answers are Unix seconds."""

    def __init__(self, broker: Broker, tenants: Sequence[str]) -> None:
        """``tenants``: the names of all living ones, kept up to date by their owner."""
        self._broker = broker
        self._tenants = tenants

    @operation(
        "mailbox-list",
        Right.READ,
        "Mailboxes in order of tenant and address; of all tenants if none is named",
        object_schema(mailboxes=many(MailboxSummary.schema()), more=FLAG),
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
        tenant, after_tenant = request.get("tenant", ""), request.get("after_tenant", "")
        prefix, last = request.get("prefix", ""), request.get("after", "")
        limit = request["limit"]

        whole = is_allowed(Right.READ_PAYLOAD)

        def read(tx: Transaction, now: int) -> tuple[list[Mailbox], bool]:
            found: list[Mailbox] = []
            after = _page_end(tx, tenant or after_tenant, last, whole=whole)
            for name in [tenant] if tenant else tx.mailboxes.tenants():
                if name >= after_tenant and len(found) <= limit:
                    start = after if tenant or name == after_tenant else ""
                    found += _beginning_with(prefix, tx, name, start, limit + 1 - len(found), now, whole=whole)
            return found[:limit], len(found) > limit

        found, more = await self._broker.read(read)
        return {"mailboxes": [summarize(mailbox).to_json() for mailbox in found], "more": more}

    @operation(
        "mailbox-create",
        Right.OPERATE,
        "Create a mailbox",
        object_schema(
            tenant=TEXT,
            mail_address=ADDRESS,
            number=COUNT,
            send_address=ADDRESS,
            token=about(TEXT, "What clients need to change its description; in no other answer."),
        ),
        fields={
            "tenant": TENANT,
            "name": about(TEXT, "Its address; without one, a random one is made.", **{REDACTED: "read-payload"}),
            "ttl_seconds": or_null(
                whole("It expires after so long; 0: never; null or absent: the default.", 0, MAX_TTL_SECONDS)
            ),
            "desc": about(TEXT, "What it is for."),
            "tags": TEXTS,
            "retention": about(
                {"type": "string", "enum": [*Retention], "default": Retention.KEEP.value},
                "`until_ack`: a work queue, in which the first ACK removes a message.",
            ),
            "public": about(FLAG, "Whether clients find it in the list of public mailboxes.", default=False),
            "archive": about(FLAG, "Whether every message is archived.", default=False),
            "ack_wait_ms": _ACK_WAIT,
        },
        method="POST",
        path="/mailboxes",
    )
    async def _create(self, request: OperationRequest) -> Answer:
        fields, ttl = Fields(request), request.get("ttl_seconds")
        tenant = request.get("tenant") or DEFAULT_TENANT
        if tenant not in self._tenants:
            raise BadRequestError("tenant", "expected the name of a tenant, there is none of this name")
        made = await self._broker.create(
            Create(
                tenant,
                request.get("name") or None,
                None if ttl is None else ttl * 1000,
                fields.text("desc", MAX_DESC, lines=True) or "",
                fields.words("tags", MAX_TAGS, MAX_TAG) or (),
                request["public"] or None,
                retention=Retention(request["retention"]),
                archive=request["archive"],
                ack_wait=_read_ack_wait(request),
            )
        )
        if made.token is None:
            raise MailboxExistsError(request["name"])
        mailbox = made.mailbox
        return {
            "tenant": tenant,
            "mail_address": mailbox.address,
            "number": mailbox.id,
            "send_address": made.send_only,
            "token": made.token,
        }

    @operation("mailbox-show", Right.READ, "One mailbox in detail", MailboxView.schema(), fields=PLACE, path=_PATH)
    async def _show(self, request: OperationRequest) -> Answer:
        return (await self._inspect(request)).view.to_json()

    async def _inspect(self, request: OperationRequest) -> Inspection:
        tenant, address = read_place(request)
        broker, bounds = self._broker, self._bounds(tenant)
        return await broker.read(lambda tx, now: inspect_mailbox(tx, tenant, address, bounds, now, broker.hooks))

    def _bounds(self, tenant: str) -> Bounds:
        """Return what bounds a tenant's mailboxes, by its own quota if it has one."""
        return replace(self._broker.bounds, tenant=self._broker.quotas.of(tenant))

    @operation(
        "mailbox-set",
        Right.OPERATE,
        "Change a mailbox's default lease: how long a fetched message is reserved for the worker that has it",
        object_schema(mail_address=ADDRESS, ack_wait_ms=or_null(COUNT)),
        fields={**PLACE, "ack_wait_ms": _ACK_WAIT},
        method="PATCH",
        path=_PATH,
    )
    async def _set(self, request: OperationRequest) -> Answer:
        ack_wait, key = _read_ack_wait(request), read_place(request)
        mailbox = await self._broker.write(lambda tx, now: creating.set_ack_wait(tx, *key, ack_wait, now), key)
        return {"mail_address": mailbox.address, "ack_wait_ms": mailbox.ack_wait}

    @operation(
        "mailbox-purge",
        Right.OPERATE,
        "Remove messages of a mailbox for all groups",
        object_schema(mail_address=ADDRESS, purged=COUNT),
        fields={
            **PLACE,
            "msg_ids": or_null(about(many(COUNT), "These messages; null or absent: all, those that are delayed too.")),
        },
        method="POST",
        path=f"{_PATH}/purge",
        within=PURGE_SECONDS,
    )
    async def _purge(self, request: OperationRequest) -> Answer:
        key, write = read_place(request), self._broker.write
        ids = Fields(request).numbers("msg_ids", MAX_IDS)
        if ids is not None:
            purged = await write(lambda tx, now: moving.delete_some(tx, *key, ids, now), key, even_when_full=True)
            return {"mail_address": key[1], "purged": purged}
        whole, purged = await self._broker.read(lambda tx, now: moving.begin_purge(tx, *key, now)), 0
        while count := await write(lambda tx, now: moving.purge(tx, whole, now), key, even_when_full=True):
            purged += count
        return {"mail_address": key[1], "purged": purged}

    @operation(
        "mailbox-delete",
        Right.OPERATE,
        "Delete a mailbox with all its mail",
        object_schema(mail_address=ADDRESS, deleted=FLAG),
        fields=PLACE,
        method="DELETE",
        path=_PATH,
    )
    async def _delete(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        await self._broker.delete_mailbox(tenant, address)
        return {"mail_address": address, "deleted": True}

    @operation(
        "doctor",
        Right.READ,
        "Why a mailbox is stuck",
        object_schema(findings=many(Finding.schema())),
        fields=PLACE,
        path=f"{_PATH}/doctor",
    )
    async def _doctor(self, request: OperationRequest) -> Answer:
        found = await self._inspect(request)
        named = show_secret(found.mailbox.address, Right.READ_PAYLOAD)
        return {
            "findings": [
                one.to_json()
                for one in diagnose(found, named, self._bounds(found.mailbox.tenant), self._broker.clock())
            ]
        }


def _read_ack_wait(request: OperationRequest) -> int | None:
    ack_wait: int | None = request.get("ack_wait_ms")
    if ack_wait is not None and 0 < ack_wait < MIN_ACK_WAIT:
        raise BadRequestError("ack_wait_ms", f"expected 0, or {MIN_ACK_WAIT} to {MAX_ACK_WAIT}")
    return ack_wait


def read_place(request: OperationRequest) -> tuple[str, str]:
    """Return the tenant and address that a request names; :class:`BadRequestError` when the address is none."""
    return request.get("tenant", "") or DEFAULT_TENANT, parse_address(request.get("mail_address", ""))


async def find_address(broker: Broker, tenant: str, number: int) -> str | None:
    """Return the address of a tenant's mailbox by its number; None if no such mailbox lives."""

    def read(tx: Transaction, now: int) -> str | None:
        mailbox = tx.mailboxes.by_id([number]).get(number)
        known = mailbox is not None and mailbox.tenant == tenant and mailbox.is_live(now)
        return mailbox.address or None if mailbox is not None and known else None

    return await broker.read(read)


def _page_end(tx: Transaction, tenant: str, last: str, *, whole: bool) -> str:
    """Return the address behind which a page begins. Whoever sees no addresses names one that there is (A7)."""
    if (number := read_numbered(last)) is not None:
        mailbox = tx.mailboxes.by_id([number]).get(number)
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
        if exact is not None and exact.is_live(now):
            yield exact
    for mailbox in tx.mailboxes.list(tenant, max(after, prefix), limit, now):
        if mailbox.address.startswith(prefix) and finds_address(prefix, mailbox.address, whole=whole):
            yield mailbox


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Mailboxes as one query read them."""

    at: float
    rows: list[MailboxRow]

    def counts(self) -> "dict[int, _Flow]":
        return {row.id: _Flow(row.next_id, row.next_id - row.messages) for row in self.rows}


@dataclass(slots=True)
class _Listing:
    """The last snapshot for a tenant and a prefix, and the counts of an earlier one, for rates."""

    snapshot: _Snapshot
    since: float
    counts: "dict[int, _Flow]"


class RankingOperations:
    """The operation, and the snapshots that it compares."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._questions: OrderedDict[tuple[str, str], _Listing] = OrderedDict()
        self._list_lock = asyncio.Lock()

    @operation(
        "mailbox-rank",
        Right.READ,
        "Mailboxes by depth, size, age of the oldest message, or rate",
        object_schema(
            mailboxes=many(RankedMailbox.schema()),
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
        tenant, prefix = request.get("tenant", ""), request.get("prefix", "")
        skip, limit = request["skip"], request["limit"]
        order = request.get("order", "")
        # One at a time: each may read thousands of rows.
        async with self._list_lock:
            listing = await self._ask(tenant, prefix)
        snapshot = listing.snapshot
        rates = _rates(listing)
        now = snapshot.at * 1000
        keys: dict[str, Callable[[MailboxRow], float]] = {
            "depth": lambda row: -row.messages,
            "size": lambda row: -row.bytes,
            "age": lambda row: now if row.oldest_at is None else row.oldest_at,
            "rate": lambda row: -rates.get(row.id, _NO_RATES).came,
        }
        if is_allowed(Right.READ_PAYLOAD):
            rows = snapshot.rows
        else:
            # By what is shown: the order of the addresses would reveal the rest of them.
            rows = [row for row in snapshot.rows if finds_address(prefix, row.address, whole=False)]
            rows.sort(key=lambda row: (row.tenant, redact(row.address)))
        if order in keys:
            rows = sorted(rows, key=keys[order])
        shown = rows[skip : skip + limit]
        held = await self._broker.read(lambda tx, now: _held(tx, [row.id for row in shown], now))
        return {
            "mailboxes": [_rank(row, rates.get(row.id), held.get(row.id)).to_json() for row in shown],
            "looked_at": len(rows),
            "complete": len(rows) < LOOKED_AT,
        }

    async def _ask(self, tenant: str, prefix: str) -> _Listing:
        listing = self._questions.pop((tenant, prefix), None)
        now = time.time()
        if listing is None or now - listing.snapshot.at > FRESH_SECONDS:
            snapshot = _Snapshot(now, await self._broker.read(lambda tx, at: _list_rows(tx, tenant, prefix, at)))
            if listing is None or now - listing.snapshot.at > RATE_SECONDS:
                listing = _Listing(snapshot, now, snapshot.counts())
            elif now - listing.since > RATE_SECONDS:
                listing = _Listing(snapshot, listing.snapshot.at, listing.snapshot.counts())
            else:
                listing.snapshot = snapshot
        self._questions[tenant, prefix] = listing
        while len(self._questions) > MAX_KEPT:
            self._questions.popitem(last=False)
        return listing


def _list_rows(tx: Transaction, tenant: str, prefix: str, now: int) -> list[MailboxRow]:
    found: list[MailboxRow] = []
    for name in [tenant] if tenant else tx.mailboxes.tenants():
        found += tx.mailboxes.list_rows(name, prefix, LOOKED_AT - len(found), now)
    return found


class _Flow(NamedTuple):
    """Messages that came to a mailbox and that left it, in all or in a second."""

    came: float
    left: float


_NO_RATES: Final = _Flow(0, 0)


def _rates(listing: _Listing) -> dict[int, _Flow]:
    """Return what came and left in a second since the earlier snapshot, for the mailboxes that were there."""
    spent = listing.snapshot.at - listing.since
    if spent < MIN_RATE_SECONDS:
        return {}
    before = listing.counts
    return {
        mailbox_id: _Flow((now.came - before[mailbox_id].came) / spent, (now.left - before[mailbox_id].left) / spent)
        for mailbox_id, now in listing.snapshot.counts().items()
        if mailbox_id in before
    }


def _held(tx: Transaction, numbers: Sequence[int], now: int) -> dict[int, MailboxBacklog]:
    """Return what waits in each of these mailboxes, those that live."""
    table = tx.table(Backlogs)
    return {found.id: found for mailbox_id in numbers for found in table.read_slice(mailbox_id - 1, 1, now)}


def _rank(row: MailboxRow, rates: _Flow | None, held: MailboxBacklog | None) -> RankedMailbox:
    leased, delayed, given_back, dead = (
        (held.leased, held.delayed, held.given_back, held.dead) if held is not None else (0, 0, 0, 0)
    )
    return RankedMailbox.of(
        row,
        mail_address=row.address,
        number=row.id,
        newest_at=row.last_at or None,
        ready=max(0, row.messages - leased - given_back - dead),
        leased=leased,
        delayed=delayed + given_back,
        dead=dead,
        rate=None if rates is None else rates.came,
        rate_out=None if rates is None else max(0.0, rates.left),
    )
