"""The plots of a report, as HTML; the page includes plotly's script once."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from pipeline.reports.local_clock import LocalClock
from pipeline.reports.summary import UsageSummary

# Distinguishable on white and on black, and with red-green colour blindness.
COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#ef4444", "#14b8a6", "#94a3b8", "#84cc16")
FEW_HOURS = 8
"""Up to this many hours each have a label; plotly chooses the labels of more."""
MARKED_HOURS = 48
"""Up to this many hours are also drawn as dots, since a line of a single hour is invisible."""
BAR = 2_880_000
"""Width of an hour's bar in milliseconds; by default a single bar is too thin to see."""
_CONFIG = {"displayModeBar": False, "responsive": True, "displaylogo": False, "plotlyServerURL": ""}


def library() -> str:
    """Return plotly's script; it makes no network requests."""
    return str(get_plotlyjs())


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
