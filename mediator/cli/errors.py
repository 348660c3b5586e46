"""How a command says that it failed: its text goes to standard error, and the exit code is 1."""

from typing import Any


class CommandError(Exception):
    """What a command was to do was not done; the text is for the person who gave it."""

    def __init__(self, text: str, /, **fields: Any) -> None:
        """``fields`` are what ``--json`` shows beside ``error``."""
        super().__init__(text)
        self.fields = fields
