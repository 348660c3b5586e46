"""What operators see: a typed record for each noun, from which schemas, JSON, commands' columns and pages follow.

A record is a frozen dataclass that derives from :class:`Record`. Its annotations say everything::

    @dataclass(frozen=True, slots=True)
    class Parcel(Record):
        mail_address: Address
        weight: Annotated[Bytes, about("With all that travels along.")]
        sent_at: Annotated[Time | None, Column("sent", absent="not yet")]

Texts, flags and counts (whole numbers from 0) need no more than ``str``, ``bool`` and ``int``. Beside a type may stand
words of its JSON schema and the :class:`Column` under which commands and pages show it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from mediator.operate.operations import (
    ADDRESS,
    ANY,
    COUNT,
    FLAG,
    LANE,
    TEXT,
    TIME,
    Answer,
    Schema,
    many,
    obj,
    or_null,
    table,
)

# How a record is described.


class Kind(Enum):
    """How a value is shown."""

    TEXT = auto()
    NUMBER = auto()
    SIZE = auto()
    TIME = auto()
    RATE = auto()


@dataclass(frozen=True, slots=True)
class Column:
    """How a field is shown in tables of commands and pages."""

    title: str = ""
    """By default the name of the field, without ``_at``."""
    absent: str = ""
    """What commands show for null."""
    field: str = ""
    kind: Kind = Kind.TEXT

    @property
    def is_number(self) -> bool:
        """Whether its values are aligned as numbers."""
        return self.kind not in (Kind.TEXT, Kind.TIME)

    @property
    def heading(self) -> str:
        """The heading in a command's table; that of numbers ends in ``#``."""
        return f"{self.title}#" if self.is_number else self.title


def described(text: str) -> Schema:
    """Return the word of a schema that describes a field."""
    return {"description": text}


INTERNAL: Final = object()
"""Marks a field that is in no answer."""

Address = Annotated[str, ADDRESS]
Lane = Annotated[str, LANE]
Bytes = Annotated[int, Kind.SIZE]
Time = Annotated[int, Kind.TIME]
"""Milliseconds since the epoch; Unix seconds in answers."""
Rate = Annotated[float, Kind.RATE]

Write = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Field:
    """What the annotation of a field says."""

    schema: Schema
    column: Column
    write: Write | None = None
    """Returns the JSON of a value; None: the value is JSON."""


_PLAIN: Final[Mapping[Any, _Field]] = {
    str: _Field(TEXT, Column()),
    bool: _Field(FLAG, Column()),
    int: _Field(COUNT, Column(kind=Kind.NUMBER)),
    float: _Field({"type": "number"}, Column(kind=Kind.NUMBER)),
    Any: _Field(ANY, Column()),
}


class Record:
    """What an operation answers, or a part of it."""

    __slots__ = ()

    @classmethod
    def schema(cls) -> Schema:
        """Return the JSON schema of the record."""
        return obj(**{name: field.schema for name, field in _fields(cls).items()})

    @classmethod
    def columns(cls, *names: str, **titles: str) -> list[Column]:
        """Return the columns of a table: those of ``names``, where ``titles`` says so under another title."""
        known = _fields(cls)
        return [replace(known[name].column, title=titles.get(name, known[name].column.title)) for name in names]

    def to_json(self) -> Answer:
        """Return the record as JSON."""
        found = {}
        for name, field in _fields(type(self)).items():
            value = getattr(self, name)
            found[name] = value if field.write is None or value is None else field.write(value)
        return found


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
                found[name] = replace(field, column=replace(field.column, field=name, title=title))
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
        return _collection(many, _describe(inner[0]), lambda write: lambda items: [write(item) for item in items])
    if origin in (dict, Mapping):
        return _collection(
            table, _describe(inner[1]), lambda write: lambda items: {name: write(item) for name, item in items.items()}
        )
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    assert issubclass(annotation, Record), f"no field of a record is {annotation}"
    return _Field(annotation.schema(), Column(), annotation.to_json)


def _collection(kind: Callable[[Schema], Schema], item: _Field, write_all: Callable[[Write], Write]) -> _Field:
    return _Field(kind(item.schema), Column(), write_all(item.write) if item.write is not None else None)


def _refine(field: _Field, word: Any) -> _Field:
    """Return what a word beside a type makes of a field."""
    if word is Kind.TIME:
        return _Field(TIME, replace(field.column, kind=word), lambda at: at / 1000)
    if isinstance(word, Kind):
        return replace(field, column=replace(field.column, kind=word))
    if isinstance(word, Column):
        return replace(field, column=replace(word, kind=field.column.kind))
    return replace(field, schema={**field.schema, **word})


# Mailboxes, their lanes and their groups.


@dataclass(frozen=True, slots=True)
class MailboxSummary(Record):
    """A mailbox in a list."""

    mail_address: Annotated[Address, Column("address")]
    tenant: str
    number: Annotated[int, described("`id:` and this number stand for its address in other requests.")]
    messages: int
    bytes: Annotated[Bytes, Column("size")]
    newest_at: Time | None
    expire_at: Annotated[Time | None, Column("expires", absent="never")]
    retention: str


@dataclass(frozen=True, slots=True)
class RankedMailbox(Record):
    """A mailbox that was compared with others."""

    mail_address: Annotated[Address, Column("address")]
    tenant: str
    number: int
    kind: str
    retention: str
    messages: int
    bytes: Annotated[Bytes, Column("size")]
    newest_at: Time | None
    oldest_at: Time | None
    expire_at: Annotated[Time | None, Column("ends")]
    rate: Annotated[Rate | None, Column("in/s"), described("Messages a second that came lately; null: not known yet.")]


@dataclass(frozen=True, slots=True)
class LaneView(Record):
    """One lane among the oldest messages."""

    lane: Lane
    messages: int
    oldest_id: int | None
    oldest_at: Annotated[Time | None, Column("since")]


@dataclass(frozen=True, slots=True)
class OldestMessage(Record):
    """The oldest message of a mailbox."""

    msg_id: int
    created_at: Time


@dataclass(frozen=True, slots=True)
class DelayedMessages(Record):
    """How much of a mailbox is delayed."""

    messages: int
    bytes: Bytes
    next_due_at: Time | None
    """None also when too much is delayed to look at."""


@dataclass(frozen=True, slots=True)
class GroupView(Record):
    """One consumer group: how many messages are in which state for it."""

    name: Annotated[str, Column("group")]
    settled: Annotated[Mapping[str, int], table({"type": "integer"}), Column("position")]
    waiting: int
    """Never delivered to it."""
    open: Annotated[int, Column("unacknowledged")]
    """Delivered without a lease and not acknowledged: each FETCH returns them again."""
    exact: bool
    """Whether ``waiting`` and ``open`` are exact; otherwise they are upper bounds."""
    leased: int
    """In the hands of workers now."""
    delayed: int
    """Given back with a delay that is not over."""
    due: Annotated[int, Column("due again")]
    """Leased once, and to be delivered again."""
    dead: int
    dead_more: bool
    next_lease_end: Annotated[Time | None, Column("lease ends")]
    next_delay_end: Time | None
    max_deliver: int | None
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
    delayed: DelayedMessages
    group_count: int
    groups: Sequence[GroupView]
