"""What every claim gets to work with, and the rows it gives back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``met`` is None where nothing is claimed and the figure only stands beside the others."""

    claim: str
    ours: str
    peer: str = "-"
    ratio: str = "-"
    limit: str = "-"
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """One run: how long it may take, where its files go, and how it says what it is doing."""

    quick: bool
    folder: Path
    """On the disk that is measured; emptied by whoever made it."""
    say: Callable[[str], None]

    @property
    def rounds(self) -> int:
        """Ours and peer take turns this many times; medians are shown."""
        return 3 if self.quick else 5

    @property
    def seconds(self) -> float:
        """Length of one measurement."""
        return 1.0 if self.quick else 3.0


def at_least(claim: str, unit: str, ours: list[float], peer: list[float], factor: float) -> Row:
    """Compare medians; ours must be ``factor`` times the peer's or more."""
    return _versus(claim, unit, ours, peer, f"≥ {factor:g}×", lambda ratio: ratio >= factor)


def at_most(claim: str, unit: str, ours: list[float], peer: list[float], factor: float) -> Row:
    """Compare medians; ours must be ``factor`` times the peer's or less."""
    return _versus(claim, unit, ours, peer, f"≤ {factor:g}×", lambda ratio: ratio <= factor)


def _versus(
    claim: str, unit: str, ours: list[float], peer: list[float], limit: str, holds: Callable[[float], bool]
) -> Row:
    ratio = median(ours) / median(peer)
    return Row(claim, number(median(ours), unit), number(median(peer), unit), f"{ratio:.2f}×", limit, holds(ratio))


def beside(claim: str, unit: str, ours: list[float], peer: list[float]) -> Row:
    """Compare medians where nothing is claimed."""
    ratio = median(ours) / median(peer)
    return Row(claim, number(median(ours), unit), number(median(peer), unit), f"{ratio:.2f}×")


def below(claim: str, unit: str, ours: list[float], limit: float) -> Row:
    """Compare a median with a limit it must not pass."""
    return Row(claim, number(median(ours), unit), limit=f"≤ {number(limit, unit)}", met=median(ours) <= limit)


def above(claim: str, unit: str, ours: list[float], limit: float) -> Row:
    """Compare a median with a limit it must reach."""
    return Row(claim, number(median(ours), unit), limit=f"≥ {number(limit, unit)}", met=median(ours) >= limit)


def number(value: float, unit: str) -> str:
    """Write a figure with three digits that mean something."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}".replace(",", " ")
