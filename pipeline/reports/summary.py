"""The numbers of a report over a span of time, from the tables of the lake, as plain values for the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from mediator.errors import BadRequestError
from pipeline.lake import GAPS as GAPS_TABLE
from pipeline.lake import QUARANTINE as QUARANTINE_TABLE
from pipeline.lake import table_path
from pipeline.lake.delta import LakeTable, read_files
from pipeline.lake.ingest import GAPS, QUARANTINE
from pipeline.reports import usage

LISTED = 20
"""Rows shown of a list."""
TENANTS = 7
"""Tenants shown separately; the others are summed up."""
DEFAULT_DAYS = 30
MAX_DAYS = 366
OTHERS = "all others"
PER_HOUR = ("sent", "delivered", "leased", "acknowledged")
PER_TENANT = ("mailboxes", *usage.TOTALS, "depth", "depth_bytes")
"""Mailboxes with events, sums over the span, and the depth at its end."""
_HOUR = timedelta(hours=1)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """Whole hours, from ``begin`` on and before ``end``; both in UTC."""

    begin: datetime
    end: datetime

    @property
    def hours(self) -> list[datetime]:
        """The beginnings of its hours."""
        return [self.begin + number * _HOUR for number in range((self.end - self.begin) // _HOUR)]

    def contains(self, moment: Column) -> Column:
        """Whether a timestamp is in the span."""
        return (moment >= F.lit(self.begin)) & (moment < F.lit(self.end))


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """A report's numbers; lists by hour go with ``span.hours``."""

    span: Span
    tenant: str | None
    """None: all tenants."""
    mailboxes: int = 0
    """Mailboxes with events."""
    totals: dict[str, int] = field(default_factory=dict)
    """Sums over the span, by the names of :data:`pipeline.reports.usage.TOTALS`."""
    flows: dict[str, list[int]] = field(default_factory=dict)
    """By the names of :data:`PER_HOUR`."""
    depth: list[int] = field(default_factory=list)
    depth_bytes: list[int] = field(default_factory=list)
    waits: dict[str, list[float | None]] = field(default_factory=dict)
    """Milliseconds by name (``first_p50``); None in hours whose messages were not delivered."""
    tenants: list[tuple[str, list[int]]] = field(default_factory=list)
    """Bytes that came in by tenant, the largest first and :data:`OTHERS` together last."""
    by_tenant: list[Row] = field(default_factory=list)
    """A row for each tenant, by bytes that came in: ``tenant``, :data:`PER_TENANT`."""
    slowest: list[Row] = field(default_factory=list)
    filling: list[Row] = field(default_factory=list)
    behind: list[Row] = field(default_factory=list)
    gaps: Sequence[Row] = ()
    """Times whose events are lost, from gaps.jsonl."""
    quarantined: Sequence[tuple[str, int]] = ()
    """Reasons why lines of the journal could not be read, with counts."""

    def listed(self) -> list[int]:
        """Return the numbers of the mailboxes in the lists."""
        return sorted({row["mailbox"] for rows in (self.slowest, self.filling, self.behind) for row in rows})


def span_of(stored: tuple[datetime, datetime] | None, first: date | None, last: date | None) -> Span:
    """Return the span from the beginning of ``first`` to the end of ``last``, cut to what the tables have.

    ``stored`` are their first and last hour, None if they are empty. ``last`` defaults to the day of the last hour, and
    without ``first`` the span is 30 days. Raises :class:`BadRequestError` for days in the wrong order or more than 366.
    """
    if first is not None and last is not None and first > last:
        raise BadRequestError("from", f"expected a day not after {last}, got {first}")
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    oldest, newest = stored or (now, now)
    end = newest + _HOUR
    if last is not None:
        end = min(end, _midnight(last) + timedelta(days=1))
    begin = end - timedelta(days=DEFAULT_DAYS) if first is None else _midnight(first)
    begin = max(begin, oldest)
    if end - begin > timedelta(days=MAX_DAYS):
        raise BadRequestError("from", f"expected at most {MAX_DAYS} days, got {(end - begin).days}")
    return Span(begin, max(begin, end))


def summarize(
    hourly: DataFrame,
    waits: DataFrame,
    groups: DataFrame,
    span: Span,
    *,
    tenant: str | None = None,
    gaps: Sequence[Row] = (),
    quarantined: Sequence[tuple[str, int]] = (),
) -> UsageSummary:
    """Compute a report from whole tables; ``hourly`` must have all hours since the first, or depths are wrong."""
    whose = F.lit(True) if tenant is None else F.col("tenant") == tenant
    depths = usage.with_depth(hourly.where(whose & (F.col("hour") < F.lit(span.end)))).cache()
    rows = depths.where(span.contains(F.col("hour")))
    mailboxes = by_mailbox(rows).cache()
    try:
        summed = (*usage.TOTALS, "change", "change_bytes")
        sums = _by_hour(depths.groupBy("hour").agg(*(F.sum(name).alias(name) for name in summed)), summed)
        flows = {name: [value or 0 for value in _hour_values(sums, name, span)] for name in usage.TOTALS}
        count = mailboxes.count()
        selected = waits.where(F.col("tenant").eqNullSafe(F.lit(tenant)) & span.contains(F.col("hour")))
        names = [f"{wait}_{name}" for wait in usage.WAITS for name in usage.QUANTILES]
        wait_rows = _by_hour(selected, names)
        by_tenant = _by_tenant(depths, span)
        return UsageSummary(
            span,
            tenant,
            mailboxes=count,
            totals={name: sum(flow) for name, flow in flows.items()},
            flows={name: flows[name] for name in PER_HOUR},
            depth=_running_total(sums, "change", span),
            depth_bytes=_running_total(sums, "change_bytes", span),
            waits={name: _hour_values(wait_rows, name, span) for name in names},
            # The shares of a single tenant are the flow that was summed already.
            tenants=_shares(rows, by_tenant, span) if tenant is None else [(tenant, flows["bytes_in"])][:count],
            by_tenant=by_tenant,
            slowest=_rows(slowest(mailboxes)),
            filling=_rows(filling(mailboxes)),
            behind=_rows(behind(rows, groups.where(whose & span.contains(F.col("hour"))))),
            gaps=gaps,
            quarantined=quarantined,
        )
    finally:
        mailboxes.unpersist()
        depths.unpersist()


def missing(spark: SparkSession, lake: Path, span: Span) -> tuple[list[Row], list[tuple[str, int]]]:
    """Return what a report lacks: the gaps in a span, and why lines found since it began are invalid, with counts."""
    return _gaps(spark, lake, span), _unreadable(spark, lake, span)


def _gaps(spark: SparkSession, lake: Path, span: Span) -> list[Row]:
    files = [file["path"] for file in LakeTable(table_path(lake, GAPS_TABLE), GAPS).files()]
    if not files:
        return []
    touching = (F.col("from") < F.lit(span.end)) & (F.col("to") >= F.lit(span.begin))
    found = read_files(spark, GAPS, files).where(F.col("from").isNull() | touching)
    times = (F.unix_millis(name).alias(name) for name in ("from", "to"))
    rows = [row.asDict() for row in found.select("why", "events", *times).orderBy("from").limit(20).collect()]
    return [
        {**row, **{name: row[name] if row[name] is None else _moment(row[name]) for name in ("from", "to")}}
        for row in rows
    ]


def _unreadable(spark: SparkSession, lake: Path, span: Span) -> list[tuple[str, int]]:
    files = [file["path"] for file in LakeTable(table_path(lake, QUARANTINE_TABLE), QUARANTINE).files()]
    if not files:
        return []
    lines = read_files(spark, QUARANTINE, files).where(F.col("seen") >= F.lit(span.begin))
    reasons = lines.groupBy("reason").agg(F.count("*").alias("lines")).orderBy(F.desc("lines")).limit(20)
    return [(row["reason"], row["lines"]) for row in reasons.collect()]


def by_mailbox(rows: DataFrame) -> DataFrame:
    """Return a row for each mailbox: its worst hour, what was sent to it and taken by groups, and its last hour."""
    worst = F.struct("first_p95", "hour", "first_p50", "first_p99", "first_count")
    return rows.groupBy("tenant", "mailbox").agg(
        F.max(F.when(F.col("first_count") > 0, worst)).alias("worst"),
        F.sum("sent").alias("sent"),
        F.sum(F.col("delivered") + F.col("leased") + F.col("acknowledged")).alias("taken"),
        F.max(F.struct("hour", "depth", "depth_bytes")).alias("newest"),
    )


def slowest(mailboxes: DataFrame) -> DataFrame:
    """Return mailboxes by their worst hour: the one whose messages waited longest for the first delivery, at p95."""
    waited = mailboxes.where("worst IS NOT NULL").select("tenant", "mailbox", "worst.*")
    return waited.orderBy(F.desc("first_p95"), "tenant", "mailbox")


def filling(mailboxes: DataFrame) -> DataFrame:
    """Return mailboxes to which mail was sent and from which no group took any, by their depth at the end."""
    return (
        mailboxes.where("sent > 0 AND taken = 0")
        .select("tenant", "mailbox", "sent", "newest.depth", "newest.depth_bytes")
        .orderBy(F.desc("depth"), F.desc("sent"), "tenant", "mailbox")
    )


def behind(rows: DataFrame, groups: DataFrame) -> DataFrame:
    """Return groups that were given less than half of what came, counted from the hour of their first delivery."""
    begun = groups.groupBy("tenant", "mailbox", "group").agg(
        F.min("hour").alias("since"), F.sum("given").alias("given"), F.sum("acknowledged").alias("acknowledged")
    )
    came = rows.select("tenant", "mailbox", "hour", "came")
    return (
        begun.where("given > 0")
        .join(came, ["tenant", "mailbox"])
        .where("hour >= since")
        .groupBy("tenant", "mailbox", "group", "since", "given", "acknowledged")
        .agg(F.sum("came").alias("came"))
        .where("given * 2 < came")
        .orderBy(F.desc(F.col("came") - F.col("given")), "tenant", "mailbox", "group")
    )


def _by_tenant(depths: DataFrame, span: Span) -> list[Row]:
    inside = span.contains(F.col("hour"))
    found = depths.groupBy("tenant").agg(
        F.count_distinct(F.when(inside, F.col("mailbox"))).alias("mailboxes"),
        *(F.sum(F.when(inside, F.col(name)).otherwise(0)).alias(name) for name in usage.TOTALS),
        F.sum("change").alias("depth"),
        F.sum("change_bytes").alias("depth_bytes"),
    )
    rows = found.where("mailboxes > 0 OR depth > 0").orderBy(F.desc("bytes_in"), "tenant").collect()
    return [row.asDict() for row in rows]


def _shares(rows: DataFrame, by_tenant: Sequence[Row], span: Span) -> list[tuple[str, list[int]]]:
    largest = [row["tenant"] for row in by_tenant if row["mailboxes"]][:TENANTS]
    # The others have the key None, since a tenant may have any name.
    name = F.when(F.col("tenant").isin(largest), F.col("tenant")).alias("name")
    found: dict[str | None, dict[datetime, int]] = {}
    by_hour = rows.groupBy(name, F.unix_millis("hour").alias("ms")).agg(F.sum("bytes_in").alias("bytes"))
    for row in by_hour.collect():
        found.setdefault(row["name"], {})[_moment(row["ms"])] = row["bytes"]

    def rank(name: str | None) -> tuple[bool, int, str]:
        return name is None, -sum(found[name].values()), name or ""

    return [
        (OTHERS if name is None else name, [found[name].get(hour, 0) for hour in span.hours])
        for name in sorted(found, key=rank)
    ]


def _running_total(sums: Mapping[datetime, Row], change: str, span: Span) -> list[int]:
    """Return for each hour of the span the sum of all changes up to its end, those before the span included."""
    before = sum(row[change] for hour, row in sums.items() if hour < span.begin)
    changes = (value or 0 for value in _hour_values(sums, change, span))
    return list(accumulate(changes, initial=before))[1:]


def _hour_values(rows: Mapping[datetime, Row], name: str, span: Span) -> list[Any]:
    """Return a value for each hour of the span, None where there is no row."""
    return [rows[hour][name] if hour in rows else None for hour in span.hours]


def _by_hour(table: DataFrame, names: Sequence[str]) -> dict[datetime, Row]:
    collected = table.select(F.unix_millis("hour").alias("ms"), *names).collect()
    return {_moment(row["ms"]): row.asDict() for row in collected}


def _rows(table: DataFrame) -> list[Row]:
    # Spark returns timestamps in the time zone of this machine.
    times = [name for name, kind in table.dtypes if kind == "timestamp"]
    plain = table.limit(LISTED).withColumns({name: F.unix_millis(name) for name in times})
    rows = [row.asDict() for row in plain.collect()]
    return [{name: _moment(value) if name in times else value for name, value in row.items()} for row in rows]


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)
