"""The numbers of a report over a span of time, from the usage tables, as plain values for the page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta

from deltalake import DeltaTable
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from mediator.errors import BadRequestError
from pipeline.lake import GAPS, QUARANTINE, Place
from pipeline.lake.storage import delta_arguments, is_table
from pipeline.reports import usage
from pipeline.reports.engines import Engine, Row

LISTED = 20
"""Rows shown of a list."""
DEFAULT_DAYS = 30
MAX_DAYS = 366
MAX_STEPS = 400
OTHERS = "all others"
PER_TENANT = ("mailboxes", *usage.TOTALS, "depth", "depth_bytes")
"""Mailboxes with events, sums over the span, and the depth at its end."""
GRAINS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(days=7)}
"""Steps of a report's charts; days and weeks are of UTC, weeks begin on Monday."""
WAITS = {"delivery": "first", "ack": "ack"}
LISTS = {
    "funnel": ("came > 0", "came DESC"),
    "growing": ("growth > 0", "growth DESC, growth_bytes DESC"),
    "filling": ("sent > 0 AND taken = 0", "depth DESC, sent DESC"),
    "oldest": ("oldest_unread IS NOT NULL", "oldest_unread"),
    "failed": ("(dead > 0 OR expired > 0)", "dead DESC, expired DESC"),
}
"""Lists of mailboxes: which rows of ``mailbox_figures`` they have, and in what order."""
_VIEWS = ("report_hours", "mailbox_figures")
"""Files of ``sql`` that the other files use."""
_MILLISECOND = timedelta(milliseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MONDAY = datetime(1970, 1, 5, tzinfo=UTC)
_FUNNEL = """
    SELECT coalesce(sum(came), 0) AS came, coalesce(sum(delivered), 0) AS delivered,
        coalesce(sum(acknowledged), 0) AS acknowledged, coalesce(sum(came_expired), 0) AS expired,
        coalesce(sum(expired_unread), 0) AS expired_unread, coalesce(sum(dead), 0) AS dead
    FROM mailbox_figures"""
_HOUR = timedelta(hours=1)
_ASKED = StructType(
    [
        StructField("tenant", StringType()),
        *(StructField(name, TimestampType()) for name in ("begin_at", "end_at")),
        *(StructField(name, LongType()) for name in ("goal", "step_length", "step_shift")),
    ]
)


@dataclass(frozen=True, slots=True)
class Span:
    """Whole hours, from ``begin`` on and before ``end``; both in UTC."""

    begin: datetime
    end: datetime

    @property
    def days(self) -> float:
        """How long it is."""
        return (self.end - self.begin) / timedelta(days=1)

    def steps(self, grain: str) -> list[datetime]:
        """Return the beginnings of its steps; the first may be before ``begin``."""
        first = step_of(self.begin, grain)
        return [first + number * GRAINS[grain] for number in range(-((first - self.end) // GRAINS[grain]))]


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """A report's numbers; lists by step go with ``steps``."""

    span: Span
    grain: str
    goal: int
    """Milliseconds within which messages should be delivered first."""
    tenant: str | None
    """None: all tenants."""
    steps: list[datetime]
    mailboxes: int = 0
    """Mailboxes with events."""
    totals: dict[str, int] = field(default_factory=dict)
    """Sums over the span, by the names of :data:`pipeline.reports.usage.TOTALS`."""
    before: dict[str, int] | None = None
    """The same of the time before, which is as long; None if the tables do not go back so far."""
    flows: dict[str, list[int]] = field(default_factory=dict)
    """The totals by step."""
    depth: list[int] = field(default_factory=list)
    """Messages at the end of each step."""
    depth_bytes: list[int] = field(default_factory=list)
    waits: dict[str, list[Row | None]] = field(default_factory=dict)
    """By the names of :data:`pipeline.reports.usage.WAITS`: ``messages``, ``p50`` …, and how many were ``within`` the
    goal; None in steps whose messages were not delivered."""
    week: list[list[int]] = field(default_factory=list)
    """Messages sent by weekday, Monday first, and hour of the local clock."""
    tenants: list[tuple[str, list[int]]] = field(default_factory=list)
    """Bytes that came in by tenant, the largest first and :data:`OTHERS` together last."""
    by_tenant: list[Row] = field(default_factory=list)
    """A row for each tenant, by bytes that came in: ``tenant``, :data:`PER_TENANT`."""
    funnel: Row = field(default_factory=dict)
    """What became of the messages that became visible in the span, each counted once: ``came``, ``delivered`` …"""
    lists: dict[str, list[Row]] = field(default_factory=dict)
    """By the names of :data:`LISTS`, ``slowest`` and ``behind``."""
    gaps: Sequence[Row] = ()
    """Times whose events are lost, from gaps.jsonl."""
    quarantined: Sequence[tuple[str, int]] = ()
    """Reasons why lines of the journal could not be read, with counts."""

    def listed(self) -> list[int]:
        """Return the numbers of the mailboxes in the lists."""
        return sorted({row["mailbox"] for rows in self.lists.values() for row in rows})


def span_of(stored: tuple[datetime, datetime] | None, first: date | None, last: date | None) -> Span:
    """Return the span from the beginning of ``first`` to the end of ``last``, cut to what the tables have.

    ``stored`` are their first and last hour, None if they are empty. ``last`` defaults to the day of the last hour, and
    without ``first`` the span is that day and the 29 before. Raises :class:`BadRequestError` for days in the wrong
    order or more than 366.
    """
    if first is not None and last is not None and first > last:
        raise BadRequestError("from", f"expected a day not after {last}, got {first}")
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    oldest, newest = stored or (now, now)
    end = newest + _HOUR
    if last is not None:
        end = min(end, _midnight(last) + timedelta(days=1))
    begin = _midnight((end - _HOUR).date() - timedelta(days=DEFAULT_DAYS - 1) if first is None else first)
    begin = max(begin, oldest)
    if end - begin > timedelta(days=MAX_DAYS):
        raise BadRequestError("from", f"expected at most {MAX_DAYS} days, got {(end - begin).days}")
    return Span(begin, max(begin, end))


def grain_of(span: Span, chosen: str | None) -> str:
    """Return the steps of a report: the chosen ones, else hours up to 3 days, weeks from 93 on, and days between.

    Raises :class:`BadRequestError` for more than :data:`MAX_STEPS` steps.
    """
    if chosen is None:
        return "hour" if span.days <= 3 else "day" if span.days <= 92 else "week"
    if (steps := len(span.steps(chosen))) > MAX_STEPS:
        raise BadRequestError("by", f"expected at most {MAX_STEPS} steps, got {steps} of one {chosen}")
    return chosen


def step_of(hour: datetime, grain: str) -> datetime:
    """Return the beginning of the step that an hour belongs to."""
    return hour - (hour - _MONDAY) % GRAINS[grain]


def summarize(
    engine: Engine,
    span: Span,
    *,
    tenant: str | None = None,
    grain: str | None = None,
    goal: int = 60_000,
    offset: timedelta = timedelta(),
    gaps: Sequence[Row] = (),
    quarantined: Sequence[tuple[str, int]] = (),
) -> UsageSummary:
    """Compute a report from the usage tables, which the engine knows by their names.

    ``goal`` is in milliseconds, ``offset`` that of the local clock from UTC.
    """
    steps = grain_of(span, grain)
    define_report(engine, span, tenant, steps, goal)
    starts = span.steps(steps)
    hours = {_moment(row.pop("hour")): row for row in engine.rows(usage.read_sql("by_hour"))}
    inside = {hour: row for hour, row in hours.items() if hour >= span.begin}
    by_step = _sums(inside, steps)
    flows = {name: [by_step.get(start, {}).get(name, 0) for start in starts] for name in usage.TOTALS}
    by_tenant = engine.rows(usage.read_sql("by_tenant"))
    return UsageSummary(
        span,
        steps,
        goal,
        tenant,
        starts,
        mailboxes=sum(row["mailboxes"] for row in by_tenant),
        totals={name: sum(flow) for name, flow in flows.items()},
        before=_before(hours, span),
        flows=flows,
        depth=_running_total(hours, "change", starts, steps),
        depth_bytes=_running_total(hours, "change_bytes", starts, steps),
        waits=_waits(engine, starts),
        week=_week(inside, offset),
        tenants=_shares(engine, starts, steps),
        by_tenant=by_tenant,
        funnel=engine.rows(_FUNNEL)[0],
        lists=_lists(engine),
        gaps=gaps,
        quarantined=quarantined,
    )


def define_report(engine: Engine, span: Span, tenant: str | None, grain: str, goal: int) -> None:
    """Define what a report is asked for, and the hours and mailboxes of it."""
    length = GRAINS[grain] // _MILLISECOND
    shift = length - (_MONDAY - _EPOCH) // _MILLISECOND % length
    engine.values("asked", _ASKED, [(tenant, span.begin, span.end, goal, length, shift)])
    for name in _VIEWS:
        engine.define(name, usage.read_sql(name), kept=True)


def missing(lake: Place, span: Span) -> tuple[list[Row], list[tuple[str, int]]]:
    """Return what a report lacks: the gaps in a span, and why lines found since it began are invalid, with counts."""
    gaps = _read(lake, GAPS, "why", "events", "from", "to")
    known = [row for row in gaps if row["from"] is None or (row["from"] < span.end and row["to"] >= span.begin)]
    known.sort(key=lambda row: row["from"] or span.begin)
    lines = _read(lake, QUARANTINE, "seen", "reason")
    counts = Counter(row["reason"] for row in lines if row["seen"] >= span.begin)
    return known[:LISTED], counts.most_common(LISTED)


def _read(lake: Place, name: str, *columns: str) -> list[Row]:
    if not is_table(lake / name):
        return []
    rows: list[Row] = DeltaTable(**delta_arguments(lake / name)).to_pyarrow_table(columns=list(columns)).to_pylist()
    return rows


def _before(hours: Mapping[datetime, Row], span: Span) -> dict[str, int] | None:
    begin = span.begin - (span.end - span.begin)
    if not hours or min(hours) > begin:
        return None
    rows = [row for hour, row in hours.items() if begin <= hour < span.begin]
    return {name: sum(row[name] for row in rows) for name in usage.TOTALS}


def _sums(hours: Mapping[datetime, Row], grain: str) -> dict[datetime, dict[str, int]]:
    found: dict[datetime, dict[str, int]] = {}
    for hour, row in hours.items():
        sums = found.setdefault(step_of(hour, grain), dict.fromkeys(row, 0))
        for name, value in row.items():
            sums[name] += value
    return found


def _running_total(hours: Mapping[datetime, Row], change: str, starts: Sequence[datetime], grain: str) -> list[int]:
    """Return for each step the sum of all changes up to its end, those before the span included."""
    ordered = sorted(hours)
    totals, total, place = [], 0, 0
    for start in starts:
        while place < len(ordered) and ordered[place] < start + GRAINS[grain]:
            total += hours[ordered[place]][change]
            place += 1
        totals.append(total)
    return totals


def _waits(engine: Engine, starts: Sequence[datetime]) -> dict[str, list[Row | None]]:
    rows = engine.rows(usage.read_sql("waits_by_step"))
    found = {(WAITS[row["wait"]], _moment(row["step"])): row for row in rows}
    return {wait: [found.get((wait, start)) for start in starts] for wait in usage.WAITS}


def _week(hours: Mapping[datetime, Row], offset: timedelta) -> list[list[int]]:
    week = [[0] * 24 for _ in range(7)]
    for hour, row in hours.items():
        local = hour + offset
        week[local.weekday()][local.hour] += row["sent"]
    return week


def _shares(engine: Engine, starts: Sequence[datetime], grain: str) -> list[tuple[str, list[int]]]:
    # The others have the key None, since a tenant may have any name.
    found: dict[str | None, dict[datetime, int]] = {}
    for row in engine.rows(usage.read_sql("tenant_bytes")):
        steps, step = found.setdefault(row["tenant"], {}), step_of(_moment(row["hour"]), grain)
        steps[step] = steps.get(step, 0) + row["bytes_in"]

    def rank(name: str | None) -> tuple[bool, int, str]:
        return name is None, -sum(found[name].values()), name or ""

    return [
        (OTHERS if name is None else name, [found[name].get(start, 0) for start in starts])
        for name in sorted(found, key=rank)
    ]


def _lists(engine: Engine) -> dict[str, list[Row]]:
    lists = {
        name: engine.rows(
            f"SELECT * FROM mailbox_figures WHERE {which} ORDER BY {order}, tenant, mailbox LIMIT {LISTED}"
        )
        for name, (which, order) in LISTS.items()
    }
    lists |= {name: engine.rows(usage.read_sql(name)) for name in ("slowest", "behind")}
    return lists


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)
