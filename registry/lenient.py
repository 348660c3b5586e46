"""Reads values of any type and size: what is unsuitable is left out, what is too much cut, and both are noted."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_WARNINGS = 20

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROLS_IN_LINES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class Reader:
    """Reads the fields of one object of a document; ``path`` stands before their names in warnings."""

    def __init__(self, values: Mapping[str, Any], warnings: list[str], path: str = "") -> None:
        """``warnings`` gets the first :data:`MAX_WARNINGS` of what had to be left out in the whole document."""
        self.values = values
        self._warnings = warnings
        self._path = path

    def within(self, values: Mapping[str, Any], path: str) -> "Reader":
        """Return a reader of an object inside, which stands at ``path``."""
        return Reader(values, self._warnings, f"{self._path}{path}.")

    def warn(self, path: str, problem: str) -> None:
        """Note what is wrong with a value."""
        if len(self._warnings) < MAX_WARNINGS:
            self._warnings.append(f"{self._path}{path}: {problem}")

    def text(self, name: str, longest: int, *, lines: bool = False) -> str:
        """Return the text of a field, at most ``longest`` characters; "" when it has none.

        Control characters become spaces, new lines too unless ``lines``.
        """
        value = self.values.get(name)
        return "" if value is None else self.clean(value, name, longest, lines=lines)

    def clean(self, value: Any, path: str, longest: int, *, lines: bool = False) -> str:
        """Return a value that stands at ``path`` as :meth:`text` does."""
        if not isinstance(value, str):
            self.warn(path, "expected a string")
            return ""
        text = value
        if len(text) > longest:
            self.warn(path, f"only the first {longest} characters are read")
            text = text[:longest]
        if text.isprintable():
            return text
        return (_CONTROLS_IN_LINES if lines else _CONTROLS).sub(" ", text)

    def words(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """Return the words of a list, or of one string with commas, each once."""
        value = self.values.get(name)
        if isinstance(value, str):
            value = value.split(",")
        read = (self.clean(item, f"{name}[{no}]", longest).strip() for no, item in self.items(value, name, most))
        return tuple(dict.fromkeys(text for text in read if text))

    def items(self, value: Any, path: str, most: int) -> Iterator[tuple[int, Any]]:
        """Go through the first ``most`` items of a list, numbered; nothing is like an empty list."""
        if not isinstance(value, list):
            if value is not None and value != "":
                self.warn(path, "expected a list")
            return
        if len(value) > most:
            self.warn(path, f"only the first {most} of {len(value)} are read")
        yield from enumerate(value[:most])
