"""Measures how long the disk takes to make a write durable; all durable rates depend on it."""

import os
import time
from pathlib import Path
from statistics import median


def fsync_ms(folder: Path, times: int = 200) -> float:
    """Return the median of appending 4 kB with fsync, in milliseconds."""
    path = folder / "fsync"
    spent = []
    with path.open("wb", buffering=0) as file:
        for _ in range(times):
            file.write(bytes(4096))
            started = time.perf_counter()
            os.fsync(file.fileno())
            spent.append(time.perf_counter() - started)
    path.unlink()
    return median(spent) * 1000
