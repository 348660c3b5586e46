"""How a long piece of work tells how far it has come, to whoever wants to hear it."""

from collections.abc import Callable

Told = Callable[[str, int, int | None], None]
"""Called with the step in a word or two ("segments"), how much of it is done, and how much there is; None: unknown.

It is called often and from the thread that does the work, so it returns at once. A new step follows the one before it.
"""


def to_nobody(step: str, done: int, of: int | None) -> None:
    """Tell nobody."""
