"""What operators see: a typed record for each noun, from which schemas, JSON, commands' columns and pages follow.

A record is a frozen dataclass that derives from :class:`Record`. Its annotations say everything::

    @dataclass(frozen=True, slots=True)
    class Parcel(Record):
        mail_address: Address
        weight: Annotated[int, described("In grams.")]
        sent_at: Annotated[Time | None, Column("sent", absent="not yet")]

Texts, flags and counts (whole numbers from 0) need no more than ``str``, ``bool`` and ``int``. Beside a type may stand
a :class:`JsonSchema`, and the :class:`Column` under which commands and pages show it.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from types import UnionType
from typing import Annotated, Any, Final, Self, Union, get_args, get_origin, get_type_hints

from mediator.mailboxes import lanes, mailbox
from mediator.operate.operations import (
    ADDRESS,
    ANY,
    COUNT,
    FLAG,
    LANE,
    RIGHT,
    TEXT,
    TIME,
    Answer,
    Right,
    Schema,
    many,
    object_schema,
    or_null,
    table,
)
from mediator.tenants.records import QUOTAS

# How a record is described.


class Kind(Enum):
    """How a value is shown."""

    TEXT = auto()
    PROSE = auto()
    """Sentences of ours, with commands between backticks."""
    CODE = auto()
    STATE = auto()
    """A word such as ``ok`` or ``failed``, which pages colour."""
    NUMBER = auto()
    SIZE = auto()
    RATE = auto()
    COUNTS = auto()
    """How many of each, by name."""
    SECONDS = auto()
    """How long something took."""
    TIME = auto()
    LANE = auto()


_NUMBERS: Final = frozenset({Kind.NUMBER, Kind.SIZE, Kind.RATE, Kind.SECONDS})


@dataclass(frozen=True, slots=True)
class Column:
    """How a field is shown in tables of commands and pages."""

    title: str = ""
    """By default the name of the field, without ``_at``."""
    absent: str = ""
    """What is shown for null."""
    field: str = ""
    kind: Kind = Kind.TEXT
    link: str = ""
    """The page of the console that a value leads to, with fields of the record in braces."""
    link_right: Right = Right.READ
    """What that page needs; without it, a value is no link."""
    bound: str = ""
    """The field of the record that has the bounds of such values, by their names."""
    alarm: bool = False
    """Whether a number above 0 is bad news."""
    prefix: Callable[[Answer], str] | None = None
    """Returns what stands before the value of a record, such as "≤ "."""
    right: Right = Right.READ
    """What an actor needs to see the values."""

    @property
    def is_number(self) -> bool:
        """Whether its values are aligned as numbers."""
        return self.kind in _NUMBERS

    @property
    def heading(self) -> str:
        """The heading in a command's table; that of numbers ends in ``#``."""
        return f"{self.title}#" if self.is_number else self.title


@dataclass(frozen=True, slots=True, eq=False)
class JsonSchema:
    """The schema of a field in place of that of its type, or words beside it if it has no ``type``."""

    words: Schema


def described(text: str) -> JsonSchema:
    """Return the word of a schema that describes a field."""
    return JsonSchema({"description": text})


INTERNAL: Final = object()
"""Marks a field that is in no answer."""

Address = Annotated[str, JsonSchema(ADDRESS), Kind.CODE]
Lane = Annotated[lanes.Lane, Kind.LANE]
Bytes = Annotated[int, Kind.SIZE]
Time = Annotated[int, Kind.TIME]
"""Milliseconds since the epoch; Unix seconds in answers."""
UnixSeconds = Annotated[float, JsonSchema(TIME), Column(kind=Kind.TIME)]
Rate = Annotated[float, Kind.RATE]
Seconds = Annotated[float, Kind.SECONDS]
Payload = Annotated[bytes, described("In base64.")]
PAYLOAD: Final = JsonSchema({RIGHT: Right.READ_PAYLOAD.value})
"""Marks what only actors with the right ``read-payload`` see; others' answers lack it."""

Write = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Field:
    """What the annotation of a field says."""

    schema: Schema
    column: Column
    write: Write | None = None
    """Returns the JSON of a value; None: the value is JSON."""

    def to_json(self, value: Any) -> Any:
        return value if self.write is None or value is None else self.write(value)


_PLAIN: Final[Mapping[Any, _Field]] = {
    str: _Field(TEXT, Column()),
    bool: _Field(FLAG, Column()),
    int: _Field(COUNT, Column(kind=Kind.NUMBER)),
    float: _Field({"type": "number"}, Column(kind=Kind.NUMBER)),
    bytes: _Field(TEXT, Column(), lambda data: base64.b64encode(data).decode()),
    Any: _Field(ANY, Column()),
}


class Record:
    """What an operation answers, or a part of it."""

    __slots__ = ()

    @classmethod
    def schema(cls) -> Schema:
        """Return the JSON schema of the record."""
        return object_schema(**{name: field.schema for name, field in _fields(cls).items()})

    @classmethod
    def columns(cls, *names: str, **titles: str) -> list[Column]:
        """Return the columns of a table: those of ``names``, where ``titles`` says so under another title."""
        known = _fields(cls)
        return [replace(known[name].column, title=titles.get(name, known[name].column.title)) for name in names]

    @classmethod
    def of(cls, source: object, **others: Any) -> Self:
        """Return a record with the attributes of another object, and ``others`` in place of some of them."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: others[name] if name in others else getattr(source, name) for name in names})

    def to_json(self) -> Answer:
        """Return the record as JSON."""
        return {name: field.to_json(getattr(self, name)) for name, field in _fields(type(self)).items()}


_known: Final[dict[type, Mapping[str, _Field]]] = {}


def _fields(record: type[Any]) -> Mapping[str, _Field]:
    """Return the fields of a record that are in answers."""
    if record not in _known:
        hints = get_type_hints(record, include_extras=True)
        found = {}
        for name in (field.name for field in fields(record)):
            if INTERNAL not in get_args(hints[name]):
                field = _describe(hints[name])
                title = field.column.title or name.removesuffix("_at").replace("_", " ")
                right = Right(field.schema.get(RIGHT, Right.READ))
                found[name] = replace(field, column=replace(field.column, field=name, title=title, right=right))
        _known[record] = found
    return _known[record]


def _describe(annotation: Any) -> _Field:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        field = _describe(inner[0])
        for word in inner[1:]:
            field = _refine(field, word)
        return field
    if origin in (Union, UnionType):
        (some,) = (_describe(each) for each in inner if each is not type(None))
        return replace(some, schema=or_null(some.schema))
    if origin in (list, tuple, Sequence):
        item = _describe(inner[0])
        return _Field(many(item.schema), Column(), lambda items: [item.to_json(each) for each in items])
    if origin in (dict, Mapping):
        item = _describe(inner[1])
        kind = Kind.COUNTS if item.column.is_number else Kind.TEXT
        return _Field(
            table(item.schema),
            Column(kind=kind),
            lambda items: {name: item.to_json(each) for name, each in items.items()},
        )
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if issubclass(annotation, Enum):
        return _Field(TEXT, Column(), lambda word: word.value)
    assert issubclass(annotation, Record), f"no field of a record is {annotation}"
    return _Field(annotation.schema(), Column(), annotation.to_json)


def _refine(field: _Field, word: Any) -> _Field:
    """Return what a word beside a type makes of a field."""
    if word is Kind.TIME:
        return _Field(TIME, replace(field.column, kind=word), lambda at: at / 1000)
    if word is Kind.LANE:
        return _Field(LANE, replace(field.column, kind=word), lambda lane: lane.name.lower())
    if isinstance(word, Kind):
        return replace(field, column=replace(field.column, kind=word))
    if isinstance(word, Column):
        return replace(field, column=word if word.kind is not Kind.TEXT else replace(word, kind=field.column.kind))
    words = word.words
    return replace(field, schema=words if "type" in words else {**field.schema, **words})


# Mailboxes, their lanes and their groups.


@dataclass(frozen=True, slots=True)
class MailboxSummary(Record):
    """A mailbox in a list."""

    mail_address: Annotated[Address, Column("address", link="/mailboxes/{tenant}/id:{number}")]
    tenant: str
    number: Annotated[int, described("`id:` and this number stand for its address in other requests.")]
    messages: int
    bytes: Annotated[Bytes, Column("size")]
    newest_at: Time | None
    expire_at: Annotated[Time | None, Column("expires", absent="never")]
    retention: mailbox.Retention


@dataclass(frozen=True, slots=True)
class RankedMailbox(Record):
    """A mailbox that was compared with others."""

    mail_address: Annotated[Address, Column("address", link="/mailboxes/{tenant}/id:{number}")]
    tenant: str
    number: int
    kind: mailbox.Kind
    retention: mailbox.Retention
    messages: int
    ready: Annotated[int, described("Messages that no worker holds, no delay hides, and that are not dead.")]
    leased: Annotated[int, described("In the hands of workers now, counted for each group.")]
    delayed: Annotated[int, described("Not yet visible, or given back with a delay.")]
    dead: Annotated[int, Column(alarm=True), described("Delivered as often as may be, counted for each group.")]
    bytes: Annotated[Bytes, Column("size")]
    newest_at: Time | None
    oldest_at: Annotated[Time | None, Column("oldest")]
    expire_at: Annotated[Time | None, Column("expires", absent="never")]
    rate: Annotated[Rate | None, Column("in/s"), described("Messages a second that came lately; null: not known yet.")]
    rate_out: Annotated[
        Rate | None,
        Column("out/s"),
        described("Messages a second that left lately: acknowledged where an ACK removes them, expired, or removed."),
    ]


@dataclass(frozen=True, slots=True)
class LaneView(Record):
    """One lane among the oldest messages."""

    lane: Lane
    messages: int
    oldest_id: int | None
    oldest_at: Annotated[Time | None, Column("oldest")]


@dataclass(frozen=True, slots=True)
class OldestMessage(Record):
    """The oldest message of a mailbox."""

    msg_id: int
    created_at: Time


@dataclass(frozen=True, slots=True)
class DelayedUsage(Record):
    """How much of a mailbox is delayed."""

    messages: int
    bytes: Bytes
    next_due_at: Time | None
    """None also when too much is delayed to look at."""


def _at_most(group: Answer) -> str:
    return "" if group["exact"] else "≤ "


@dataclass(frozen=True, slots=True)
class GroupView(Record):
    """One consumer group: how many messages are in which state for it."""

    name: Annotated[str, Column("group")]
    settled: Annotated[Mapping[str, int], JsonSchema(table({"type": "integer"})), Column("position")]
    waiting: Annotated[int, Column("lag", prefix=_at_most)]
    """Never delivered to it."""
    open: Annotated[int, Column("unacknowledged", prefix=_at_most)]
    """Delivered without a lease and not acknowledged: each FETCH returns them again."""
    exact: bool
    """Whether ``waiting`` and ``open`` are exact; otherwise they are upper bounds."""
    leased: Annotated[int, Column(link="/mailboxes/{tenant}/{mail_address}/leases/{name}")]
    """In the hands of workers now."""
    delayed: Annotated[int, Column(link="/mailboxes/{tenant}/{mail_address}/leases/{name}")]
    """Given back with a delay that is not over."""
    due: Annotated[int, Column("to redeliver")]
    """Leased once, and to be delivered again."""
    dead: Annotated[
        int,
        Column(
            link="/mailboxes/{tenant}/{mail_address}/dead/{name}",
            alarm=True,
            prefix=lambda group: "≥ " if group["dead_more"] else "",
        ),
    ]
    dead_more: bool
    next_lease_end: Annotated[Time | None, Column("next lease ends")]
    next_delay_end: Time | None
    max_deliver: Annotated[int | None, Column("max deliveries", absent="no limit")]
    waiting_since: Annotated[int | None, INTERNAL]

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not (self.waiting or self.open or self.leased or self.delayed or self.due or self.dead)


@dataclass(frozen=True, slots=True)
class MailboxView(MailboxSummary):
    """A mailbox in detail."""

    send_address: Address
    """Its send-only address (A10), empty for one that takes no SEND."""
    created_at: Time
    desc: str
    tags: Sequence[str]
    public: bool
    archive: bool
    ack_wait_ms: int | None
    default_ack_wait_ms: int
    connection: int | None
    """The DIDComm connection that the mailbox was granted to."""
    next_id: int
    oldest: OldestMessage | None
    counted: int
    """How many of the oldest messages ``lanes`` counts."""
    lanes: Sequence[LaneView]
    delayed: DelayedUsage
    group_count: int
    groups: Sequence[GroupView]


# Messages.


@dataclass(frozen=True, slots=True)
class MessageSummary(Record):
    """A message without its payload."""

    msg_id: Annotated[
        int,
        Column(
            "message",
            link="/mailboxes/{tenant}/{mail_address}/messages/{msg_id}",
            link_right=Right.READ_PAYLOAD,
        ),
    ]
    lane: Lane
    created_at: Annotated[Time, Column("received")]
    sent_at: Time
    expire_at: Annotated[Time | None, Column("expires", absent="never")]
    size: Annotated[Bytes, described("Bytes with all that travels with the payload.")]
    key: Annotated[str | None, PAYLOAD]
    tags: Annotated[Sequence[str], PAYLOAD]
    recipient: Annotated[str | None, PAYLOAD]


@dataclass(frozen=True, slots=True)
class MessageView(MessageSummary):
    """A message with all that its sender wrote."""

    headers: Annotated[Mapping[str, str], PAYLOAD]
    dedup_id: Annotated[str | None, PAYLOAD]
    reply_to: Annotated[str | None, PAYLOAD]
    payload: Annotated[Payload, PAYLOAD]


@dataclass(frozen=True, slots=True)
class DelayedMessage(Record):
    """A message that is not yet visible."""

    due_at: Time
    lane: Lane
    size: Bytes
    sent_at: Time


@dataclass(frozen=True, slots=True)
class FrequentName(Record):
    """A key, tag or recipient, and how many messages have it."""

    name: Annotated[str, Kind.CODE]
    messages: int


@dataclass(frozen=True, slots=True)
class LeaseView(Record):
    """A message that is in the hands of a worker, or was given back with a delay."""

    msg_id: Annotated[int, Column("message")]
    lane: Lane
    until: Annotated[Time, Column("lease ends")]
    deliveries: int
    delayed: Annotated[bool, Column("given back"), described("Whether a worker gave it back with a delay.")]


PAYLOAD_START: Final = 200


@dataclass(frozen=True, slots=True)
class DeadMessage(Record):
    """A message that was delivered as often as it may be."""

    msg_id: Annotated[
        int,
        Column(
            "message",
            link="/mailboxes/{tenant}/{mail_address}/messages/{msg_id}?dead_for={group}",
            link_right=Right.READ_PAYLOAD,
        ),
    ]
    lane: Lane
    created_at: Annotated[Time, Column("received")]
    deliveries: int
    died_at: Annotated[Time, described("When its last lease ended without an ACK.")]
    size: Bytes
    payload_start: Annotated[
        bytes, described(f"The first {PAYLOAD_START} bytes in base64."), PAYLOAD, Column("payload", kind=Kind.CODE)
    ]


# Rules by which mail is copied.

COPY_WORDS: Final[Mapping[str, str]] = {
    "address": "Mail to this address, or to those that begin so in whole parts, `billing.>`; `>` is all. A kept"
    " broadcast is matched by its subject.",
    "tags": "Mail with all of these tags; none: with any.",
    "priorities": "Mail of one of these priorities; none: of any.",
    "doors": "Mail that came by one of these doors; none: by any.",
    "headers_only": "Whether copies have no payload.",
    "when_full": "Where the other mailbox has no room or is gone: `refuse` the message, or `drop` the copy.",
    "to_subject": "The NATS subject to which copies are forwarded, where a JetStream stream takes them.",
}


@dataclass(frozen=True, slots=True)
class CopyRuleView(Record):
    """A rule by which mail is copied, and what it did at this instance since that started."""

    tenant: str
    name: Annotated[str, Column("rule")]
    address: Annotated[Address, Column("mail to"), described(COPY_WORDS["address"])]
    tags: Annotated[Sequence[str], Column("tags"), described(COPY_WORDS["tags"])]
    priorities: Annotated[Sequence[str], described(COPY_WORDS["priorities"])]
    doors: Annotated[Sequence[str], described(COPY_WORDS["doors"])]
    to_address: Annotated[Address, Column("is copied to")]
    to_subject: Annotated[str | None, Column("forwarded to", absent=""), described(COPY_WORDS["to_subject"])]
    to_url: Annotated[
        str | None,
        Column("posted to", absent=""),
        described("Where copies are posted: scheme, host and port of the URL."),
    ]
    headers_only: Annotated[bool, described(COPY_WORDS["headers_only"])]
    when_full: Annotated[str, Column("when full"), described(COPY_WORDS["when_full"])]
    ttl_seconds: Annotated[
        int | None, Column("kept for s", absent="ever"), described("How long a copy is kept; null: for ever.")
    ]
    origin: Annotated[str, Column("source"), described("`settings` or `database`.")]
    state: Annotated[
        str, Column(kind=Kind.STATE), described("`ok`, or why copies are not taken or not forwarded at present.")
    ]
    matched: Annotated[int, described("Messages that it matched.")]
    copied: int
    dropped: Annotated[int, Column(alarm=True), described("Messages that were stored without the copy.")]
    refused: Annotated[int, Column(alarm=True), described("Messages that were refused.")]
    forwarded: Annotated[int, described("Copies whose forwarding was confirmed.")]
    failed: Annotated[int, Column(alarm=True), described("Attempts to forward that nobody confirmed.")]
    lag_seconds: Annotated[
        float | None,
        Column("behind by s", absent=""),
        described("How long the oldest copy has waited for its confirmation; null: the rule forwards nothing."),
    ]


# NATS clients.


@dataclass(frozen=True, slots=True)
class ClientView(Record):
    """A NATS client of this instance."""

    client: Annotated[str, Kind.CODE, described("Names its connection, at this instance until that ends.")]
    tenant: Annotated[str | None, Column(absent="not known yet"), described("Null until it has made a request.")]
    user: Annotated[str | None, Column(absent="anonymous"), described("Its login, where the server vouches for it.")]
    name: Annotated[str, described("What it calls itself.")]
    address: Annotated[str, Kind.CODE, described("Where it comes from, or the proxy that it comes through.")]
    subscriptions: Annotated[int, described("To stored mail; others are nats-server's.")]
    state: Annotated[str, Column(kind=Kind.STATE), described("`ok`, `connecting`, or `slow`: it does not read.")]
    unread_bytes: Annotated[Bytes, Column("unread"), described("What waits for it to read.")]
    since: Annotated[UnixSeconds, Column("connected", kind=Kind.TIME)]


@dataclass(frozen=True, slots=True)
class MailboxClientView(Record):
    """What a NATS client lately did with a mailbox."""

    action: Annotated[str, described("`sends`, `fetches` or `subscribes`.")]
    name: Annotated[str, Column("client name"), described("What it calls itself.")]
    user: Annotated[str | None, Column(absent="anonymous")]
    client: Annotated[str | None, Column(absent="gone", kind=Kind.CODE), described("As in the list of all clients.")]
    queue: Annotated[str, Column("queue group"), described("In which it subscribes.")]
    requests: int | None
    last_at: Annotated[UnixSeconds, Column("last", kind=Kind.TIME)]


# Tenants.


@dataclass(frozen=True, slots=True)
class TenantUserView(Record):
    """A user who may connect."""

    name: Annotated[str, Column("user")]
    nkey: Annotated[str | None, Column("signs in with", absent="a password", kind=Kind.CODE)]
    previous_until: Annotated[Time | None, Column("former password valid until")]


@dataclass(frozen=True, slots=True)
class TenantTokenView(Record):
    """An API token; one of the settings has no name."""

    name: Annotated[str | None, Column("name", absent="(without a name, in the settings)")]
    expires_at: Annotated[Time | None, Column("expires", absent="never")]


@dataclass(frozen=True, slots=True)
class TenantUse(Record):
    """What a tenant takes of its quotas."""

    mailboxes: Annotated[int, Column(bound="quotas")]
    messages: Annotated[int, Column(bound="quotas")]
    bytes: Annotated[Bytes, Column(bound="quotas")]
    sockets: Annotated[int, Column(bound="quotas")]
    subscriptions: Annotated[int, Column(bound="quotas")]
    rate: Annotated[
        Rate | None,
        described("Messages a second lately; null: not limited, or not known yet."),
        Column(bound="quotas"),
    ]


QUOTA_SCHEMA: Final[Schema] = {"type": "object", "properties": {quota: or_null(COUNT) for quota in QUOTAS}}


@dataclass(frozen=True, slots=True)
class TenantView(Record):
    """A tenant with its quotas and use."""

    name: Annotated[str, Column("tenant", link="/tenants/{name}")]
    origin: Annotated[
        str, described("`settings`, `database`, or `removed` while mail of it is left."), Column("source")
    ]
    users: Sequence[TenantUserView]
    tokens: Sequence[TenantTokenView]
    accounts: Sequence[str]
    quotas: Annotated[
        Mapping[str, int | None], JsonSchema(QUOTA_SCHEMA), described("What it may take; null is without a limit.")
    ]
    own_quotas: Annotated[
        Mapping[str, int], described("Those of its own; the others are as for all. 0 is without a limit.")
    ]
    use: TenantUse


# What happened.


@dataclass(frozen=True, slots=True)
class AlarmView(Record):
    """A problem that the doctor finds or found."""

    code: Annotated[str, described("Names the kind of problem; empty where the text alone does.")]
    began_at: Annotated[Time, Column("since")]
    ended_at: Annotated[Time | None, described("Null while the problem is there.")]
    text: Annotated[str, Column("problem", kind=Kind.PROSE), described("What it was when it was seen last.")]
    advice: Annotated[str, Column("remedy", kind=Kind.PROSE)]
    link: Annotated[str, described("The page of the console that helps, below its home; empty: none.")]


@dataclass(frozen=True, slots=True)
class LogLine(Record):
    """A line of the service's log."""

    at: Annotated[Time, Column("time")]
    level: Annotated[str, Column(kind=Kind.STATE)]
    logger: Annotated[str, Column("part")]
    event: str
    fields: Annotated[Mapping[str, Any], Column("details")]


@dataclass(frozen=True, slots=True)
class AuditEntry(Record):
    """What an operator did, once or several times."""

    no: int
    at: Annotated[Time, Column("time")]
    instance: str
    actor: Annotated[str, Column("operator")]
    via: str
    operation: str
    tenant: str
    fields: Annotated[Mapping[str, Any], Column("details")]
    result: Annotated[str, described("`ok`, or the code of the error."), Column(kind=Kind.STATE)]
    times: Annotated[int, described("How often; what was refused or failed is counted in one entry a day.")]
    last_at: Annotated[Time, described("When it was repeated last, in Unix seconds."), Column("repeated")]
