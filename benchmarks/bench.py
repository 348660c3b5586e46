"""What a benchmark is given, the rows it returns, and helpers to compare medians."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One line of the table; ``met`` is None if no limit is claimed."""

    claim: str
    ours: str
    peer: str = "-"
    ratio: str = "-"
    limit: str = "-"
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings of one run: how long it may take, where its files go, and how to report progress."""

    quick: bool
    folder: Path
    """On the disk that is measured; the caller deletes it."""
    status: Callable[[str], None]

    @property
    def rounds(self) -> int:
        """How many times the service and its peer take turns; medians are reported."""
        return 3 if self.quick else 5

    @property
    def seconds(self) -> float:
        """Length of one measurement, in seconds."""
        return 1.0 if self.quick else 3.0


def at_least(claim: str, unit: str, ours: list[float], peer: list[float], factor: float) -> ResultRow:
    """Compare medians: ours must be at least ``factor`` times the peer's."""
    return _versus(claim, unit, ours, peer, f"≥ {factor:g}×", lambda ratio: ratio >= factor)


def at_most(claim: str, unit: str, ours: list[float], peer: list[float], factor: float) -> ResultRow:
    """Compare medians: ours must be at most ``factor`` times the peer's."""
    return _versus(claim, unit, ours, peer, f"≤ {factor:g}×", lambda ratio: ratio <= factor)


def _versus(
    claim: str, unit: str, ours: list[float], peer: list[float], limit: str, holds: Callable[[float], bool]
) -> ResultRow:
    ratio = median(ours) / median(peer)
    return ResultRow(
        claim, number(median(ours), unit), number(median(peer), unit), f"{ratio:.2f}×", limit, holds(ratio)
    )


def beside(claim: str, unit: str, ours: list[float], peer: list[float]) -> ResultRow:
    """Compare medians without a limit."""
    ratio = median(ours) / median(peer)
    return ResultRow(claim, number(median(ours), unit), number(median(peer), unit), f"{ratio:.2f}×")


def below(claim: str, unit: str, ours: list[float], limit: float) -> ResultRow:
    """Compare a median with an upper limit."""
    return ResultRow(claim, number(median(ours), unit), limit=f"≤ {number(limit, unit)}", met=median(ours) <= limit)


def above(claim: str, unit: str, ours: list[float], limit: float) -> ResultRow:
    """Compare a median with a lower limit."""
    return ResultRow(claim, number(median(ours), unit), limit=f"≥ {number(limit, unit)}", met=median(ours) >= limit)


def number(value: float, unit: str) -> str:
    """Format a figure with three significant digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}".replace(",", " ")
