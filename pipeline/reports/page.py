"""The report as one self-contained HTML file, with plots by plotly."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from html import escape
from typing import Self

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from pipeline.reports import ADDRESSES
from pipeline.reports.summary import LISTED, Row, UsageSummary

# Distinguishable on white and on black, and with red-green colour blindness.
COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#ef4444", "#14b8a6", "#94a3b8", "#84cc16")
FEW_HOURS = 8
"""Up to this many hours each have a label; plotly chooses the labels of more."""
MARKED_HOURS = 48
"""Up to this many hours are also drawn as dots, since a line of a single hour is invisible."""
BAR = 2_880_000
"""Width of an hour's bar in milliseconds; by default a single bar is too thin to see."""
_CONFIG = {"displayModeBar": False, "responsive": True, "displaylogo": False, "plotlyServerURL": ""}
# The browser blocks all requests that the page might make.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --ground: #ffffff; --card: #f3f5f7; --line: #d5dae0 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa5b1; --ground: #0f1419; --card: #1a2129; --line: #303a45 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 16px; max-width: 1100px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.05rem; margin: 28px 0 6px }
p { margin: 4px 0 10px } .soft { color: var(--soft); font-size: .9rem }
.totals { display: grid; grid-template-columns: repeat(auto-fill, minmax(104px, 1fr)); gap: 8px;
  margin: 16px 0; padding: 0 }
.totals div { background: var(--card); border-radius: 8px; padding: 8px 10px }
.totals dt { color: var(--soft); font-size: .8rem } .totals dd { margin: 0; font-size: 1.1rem; font-weight: 600 }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 0 20px }
.plots section { min-width: 0; overflow: hidden }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 5px 8px; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 500 } th:first-child, td:first-child { text-align: left }
.lost { border-left: 4px solid #ef4444; padding: 2px 12px; background: var(--card) }
.xtick text, .ytick text, .legendtext { fill: var(--ink) !important }
.gridlayer path { stroke: var(--line) !important }
.hoverlayer .legend .bg { fill: var(--card) !important }
.hoverlayer .legend text { fill: var(--ink) !important }
"""
# Plots are drawn before the page has its width, and phones are rotated.
_FIT = """
const fit = new ResizeObserver(seen => {
  for (const one of seen) Plotly.Plots.resize(one.target.querySelector(".plotly-graph-div"));
});
document.querySelectorAll(".plots section").forEach(section => fit.observe(section));
"""
NUMBERS = (
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

    def name(self, when: datetime) -> str:
        """Return what the clock is called: ``UTC``, ``CET (UTC+01:00)``."""
        local = when.astimezone(self.zone)
        if not local.utcoffset():
            return "UTC"
        return f"{local.tzname()} (UTC{local.isoformat()[-6:]})"

    def moment(self, when: datetime) -> str:
        """Return a time to the minute."""
        return f"{when.astimezone(self.zone):%Y-%m-%d %H:%M}"

    def plain(self, when: datetime) -> datetime:
        """Return what the clock shows, for plots: they know no zones."""
        return when.astimezone(self.zone).replace(tzinfo=None)


def page(summary: UsageSummary, clock: LocalClock, addresses: Mapping[int, str]) -> str:
    """Return the whole file. ``addresses`` are those of mailboxes by number, for readers who may know them (A7)."""
    drawn = "".join(f"<section><h2>{escape(title)}</h2>{plot}</section>" for title, plot in plots(summary, clock))
    whose = "all tenants" if summary.tenant is None else f"tenant {summary.tenant}"
    begin, end = clock.moment(summary.span.begin), clock.moment(summary.span.end)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>Usage of the mediator</title><link rel="icon" href="data:,"><style>{_STYLE}</style>
<script>{get_plotlyjs()}</script></head><body>
<h1>Usage</h1><p class="soft">{escape(whose)}, {begin} to {end} {escape(clock.name(summary.span.end))}.</p>
{_missing(summary, clock)}{_totals(summary)}
<div class="plots">{drawn}</div>
{_lists(summary, clock, addresses)}
<p class="soft">{NUMBERS if not addresses else ADDRESSES} A mailbox that is made anew has a new number. FETCHes without
a group leave no trace. Waits are those of the messages that became visible in an hour; a message that nobody was given
yet has none. What expired, was deleted or was replaced between its FETCH and its ACK does not count as acknowledged.
</p>
<script>{_FIT}</script></body></html>
"""


def _totals(summary: UsageSummary) -> str:
    cells = [(title, f"{summary.totals.get(name, 0):,}", name) for name, title in _TOTALS.items()]
    if summary.depth:
        cells += [
            ("there at the end", f"{summary.depth[-1]:,}", "depth"),
            ("bytes there", size(summary.depth_bytes[-1]), "depth_bytes"),
        ]
    cells += [
        ("bytes in", size(summary.totals.get("bytes_in", 0)), "bytes_in"),
        ("mailboxes", f"{summary.mailboxes:,}", "mailboxes"),
    ]
    rows = "".join(f'<div><dt>{title}</dt><dd data-name="{name}">{value}</dd></div>' for title, value, name in cells)
    return f'<dl class="totals">{rows}</dl>'


def _lists(summary: UsageSummary, clock: LocalClock, addresses: Mapping[int, str]) -> str:
    def mailbox(row: Row) -> str:
        number = row["mailbox"]
        return f"{number} {addresses[number]}" if number in addresses else str(number)

    return (
        _table(
            "Tenants",
            "By what came in.",
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
            (
                (
                    *(row["tenant"], f"{row['mailboxes']:,}", f"{row['sent']:,}"),
                    f"{row['delivered'] + row['leased']:,}",
                    *(f"{row[name]:,}" for name in ("acknowledged", "expired", "dead")),
                    *(size(row["bytes_in"]), f"{row['depth']:,}"),
                )
                for row in summary.by_tenant[:LISTED]
            ),
        )
        + _table(
            "Slowest mailboxes",
            "Each by its worst hour: how long messages waited for their first delivery.",
            ("mailbox", "tenant", "p95", "p50", "p99", "messages", "hour"),
            (
                (
                    *(mailbox(row), row["tenant"]),
                    *(wait(row[name]) for name in ("first_p95", "first_p50", "first_p99")),
                    *(f"{row['first_count']:,}", clock.moment(row["hour"])),
                )
                for row in summary.slowest
            ),
        )
        + _table(
            "Mailboxes that only fill",
            "Mail was sent to them, and no group took any.",
            ("mailbox", "tenant", "sent", "there", "bytes there"),
            (
                (mailbox(row), row["tenant"], f"{row['sent']:,}", f"{row['depth']:,}", size(row["depth_bytes"]))
                for row in summary.filling
            ),
        )
        + _table(
            "Groups that fell behind",
            "Given less than half of what came since the hour of the first message they were given.",
            ("group", "mailbox", "tenant", "came", "given", "acknowledged", "since"),
            (
                (
                    *(row["group"], mailbox(row), row["tenant"]),
                    *(f"{row[name]:,}" for name in ("came", "given", "acknowledged")),
                    clock.moment(row["since"]),
                )
                for row in summary.behind
            ),
        )
    )


def _table(title: str, says: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    if not lines:
        return f'<h2>{title}</h2><p class="soft">None.</p>'
    more = f" The first {LISTED} of them." if len(lines) == LISTED else ""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<h2>{title}</h2><p class="soft">{says}{more}</p>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _missing(summary: UsageSummary, clock: LocalClock) -> str:
    lines = [f"{_gap(gap, clock)} are lost: {gap['why']}" for gap in summary.gaps]
    lines += [f"{count:,} lines of the journal could not be read: {why}" for why, count in summary.quarantined]
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="lost"><h2>What is missing</h2><p>The numbers are too small by this:</p><ul>{items}</ul></div>'


def _gap(gap: Row, clock: LocalClock) -> str:
    if gap["events"] is None:
        return "At an unknown time, nobody knows how many events,"
    return f"{gap['events']:,} events from {clock.moment(gap['from'])} to {clock.moment(gap['to'])}"


def size(count: float) -> str:
    """Return bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def wait(milliseconds: float) -> str:
    """Return a wait in the unit that suits it."""
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if milliseconds >= length:
            return f"{milliseconds / length:,.1f} {unit}"
    return f"{milliseconds:,.0f} ms"


def plots(summary: UsageSummary, clock: LocalClock) -> list[tuple[str, str]]:
    """Return headings and plots; ``clock`` gives the local hours."""
    hours = [clock.plain(hour) for hour in summary.span.hours]
    # A logarithmic axis has no zero: waits below a millisecond are shown as one.
    seconds = {
        name: [None if value is None else max(value, 1) / 1000 for value in values]
        for name, values in summary.waits.items()
    }
    return [
        ("Messages per hour", _html(_lines(hours, _handed_out(summary)))),
        ("Messages there at the end of each hour", _html(_lines(hours, {"messages": summary.depth}, fill=True))),
        ("Bytes there at the end of each hour", _html(_lines(hours, {"bytes": summary.depth_bytes}, fill=True))),
        (
            "Wait for the first delivery, seconds",
            _html(_logarithmic(_lines(hours, _waits(seconds, "first"), gaps=True))),
        ),
        ("Wait for the first ACK, seconds", _html(_logarithmic(_lines(hours, _waits(seconds, "ack"), gaps=True)))),
        ("Bytes sent per hour, by tenant", _html(_bars(hours, summary.tenants))),
    ]


def _handed_out(summary: UsageSummary) -> dict[str, list[int]]:
    both = zip(summary.flows["delivered"], summary.flows["leased"], strict=True)
    return {
        "sent": summary.flows["sent"],
        "delivered or leased": [one + other for one, other in both],
        "acknowledged": summary.flows["acknowledged"],
    }


def _waits(seconds: Mapping[str, Sequence[float | None]], wait: str) -> dict[str, Sequence[float | None]]:
    return {name.removeprefix(f"{wait}_"): values for name, values in seconds.items() if name.startswith(f"{wait}_")}


def _lines(
    hours: Sequence[datetime],
    series: Mapping[str, Sequence[float | None]],
    *,
    fill: bool = False,
    gaps: bool = False,
) -> go.Figure:
    # Without markers, an hour between two gaps is invisible.
    mode = "lines+markers" if gaps or len(hours) <= MARKED_HOURS else "lines"
    shape = "hv" if fill else "linear"
    return _figure(
        hours,
        (
            go.Scatter(
                x=hours,
                y=values,
                name=escape(name),
                mode=mode,
                marker={"size": 6},
                line={"color": colour, "width": 2, "shape": shape},
                fill="tozeroy" if fill else None,
            )
            for (name, values), colour in zip(series.items(), COLOURS, strict=False)
        ),
    )


def _logarithmic(figure: go.Figure) -> go.Figure:
    """Use a logarithmic axis, since p99 may be a thousand times p50."""
    return figure.update_yaxes(type="log", rangemode="normal", dtick=1)


def _bars(hours: Sequence[datetime], series: Sequence[tuple[str, Sequence[int]]]) -> go.Figure:
    return _figure(
        hours,
        (
            go.Bar(x=hours, y=values, width=BAR, name=escape(name), marker={"color": colour, "line": {"width": 0}})
            for (name, values), colour in zip(series, COLOURS, strict=False)
        ),
    ).update_layout(barmode="stack")


def _figure(hours: Sequence[datetime], traces: Iterable[object]) -> go.Figure:
    figure = go.Figure(list(traces))
    figure.update_layout(
        template="none",
        height=270,
        margin={"l": 46, "r": 8, "t": 8, "b": 36},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "inherit", "size": 12},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        showlegend=len(figure.data) > 1,
    )
    figure.update_yaxes(rangemode="tozero", tickformat="~s", nticks=6, zeroline=False)
    if len(hours) <= FEW_HOURS:
        # By default plotly shows seconds and less around a single hour.
        half = timedelta(minutes=30)
        figure.update_xaxes(range=[hours[0] - half, hours[-1] + half], tickvals=hours, tickformat="%H:%M\n%b %-d")
    else:
        figure.update_xaxes(nticks=6)
    return figure


def _html(figure: go.Figure) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG, default_height="270px"))
