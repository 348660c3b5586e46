"""What a benchmark is given, the rows it returns, and helpers to take turns and to compare medians."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

T = TypeVar("T")

UNSTEADY = 0.30
"""A row whose rounds differ by more says so."""
KILLS = 3


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One line of the table; ``met`` is None if no limit is claimed."""

    claim: str
    ours: str
    peer: str = "-"
    ratio: str = "-"
    limit: str = "-"
    met: bool | None = None
    spread: float | None = None
    """Largest minus smallest of the rounds, divided by their median; of the ratio where there is one."""
    headline: bool = False
    """The row is one to look at first."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings of one run: how long it may take, where its files go, and how to report progress."""

    quick: bool
    folder: Path
    """On the disk that is measured; the caller deletes it."""
    status: Callable[[str], None]
    """Shows what is being done, in place of what was."""
    tell: Callable[[str], None]
    """Shows a line that stays."""
    minutes: float | None = None
    """How long `mixed` takes, where that was asked for."""
    kills: int = KILLS
    """How often `kill` kills the service."""

    @property
    def rounds(self) -> int:
        """How many times the service and its peer take turns; even, so that each goes first equally often."""
        return 4 if self.quick else 6

    @property
    def long_rounds(self) -> int:
        """The same where a round takes half a minute."""
        return 2 if self.quick else 4

    @property
    def seconds(self) -> float:
        """Length of one measurement, in seconds."""
        return 1.0 if self.quick else 3.0

    def in_turn(
        self, what: str, sides: Mapping[str, Callable[[int], T]], rounds: int | None = None
    ) -> dict[str, list[T]]:
        """Measure each side once a round, every other round in reverse order; return the results by side."""
        seen: dict[str, list[T]] = {name: [] for name in sides}
        rounds = rounds or self.rounds
        for turn in range(rounds):
            for name in list(sides)[:: -1 if turn % 2 else 1]:
                self.status(f"{what}: {name}, round {turn + 1} of {rounds}")
                seen[name].append(sides[name](turn))
        return seen


def headline(row: ResultRow) -> ResultRow:
    """Mark a row to look at first."""
    return replace(row, headline=True)


def at_least(claim: str, unit: str, ours: Sequence[float], peer: Sequence[float], factor: float) -> ResultRow:
    """Compare medians: ours must be at least ``factor`` times the peer's."""
    return _versus(claim, unit, ours, peer, f"≥ {factor:g}×", lambda ratio: ratio >= factor)


def at_most(claim: str, unit: str, ours: Sequence[float], peer: Sequence[float], factor: float) -> ResultRow:
    """Compare medians: ours must be at most ``factor`` times the peer's."""
    return _versus(claim, unit, ours, peer, f"≤ {factor:g}×", lambda ratio: ratio <= factor)


def _versus(
    claim: str,
    unit: str,
    ours: Sequence[float],
    peer: Sequence[float],
    limit: str,
    holds: Callable[[float], bool],
) -> ResultRow:
    compared = beside(claim, unit, ours, peer)
    return replace(compared, limit=limit, met=holds(median(ours) / median(peer)))


def beside(claim: str, unit: str, ours: Sequence[float], peer: Sequence[float]) -> ResultRow:
    """Compare medians without a limit."""
    ratio = f"{median(ours) / median(peer):.2f}×"
    paired = ours
    if len(ours) == len(peer) and all(peer):
        paired = [one / other for one, other in zip(ours, peer, strict=True)]
    return ResultRow(claim, number(median(ours), unit), number(median(peer), unit), ratio, spread=spread(paired))


def below(claim: str, unit: str, ours: Sequence[float], limit: float) -> ResultRow:
    """Compare a median with an upper limit."""
    return replace(figure(claim, unit, ours), limit=f"≤ {number(limit, unit)}", met=median(ours) <= limit)


def above(claim: str, unit: str, ours: Sequence[float], limit: float) -> ResultRow:
    """Compare a median with a lower limit."""
    return replace(figure(claim, unit, ours), limit=f"≥ {number(limit, unit)}", met=median(ours) >= limit)


def figure(claim: str, unit: str, ours: Sequence[float]) -> ResultRow:
    """Show a median without a peer or a limit."""
    return ResultRow(claim, number(median(ours), unit), spread=spread(ours))


def spread(values: Sequence[float]) -> float | None:
    """Return how far rounds lie apart, as a share of their median; None for a single one."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 and median(values) else None


def number(value: float, unit: str) -> str:
    """Format a figure with three significant digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{spaced(value, digits)} {unit}"


def spaced(value: float, digits: int = 0) -> str:
    """Format a number with a space between thousands."""
    return f"{value:,.{digits}f}".replace(",", " ")
