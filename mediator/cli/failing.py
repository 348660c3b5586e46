"""How a command says that it failed: its text goes to standard error, and the exit code is 1."""


class CommandError(Exception):
    """What a command was to do was not done; the text is for the person who gave it."""
