"""The options of the data source: their names, parsing and validation."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from urllib.parse import urlsplit

import orjson
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from mediator.errors import BadRequestError, LostDataError
from mediator.mailboxes.address import DEFAULT_TENANT, parse_address
from pipeline.source.schema import NAMES, check_names

if TYPE_CHECKING:
    from mediator.settings.settings import Settings

BATCH = (
    "data.dir",
    "database.url",
    "tenant",
    "subscribe",
    "subscribePattern",
    "prefix",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsets",
    "endingOffsets",
    "tags",
    "columns",
    "numPartitions",
    "minPartitions",
)
ENDINGS = ("endingTimestamp", "endingOffsets")
"""Options of a batch that a stream does not have: it has no end."""
STREAM = ("startingOffsets", "maxOffsetsPerTrigger", "failOnDataLoss")
"""Options of all streams of mailboxes and of the journal; see :class:`StreamOptions`."""
READ = tuple(dict.fromkeys((*BATCH, *STREAM)))
"""Options of a read of mailboxes, of which Spark does not say yet whether it is a batch or a stream."""
MAILBOX_STREAM = tuple(name for name in READ if name not in ENDINGS)
"""Options of a stream of mailboxes; see :mod:`pipeline.source.mailboxes`."""
JOURNAL_STREAM = ("journal", "badLines", *STREAM)
"""Options of a stream of the journal; see :mod:`pipeline.source.journal`."""
LOGIN = {
    "nats.url": "server",
    "nats.user": "user",
    "nats.password": "password",
    "nats.token": "token",
    "nats.nkey": "nkey",
    "nats.creds": "creds",
    "nats.tlsCa": "tls_ca",
    "nats.tlsCert": "tls_cert",
    "nats.tlsKey": "tls_key",
}
"""Options of a login, and their fields in :class:`mediator.login.Login`."""
SERVER = (*LOGIN, "timeoutSeconds")
"""Options of the NATS connection to the service."""
SINK = ("address", "topic", "maxInFlight", "dedup.prefix", *SERVER)
"""Options of a write; see :mod:`pipeline.source.sink`."""
GROUP = ("group", "subscribe", "columns", "startingOffsets", "maxOffsetsPerTrigger", *SERVER)
"""Options of a stream with a consumer group; see :mod:`pipeline.source.groups`."""
MAX_TIME = 8_640_000_000_000_000
"""The last time, in milliseconds since the epoch, that Spark and Python show as a date."""
MAX_PARTITIONS = 10_000
DATABASE_FILE = "mediator.db"
EARLIEST = "earliest"
LATEST = "latest"
MAX_ROWS = 2**53

Offset: TypeAlias = dict[str, Any]
"""What Spark keeps in its checkpoint, as JSON."""

_SCHEMES = ("postgresql", "postgres")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read. Times are milliseconds since the epoch."""

    data_dir: Path | None = None
    database_url: str | None = field(default=None, repr=False)
    """May contain a password. Exactly one of this and ``data_dir`` is set."""
    tenant: str = DEFAULT_TENANT
    addresses: tuple[str, ...] = ()
    """Mailboxes that must exist; none: all that ``pattern`` and ``prefix`` allow."""
    pattern: str | None = None
    prefix: str = ""
    starting: int | None = None
    """Messages are read that became visible at this time or later."""
    ending: int | None = None
    """Messages are read that became visible before this time."""
    tags: tuple[str, ...] = ()
    """A message has all of them (Q1)."""
    columns: tuple[str, ...] = NAMES
    partitions: int | None = None
    """The number of tasks, if there are as many messages."""
    min_partitions: int = 1

    @property
    def file(self) -> Path:
        """The SQLite file in the data directory."""
        assert self.data_dir is not None
        return self.data_dir / DATABASE_FILE


def parse(given: Mapping[str, str], known: Sequence[str] = BATCH) -> ReadOptions:
    """Read the options of a reader, with names in any case; the caller reads those of ``known`` not in :data:`BATCH`.

    Raises :class:`BadRequestError` that names the option: unknown, of the wrong form, or two that exclude each other.
    """
    options = normalize_names(given, known)
    _at_most_one(options, "data.dir", "database.url")
    _at_most_one(options, "startingTimestamp", "startingOffsets")
    _at_most_one(options, "endingTimestamp", "endingOffsets")
    _at_most_one(options, "subscribe", "subscribePattern", "prefix")
    _at_most_one(options, "numPartitions", "minPartitions")
    if "data.dir" not in options and "database.url" not in options:
        raise BadRequestError("data.dir", "expected the service's data directory, or its database as database.url")
    starting, ending = (read_integer(options, name, 0, MAX_TIME) for name in ("startingTimestamp", "endingTimestamp"))
    if starting is not None and ending is not None and ending < starting:
        raise BadRequestError("endingTimestamp", f"expected {starting}, which is startingTimestamp, or later")
    return ReadOptions(
        data_dir=_directory(options["data.dir"]) if "data.dir" in options else None,
        database_url=_url(options["database.url"]) if "database.url" in options else None,
        tenant=_text(options, "tenant", DEFAULT_TENANT),
        addresses=tuple(parse_address(word, "subscribe") for word in split_words(options, "subscribe")),
        pattern=_pattern(options),
        prefix=_text(options, "prefix", ""),
        starting=starting,
        ending=ending,
        tags=split_words(options, "tags"),
        columns=check_names(split_words(options, "columns"), "columns") or NAMES,
        partitions=read_integer(options, "numPartitions", 1, MAX_PARTITIONS),
        min_partitions=read_integer(options, "minPartitions", 1, MAX_PARTITIONS) or 1,
    )


def database_options(settings: "Settings") -> ReadOptions:
    """Return the options that locate a service's database."""
    if settings.database_url is None:
        return parse({"data.dir": str(settings.data_dir)})
    return parse({"database.url": settings.database_url.get_secret_value()})


def normalize_names(given: Mapping[str, str], known: Sequence[str]) -> dict[str, str]:
    """Return options under their canonical names, given in any case; :class:`BadRequestError` for an unknown one."""
    names = {name.lower(): name for name in known}
    if any(name.lower().startswith("option.") for name in given):
        # Spark 4.2 gives the options of a table to its schema, and none of them to its readers.
        raise BadRequestError("USING mq9", "expected CREATE TEMPORARY VIEW, since a table's options are not read")
    for name in given:
        if name.lower() not in names:
            raise BadRequestError(name[:100], f"unknown option, expected one of {', '.join(sorted(known))}")
    return {names[name.lower()]: value for name, value in given.items()}


def _at_most_one(options: Mapping[str, str], *names: str) -> None:
    found = [name for name in names if name in options]
    if len(found) > 1:
        raise BadRequestError(found[1], f"expected either it or {found[0]}")


def _text(options: Mapping[str, str], name: str, default: str) -> str:
    text = options.get(name, default)
    if "\0" in text or len(text) > 1000:
        raise BadRequestError(name, "expected at most 1000 characters, none of them zero")
    return text


def split_words(options: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the words of a comma-separated option, without duplicates."""
    if name not in options:
        return ()
    words = [word.strip() for word in options[name].split(",")]
    if "" in words or any("\0" in word for word in words):
        raise BadRequestError(name, f'expected words joined by commas, got "{options[name][:200]}"')
    return tuple(dict.fromkeys(words))


def read_integer(options: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    """Return a whole number, None if the option is absent; :class:`BadRequestError` names the option."""
    if name not in options:
        return None
    text = options[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and low <= int(text) <= high):
        raise BadRequestError(name, f'expected a whole number from {low} to {high}, got "{text[:200]}"')
    return int(text)


def _pattern(options: Mapping[str, str]) -> str | None:
    pattern = options.get("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise BadRequestError("subscribePattern", f"expected a regular expression: {error}") from None
    return pattern


def _directory(text: str) -> Path:
    if not text or "\0" in text:
        raise BadRequestError("data.dir", f"expected a directory, got {text[:200]!r}")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise BadRequestError("data.dir", "expected a directory, the user after ~ is not known here") from None


def _url(text: str) -> str:
    # The error does not show the value: there may be a password in it.
    try:
        right = urlsplit(text).scheme in _SCHEMES and "\0" not in text
    except ValueError:
        right = False
    if not right:
        raise BadRequestError("database.url", "expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    return text


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options that streams of mailboxes and of the journal share."""

    starting: str | Offset
    """Where a query without a checkpoint begins: ``earliest``, ``latest`` or an offset."""
    max_rows: int | None
    """Maximum rows of one batch; None: all available."""
    fail_on_data_loss: bool
    """Whether rows that were removed before they were read end the query."""

    @classmethod
    def of(cls, options: Mapping[str, str], default: str) -> Self:
        """Read ``startingOffsets``, ``maxOffsetsPerTrigger`` and ``failOnDataLoss``."""
        return cls(
            starting=read_offset(options, "startingOffsets", default),
            max_rows=read_integer(options, "maxOffsetsPerTrigger", 1, MAX_ROWS),
            fail_on_data_loss=one_of(options, "failOnDataLoss", ("true", "false")) == "true",
        )

    @property
    def limit(self) -> ReadLimit:
        """The limit that Spark passes back when it requests the next batch."""
        return ReadAllAvailable() if self.max_rows is None else ReadMaxRows(self.max_rows)

    def report_lost(self, what: str) -> None:
        """Report rows that were removed unread: raise :class:`LostDataError`, or log it if the options allow that."""
        if self.fail_on_data_loss:
            raise LostDataError(f"{what}; failOnDataLoss=false goes on without")
        log.warning("rows were removed before the stream read them: %s", what)


def max_rows(limit: ReadLimit) -> int | None:
    """Return how many rows Spark wants at most, None for all."""
    return limit.max_rows if isinstance(limit, ReadMaxRows) else None


def read_offset(
    options: Mapping[str, str], name: str, default: str, words: Sequence[str] = (EARLIEST, LATEST)
) -> str | Offset:
    """Return an offset of a stream, or one of the words that stand for one."""
    text = options.get(name) or default
    if text.lower() in words:
        return text.lower()
    try:
        offset = orjson.loads(text)
    except ValueError:
        offset = None
    if not isinstance(offset, dict):
        raise BadRequestError(name, f'expected {", ".join(words)} or an offset as JSON, got "{text[:200]}"')
    return offset


def one_of(options: Mapping[str, str], name: str, words: tuple[str, str]) -> str:
    """Return the option's value, one of two words; the first is the default."""
    word = (options.get(name) or words[0]).lower()
    if word not in words:
        raise BadRequestError(name, f'expected {words[0]} or {words[1]}, got "{word[:200]}"')
    return word
