"""Charts as SVG that is drawn here: no script, legible at any width, on white and on black.

The drawing stretches with the page; lines, dots and texts do not.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import ceil, floor, log, log10

from markupsafe import Markup, escape

WIDTH, HEIGHT = 1000, 200
"""Of the drawing's coordinates."""
COLOURS = 8
"""Colours of the style sheet, ``--c0`` …"""
HOVERED = 100
"""Up to this many steps show their numbers under the pointer; more would be too thin to point at."""
DOTTED = 48
"""Up to this many steps are also drawn as dots, since a line of a single step is invisible."""
WAITS = (1, 10, 100, 1000, 10_000, 60_000, 600_000, 3_600_000, 21_600_000, 86_400_000, 864_000_000, 8_640_000_000)
"""Ticks of an axis of waits, in milliseconds."""
LABELS, LONG_LABELS, LONG = 6, 4, 6
"""Labels below a chart, and how many if they are longer than so many characters."""

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One value for each step; None where there is none."""

    name: str
    values: Sequence[float | None]
    few: Collection[int] = ()
    """Steps whose value rests on too few messages."""


def line_chart(
    labels: Sequence[str], series: Sequence[Series], text: Format, *, waits: bool = False, base: int = 1000
) -> Markup:
    """Draw lines, with gaps where there is no value; hollow dots mark the steps with too few messages.

    The axis is logarithmic for ``waits``, in milliseconds; else its units are powers of ``base``.
    """
    known = [value for each in series for value in each.values if value is not None]
    scale = _wait_scale(known) if waits else _linear_scale(known, base)
    drawn = [
        _line(each, number, scale, dots=len(labels) <= DOTTED, fill=len(series) == 1)
        for number, each in enumerate(series)
    ]
    return _frame(labels, series, drawn, scale, text)


def bar_chart(labels: Sequence[str], series: Sequence[Series], text: Format, base: int = 1000) -> Markup:
    """Draw bars, the series on top of each other."""
    heights = [0.0] * len(labels)
    wide, drawn = WIDTH / max(len(labels), 1), []
    scale = _linear_scale([sum(each.values[step] or 0 for each in series) for step in range(len(labels))], base)
    for number, each in enumerate(series):
        bars = []
        for step, value in enumerate(each.values):
            if value:
                low, high = scale.place(heights[step]), scale.place(heights[step] + value)
                bars.append(f"M{(step + 0.1) * wide:.1f} {low:.1f}h{wide * 0.8:.1f}V{high:.1f}h{-wide * 0.8:.1f}z")
                heights[step] += value
        drawn.append(f'<path d="{"".join(bars)}" style="fill:{_colour(number)}"/>')
    return _frame(labels, series, drawn, scale, text)


def heat_map(rows: Sequence[tuple[str, Sequence[int]]], heads: Sequence[str], text: Format) -> Markup:
    """Draw a table whose cells are the darker the more they count."""
    largest = max((value for _, values in rows for value in values), default=0) or 1
    lines = [
        f"<tr><th>{escape(name)}</th>"
        + "".join(
            f'<td style="--v:{value / largest:.2f}" title="{escape(name)} {escape(head)}: {text(value)}"></td>'
            for head, value in zip(heads, values, strict=True)
        )
        for name, values in rows
    ]
    every = 6
    head = "".join(f"<th colspan={every}>{escape(heads[place])}</th>" for place in range(0, len(heads), every))
    return Markup(f'<table class="heat"><tr><th></th>{head}</tr>{"".join(lines)}</table>')


def funnel_chart(stages: Sequence[tuple[str, int]], text: Format) -> Markup:
    """Draw a bar for each stage with its share of the first one."""
    whole = stages[0][1] or 1
    rows = [
        f"<tr><th>{escape(name)}</th><td>{text(value)}</td><td>{value / whole:.1%}</td>"
        f'<td class="bar"><i style="width:{min(value / whole, 1):.1%};background:{_colour(number)}"></i></td></tr>'
        for number, (name, value) in enumerate(stages)
    ]
    return Markup(f'<table class="funnel">{"".join(rows)}</table>')


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        if self.logarithmic:
            value = log10(max(value, 10**self.low))
        return HEIGHT * (1 - (value - self.low) / (self.high - self.low))


def _linear_scale(values: Sequence[float], base: int = 1000) -> _Scale:
    largest = max(values, default=0) or 1
    # Round numbers of bytes are those of their unit.
    unit = base ** max(floor(log(largest, base)), 0)
    power = unit * 10 ** floor(log10(largest / unit / 4))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * 4 >= largest * 0.999)
    count = ceil(largest / step * 0.999)
    return _Scale(0, count * step, [number * step for number in range(count + 1)])


def _wait_scale(milliseconds: Sequence[float]) -> _Scale:
    """Return a logarithmic scale. It has no zero: what is less than a millisecond is drawn as one."""
    known = [max(value, 1) for value in milliseconds] or [1000]
    low = max(tick for tick in WAITS if tick <= min(known))
    high = min((tick for tick in WAITS if tick >= max(known) and tick > low), default=WAITS[-1])
    return _Scale(log10(low), log10(high), [tick for tick in WAITS if low <= tick <= high], logarithmic=True)


def _line(series: Series, number: int, scale: _Scale, *, dots: bool, fill: bool) -> str:
    wide = WIDTH / max(len(series.values), 1)
    runs: list[list[str]] = []
    run: list[str] = []
    points = []
    for step, value in enumerate([*series.values, None]):
        if value is None:
            runs += [run] if run else []
            run = []
            continue
        point = f"{(step + 0.5) * wide:.1f} {scale.place(value):.1f}"
        run.append(point)
        points.append((point, step in series.few))
    colour = _colour(number)
    path = "".join(f"M{'L'.join(run)}" for run in runs)
    drawn = [f'<path class="line" d="{path}" style="stroke:{colour}"/>']
    if fill:
        areas = "".join(f"M{run[0].split()[0]} {HEIGHT}L{'L'.join(run)}V{HEIGHT}z" for run in runs)
        drawn.insert(0, f'<path d="{areas}" style="fill:{colour};opacity:.2"/>')
    # A single step between two gaps is no line.
    alone = {run[0] for run in runs if len(run) == 1}
    shown = "".join(f"M{point}h0" for point, few in points if few or dots or point in alone)
    hollow = "".join(f"M{point}h0" for point, few in points if few)
    if shown:
        drawn.append(f'<path class="dot" d="{shown}" style="stroke:{colour}"/>')
    if hollow:
        drawn.append(f'<path class="dot hollow" d="{hollow}"/>')
    return "".join(drawn)


def _frame(
    labels: Sequence[str], series: Sequence[Series], drawn: Sequence[str], scale: _Scale, text: Format
) -> Markup:
    at = [(tick, scale.place(tick)) for tick in scale.ticks]
    grid = "".join(f"M0 {y:.1f}H{WIDTH}" for _, y in at)
    left = "".join(f'<span style="top:{y / HEIGHT:.1%}">{escape(text(tick))}</span>' for tick, y in at)
    wide = 100 / max(len(labels), 1)
    max_labels = LONG_LABELS if any(len(label) > LONG for label in labels) else LABELS
    every = ceil(len(labels) / max_labels) or 1
    below = "".join(
        f'<span style="left:{(step + 0.5) * wide:.2f}%">{escape(labels[step])}</span>'
        for step in range(every // 2, len(labels), every)
    )
    legend = "".join(
        f'<span><i style="background:{_colour(number)}"></i>{escape(each.name)}</span>'
        for number, each in enumerate(series)
    )
    return Markup(
        f'<div class="legend">{legend if len(series) > 1 else ""}</div><div class="plot"><div class="left">{left}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="grid" d="{grid}"/>{"".join(drawn)}{_hover(labels, series, text)}</svg>'
        f'<div class="below">{below}</div></div>'
    )


def _hover(labels: Sequence[str], series: Sequence[Series], text: Format) -> str:
    if len(labels) > HOVERED:
        return ""
    wide = WIDTH / max(len(labels), 1)
    shown = []
    for step, label in enumerate(labels):
        values = [f"{each.name} {text(value)}" for each in series if (value := each.values[step]) is not None]
        title = escape("\n".join([label, *values]))
        shown.append(f'<rect x="{step * wide:.1f}" width="{wide:.1f}" height="{HEIGHT}"><title>{title}</title></rect>')
    return "".join(shown)


def _colour(number: int) -> str:
    return f"var(--c{number % COLOURS})"
