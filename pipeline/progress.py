"""How a long job reports its progress."""

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with the step ("segments"), how many units of it are done and how many there are (None: unknown).

It is called often, on the thread that does the work, so it must return at once.
"""


def no_progress(step: str, done: int, of: int | None) -> None:
    """Report nothing."""
