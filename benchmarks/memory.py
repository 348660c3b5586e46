"""Memory of the service's processes over time, and whether it grows."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.servers import ENCODER
from mediator.system.usage import children, resident_mb

PIPELINE = b"pipeline"
"""Found in the command line of what the service runs of the pipeline; Spark's memory is not the service's."""
MAX_MB = 20.0
MAX_SHARE = 0.05
"""Memory is flat if it grows by at most so many MB an hour, or by this share of its mean."""
WARM_UP = 0.5
"""Of the time. Caches with a limit fill: vectors of requests, pages of the database, marks of wallets' envelopes."""
ENOUGH_SECONDS = 1200.0
"""A line over less than this says nothing about an hour."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A line through the samples of one process."""

    mean: float
    """MB, after the warm-up."""
    last: float
    per_hour: float
    flat: bool | None
    """None: the time was too short to tell."""


class MemorySamples:
    """Resident memory in MB by name of the process, and when it was looked at."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def look(self, pid: int) -> bool:
        """Add a sample of the service and of its children; return whether a pipeline of the service runs."""
        now = self._clock()
        found: defaultdict[str, float] = defaultdict(float, {"service": resident_mb(pid)})
        piping = self._add_children(pid, found)
        for name, megabytes in found.items():
            self._seen[name].append((now, megabytes))
        return piping

    def _add_children(self, pid: int, found: defaultdict[str, float]) -> bool:
        piping = False
        # A process may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in children(pid):
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                if PIPELINE in command:
                    piping = True
                    continue
                found[_name(command)] += resident_mb(child)
                piping |= self._add_children(child, found)
        return piping

    def growth(self) -> Mapping[str, Growth]:
        """Fit a line to the samples of each process."""
        return {name: fit(samples) for name, samples in self._seen.items()}


def fit(samples: Sequence[tuple[float, float]]) -> Growth:
    """Fit a line by least squares to samples of (seconds, MB), without those of the warm-up."""
    times, megabytes = np.array(samples).T
    settled = times >= times[0] + WARM_UP * (times[-1] - times[0])
    span, mean = float(np.ptp(times[settled])), float(megabytes[settled].mean())
    per_hour = float(np.polyfit(times[settled] / 3600, megabytes[settled], 1)[0]) if span else 0.0
    flat = per_hour <= max(MAX_MB, MAX_SHARE * mean) if span >= ENOUGH_SECONDS else None
    return Growth(mean, float(megabytes[-1]), per_hour, flat)


def _name(command: bytes) -> str:
    return "model" if ENCODER in command else "nats-server" if b"nats-server" in command else "others"
