"""The report as one self-contained HTML file without scripts: each chart's title is the question that it answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Self

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.reports import ADDRESSES
from pipeline.reports.charts import Series, bar_chart, funnel_chart, heat_map, line_chart
from pipeline.reports.engines import Row
from pipeline.reports.summary import LISTED, UsageSummary

FEW = 20
"""Percentiles of fewer messages are marked."""
NUMBERS = Markup(
    "Mailboxes and groups stand here by number: the journal holds no addresses, since whoever knows one may read its"
    " mail. <code>mediator mailbox list</code> has both;"
    " <code>mediator pipeline report --addresses</code> shows both here."
)
_TOTALS = {
    "sent": "sent",
    "delayed": "of them delayed",
    "delivered": "delivered",
    "leased": "leased",
    "acknowledged": "acknowledged",
    "expired": "expired",
    "deleted": "deleted",
    "compacted": "compacted",
    "dead": "dead",
}
_WEEK = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined
)


@dataclass(frozen=True, slots=True)
class LocalClock:
    """Formats times in one time zone."""

    zone: tzinfo = UTC

    @classmethod
    def of_this_machine(cls, when: datetime) -> Self:
        """Return the machine's own, with the offset that it has at a moment."""
        zone = when.astimezone().tzinfo
        assert zone is not None, "astimezone gives one"
        return cls(zone)

    def offset(self, when: datetime) -> timedelta:
        """Return by how much the clock is ahead of UTC."""
        return when.astimezone(self.zone).utcoffset() or timedelta()

    def name(self, when: datetime) -> str:
        """Return what the clock is called: ``UTC``, ``CET (UTC+01:00)``."""
        local = when.astimezone(self.zone)
        if not local.utcoffset():
            return "UTC"
        return f"{local.tzname()} (UTC{local.isoformat()[-6:]})"

    def moment(self, when: datetime | int) -> str:
        """Return a time, if a number then in milliseconds since the epoch, to the minute."""
        if isinstance(when, int):
            when = datetime.fromtimestamp(when / 1000, UTC)
        return f"{when.astimezone(self.zone):%Y-%m-%d %H:%M}"


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing, and the numbers behind it as a table."""

    title: str
    says: str
    drawing: Markup
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is no chart's."""

    title: str
    says: str
    heads: Sequence[str]
    rows: Sequence[Sequence[object]]


def page(summary: UsageSummary, clock: LocalClock, addresses: Mapping[int, str]) -> str:
    """Return the whole file. ``addresses`` are those of mailboxes by number, for readers who may know them (A7)."""
    return _ENVIRONMENT.get_template("report.html").render(
        whose="all tenants" if summary.tenant is None else f"tenant {summary.tenant}",
        begin=clock.moment(summary.span.begin),
        end=clock.moment(summary.span.end),
        zone=clock.name(summary.span.end),
        before=summary.before is not None,
        lost=_missing(summary, clock),
        totals=_totals(summary),
        charts=charts(summary, clock),
        lists=_lists(summary, clock, addresses),
        listed=LISTED,
        few=FEW,
        names=ADDRESSES if addresses else NUMBERS,
    )


def _totals(summary: UsageSummary) -> list[tuple[str, str, str, str]]:
    shown: list[tuple[str, str, str, str]] = []
    for name, title in (*_TOTALS.items(), ("bytes_in", "bytes in")):
        text, value = size if name == "bytes_in" else count, summary.totals.get(name, 0)
        then = None if summary.before is None else summary.before[name]
        shown.append((title, text(value), name, "" if then is None else _compared(value, then, text)))
    if summary.depth:
        shown.append(("there at the end", count(summary.depth[-1]), "depth", ""))
        shown.append(("bytes there", size(summary.depth_bytes[-1]), "depth_bytes", ""))
    return [*shown, ("mailboxes", count(summary.mailboxes), "mailboxes", "")]


def _compared(value: int, then: int, text: Callable[[float], str]) -> str:
    if not then:
        return "" if not value else "before: 0"
    change = f"{value / then - 1:+,.0%}"
    return "as before" if change in ("+0%", "-0%") else f"{change}, was {text(then)}"


def charts(summary: UsageSummary, clock: LocalClock) -> list[Chart]:
    """Return the charts; ``clock`` gives the local hours."""
    flows, step = summary.flows, summary.grain
    handed_out = [one + other for one, other in zip(flows["delivered"], flows["leased"], strict=True)]
    mail = [
        Series("sent", flows["sent"]),
        Series("delivered or leased", handed_out),
        Series("acknowledged", flows["acknowledged"]),
    ]
    drawn = _Charts(summary, clock)
    funnel = summary.funnel
    stages = {
        "came": "came",
        "delivered": "delivered",
        "acknowledged": "acknowledged",
        "expired": "expired",
        "expired_unread": "of them unread",
        "dead": "died",
    }
    return [
        drawn.lines(f"How much mail came and was taken, by {step}?", mail, count),
        Chart(
            "What became of the mail that came?",
            "Each message counts once, whenever it happened. Mail that died came at any time.",
            funnel_chart([(title, funnel.get(name, 0)) for name, title in stages.items()], count),
        ),
        drawn.lines(f"How much mail was there at the end of each {step}?", [Series("messages", summary.depth)], count),
        drawn.lines(
            f"How many bytes were there at the end of each {step}?", [Series("bytes", summary.depth_bytes)], size
        ),
        drawn.waits("How long did mail wait for its first delivery?", "first"),
        drawn.waits("How long did mail wait for its first ACK?", "ack"),
        drawn.within(f"How much of the mail was delivered within {wait(summary.goal)}?"),
        drawn.bars(f"Which tenants sent the most bytes, by {step}?", summary.tenants),
        Chart(
            "When in the week is mail sent?",
            f"All messages of the time, by the hour of {clock.name(summary.span.end)}.",
            heat_map(list(zip(_WEEK, summary.week, strict=True)), [f"{hour:02}:00" for hour in range(24)], count),
            ("", *(f"{hour:02}" for hour in range(24))),
            [(day, *map(count, hours)) for day, hours in zip(_WEEK, summary.week, strict=True)],
        ),
    ]


class _Charts:
    """Draws the charts over the steps of a summary."""

    def __init__(self, summary: UsageSummary, clock: LocalClock) -> None:
        self._summary = summary
        if summary.grain == "hour":
            self._labels = [f"{step.astimezone(clock.zone):%-d %b %H:%M}" for step in summary.steps]
            self._names = [clock.moment(step) for step in summary.steps]
        else:
            self._labels = [f"{step:%-d %b}" for step in summary.steps]
            self._names = [f"{step:%Y-%m-%d}" for step in summary.steps]

    def lines(self, title: str, series: Sequence[Series], text: Callable[[float], str]) -> Chart:
        drawing = line_chart(self._labels, series, text, base=1024 if text is size else 1000)
        return Chart(title, "", drawing, *self._table(series, text))

    def bars(self, title: str, tenants: Sequence[tuple[str, Sequence[int]]]) -> Chart:
        series = [Series(name, values) for name, values in tenants]
        return Chart(title, "", bar_chart(self._labels, series, size, 1024), *self._table(series, size))

    def waits(self, title: str, name: str) -> Chart:
        rows = self._summary.waits[name]
        few = [number for number, row in enumerate(rows) if row is not None and row["messages"] < FEW]
        series = [
            Series(quantile, [None if row is None else row[quantile] for row in rows], few)
            for quantile in ("p50", "p95", "p99")
        ]
        drawing = line_chart(self._labels, series, wait, waits=True)
        says = "Half of it no longer than p50; of a hundred messages one waited longer than p99."
        return Chart(title, says, drawing, *self._table(series, wait, rows))

    def within(self, title: str) -> Chart:
        rows = self._summary.waits["first"]
        few = [number for number, row in enumerate(rows) if row is not None and row["messages"] < FEW]
        shares = Series("share", [None if row is None else row["within"] / row["messages"] for row in rows], few)
        known = [row for row in rows if row is not None]
        share = sum(row["within"] for row in known) / (sum(row["messages"] for row in known) or 1)
        says = f"{percent(share)} of the mail that was delivered." if known else "No mail was delivered."
        return Chart(title, says, line_chart(self._labels, [shares], percent), *self._table([shares], percent, rows))

    def _table(
        self, series: Sequence[Series], text: Callable[[float], str], rows: Sequence[Row | None] | None = None
    ) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        heads = [self._summary.grain, *(each.name for each in series), *([] if rows is None else ["messages"])]
        lines: list[Sequence[object]] = []
        for step, name in enumerate(self._names):
            marked = "*" if any(step in each.few for each in series) else ""
            values = [each.values[step] for each in series]
            cells = ["" if value is None else text(value) + marked for value in values]
            lines.append((name, *cells, *([] if rows is None else [count((rows[step] or {}).get("messages", 0))])))
        return heads, lines


def _lists(summary: UsageSummary, clock: LocalClock, addresses: Mapping[int, str]) -> list[Table]:
    goal = wait(summary.goal)

    def table(
        title: str,
        says: str,
        rows: Sequence[Row],
        columns: Mapping[str, Callable[[Row], object]],
        first: str = "mailbox",
    ) -> Table:
        lines = [(_name(row, addresses), row["tenant"], *(cell(row) for cell in columns.values())) for row in rows]
        return Table(title, says, (first, "tenant", *columns), lines)

    def plain(name: str, text: Callable[[Any], str] = count) -> Callable[[Row], str]:
        return lambda row: text(row[name])

    def marked(name: str, number: str) -> Callable[[Row], str]:
        return lambda row: wait(row[name]) + ("*" if row[number] < FEW else "")

    lists = summary.lists
    return [
        Table(
            "Who sends and takes how much?",
            "Tenants, by the bytes that came in.",
            (
                "tenant",
                "mailboxes",
                "sent",
                "delivered",
                "acknowledged",
                "expired",
                "dead",
                "bytes in",
                "there at the end",
            ),
            [
                (
                    *(row["tenant"], count(row["mailboxes"]), count(row["sent"])),
                    count(row["delivered"] + row["leased"]),
                    *(count(row[name]) for name in ("acknowledged", "expired", "dead")),
                    *(size(row["bytes_in"]), count(row["depth"])),
                )
                for row in summary.by_tenant[:LISTED]
            ],
        ),
        table(
            "What became of the mail of each mailbox?",
            "The mailboxes to which most mail came. Each message counts once; what died or expired in this time.",
            lists["funnel"],
            {
                "came": plain("came"),
                "delivered": lambda row: _share(row["delivered"], row["came"]),
                "acknowledged": lambda row: _share(row["acknowledged"], row["came"]),
                "expired": plain("expired"),
                "died": plain("dead"),
            },
        ),
        table(
            "Which mailboxes fill up?",
            "By the messages that they have more at the end than at the beginning.",
            lists["growing"],
            {
                "grew by": lambda row: f"+{count(row['growth'])}",
                "there": plain("depth"),
                "bytes there": plain("depth_bytes", size),
                "sent": plain("sent"),
            },
        ),
        table(
            "Mailboxes that only fill: which does nobody read?",
            "Mail was sent to them, and no group took any.",
            lists["filling"],
            {"sent": plain("sent"), "there": plain("depth"), "bytes there": plain("depth_bytes", size)},
        ),
        table(
            "Where is the oldest unread mail?",
            "Messages that no group was given, by the day of the newest event.",
            lists["oldest"],
            {"oldest": plain("oldest_unread", clock.moment), "unread": plain("unread"), "there": plain("depth")},
        ),
        table(
            "Where did mail die or expire?",
            "Mail dies when it was delivered as often as its group allows, without an ACK.",
            lists["failed"],
            {
                "died": plain("dead"),
                "expired": plain("expired"),
                "expired unread": plain("expired_unread"),
                "sent": plain("sent"),
            },
        ),
        table(
            "Slowest mailboxes: where did mail wait longest?",
            "By the worst hour of each: how long messages waited for their first delivery; then over all of the time.",
            lists["slowest"],
            {
                "worst hour": plain("hour", clock.moment),
                "p50": marked("first_p50", "first_count"),
                "p95": marked("first_p95", "first_count"),
                "p99": marked("first_p99", "first_count"),
                "messages": plain("first_count"),
                "all p95": marked("all_p95", "waited"),
                f"all within {goal}": lambda row: percent(row["within"] / row["waited"]),
            },
        ),
        table(
            "Groups that fell behind: which do not keep up?",
            "Given less than half of what came since the hour of the first message they were given.",
            lists["behind"],
            {
                "group": plain("group_no", str),
                "came": plain("came"),
                "given": plain("given"),
                "acknowledged": plain("acknowledged"),
                "since": plain("since", clock.moment),
            },
        ),
    ]


def _name(row: Row, addresses: Mapping[int, str]) -> str:
    number = row["mailbox"]
    return f"{number} {addresses[number]}" if number in addresses else str(number)


def _share(part: int, whole: int) -> str:
    return f"{count(part)} ({part / whole:.0%})"


def _missing(summary: UsageSummary, clock: LocalClock) -> list[str]:
    lines = [f"{_gap(gap, clock)} are lost: {gap['why']}" for gap in summary.gaps]
    return lines + [f"{number:,} lines of the journal could not be read: {why}" for why, number in summary.quarantined]


def _gap(gap: Row, clock: LocalClock) -> str:
    if gap["events"] is None:
        return "At an unknown time, nobody knows how many events,"
    return f"{gap['events']:,} events from {clock.moment(gap['from'])} to {clock.moment(gap['to'])}"


def count(number: float) -> str:
    """Return a number with its thousands set apart."""
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def percent(share: float) -> str:
    """Return a share of one in percent; only all of it is 100 %."""
    return f"{share:.0%}" if share * 100 == int(share * 100) else f"{min(share, 0.999):.1%}"


def size(number: float) -> str:
    """Return bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if number == int(number) else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def wait(milliseconds: float) -> str:
    """Return a wait in the unit that suits it."""
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if milliseconds >= length:
            return f"{milliseconds / length:,.1f} {unit}".replace(".0 ", " ")
    return f"{milliseconds:,.0f} ms"
