"""Reads the fields of JSON objects: right type, within bounds, and errors that name the field (N3, N4, D12).

:class:`Fields` is lenient about what clients write for absent fields, :class:`StrictFields` is not.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from mediator.errors import BadRequestError

MAX_BODY = 1024 * 1024
MAX_NUMBER = 2**63 - 1
MAX_TEXT = 8192
"""Characters of a text in a DIDComm message, unless stated otherwise."""
MAX_ITEMS = 1000
"""Items of one list in a DIDComm message."""
MILLISECONDS_FROM = 10**11
"""Seconds above this are milliseconds given by mistake (N5)."""


def parse_body(data: bytes) -> "Fields":
    """Read a body: a JSON object, or nothing at all, which is an empty one (N4)."""
    if len(data) > MAX_BODY:
        raise BadRequestError("body", f"expected at most {MAX_BODY} bytes, got {len(data)}")
    if not data or data == b'""':
        return Fields({})
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequestError("body", f"expected JSON, {error}") from error
    if body is None:
        return Fields({})
    if not isinstance(body, dict):
        raise BadRequestError("body", f"expected a JSON object, got {_kind(body)}")
    return Fields(body)


class Fields:
    """The fields of one JSON object; ``path`` stands before their names in errors."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def has(self, name: str) -> bool:
        """Whether the field is given, whatever its value."""
        return name in self._values

    @property
    def values(self) -> Mapping[str, Any]:
        """What was given, as it is."""
        return self._values

    def path(self, name: str) -> str:
        """Return what an error calls the field."""
        return self._path + name

    def read(self, table: "FieldTable") -> dict[str, Any]:
        """Read all fields that a table declares; None stands for those that are absent."""
        given: dict[str, Any] = dict.fromkeys(table)
        for name, value in self._values.items():
            if value is not None and value != "" and name in table:
                given[name] = table[name](self, name)
        return given

    def _get(self, name: str) -> Any:
        value = self._values.get(name)
        return None if value == "" else value

    def _wrong(self, name: str, expected: str, value: Any) -> BadRequestError:
        return BadRequestError(self.path(name), f"expected {expected}, got {_show(value)}")

    def text(self, name: str, max_length: int, *, lines: bool = False) -> str | None:
        """Return a string of at most ``max_length`` characters, no control characters but new lines if ``lines``."""
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        if len(value) > max_length:
            raise BadRequestError(self.path(name), f"expected at most {max_length} characters, got {len(value)}")
        if not value.isprintable() and has_controls(value.translate(_LINES) if lines else value):
            raise BadRequestError(self.path(name), "expected no control characters")
        return value

    def prose(self, name: str, max_length: int) -> str | None:
        """Return what a person wrote, any characters, cut to the first ``max_length``; white space alone is absent."""
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value.strip()[:max_length] or None

    def words(self, name: str, max_count: int, max_length: int) -> tuple[str, ...] | None:
        """Return a list of words, given as a list or as one string with commas."""
        value = self._get(name)
        if value is None:
            return None
        return parse_words(value, self.path(name), max_count, max_length)

    def flag(self, name: str) -> bool | None:
        """Return true or false."""
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, bool):
            return value
        raise self._wrong(name, "true or false", value)

    def number(self, name: str, lowest: int, highest: int | None, *, zero_is_absent: bool = False) -> int | None:
        """Return a whole number; one above ``highest`` is clamped, without ``highest`` refused above 2^63 - 1 (N4)."""
        value = self._get(name)
        if value is None:
            return None
        number = value if type(value) is int else whole_number(value, clamped=highest is not None)
        if number is None:
            raise self._wrong(name, "a whole number", value)
        if zero_is_absent and number == 0:
            return None
        if number < lowest or (highest is None and number > MAX_NUMBER):
            raise self._wrong(name, f"{lowest} to {MAX_NUMBER if highest is None else highest}", value)
        return number if highest is None else min(number, highest)

    def fraction(self, name: str) -> float | None:
        """Return a number from 0 to 1; one above is clamped (N4)."""
        value = self._get(name)
        if value is None:
            return None
        number = decimal_number(value)
        if number is None or number < 0:
            raise self._wrong(name, "a number from 0 to 1", value)
        return min(number, 1.0)

    def numbers(self, name: str, max_count: int) -> list[int] | None:
        """Return a list of whole numbers from 0."""
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self._wrong(name, "a list of whole numbers", value)
        if len(value) > max_count:
            raise BadRequestError(self.path(name), f"expected at most {max_count}, got {len(value)}")
        numbers = []
        for item in value:
            number = whole_number(item)
            if number is None or not 0 <= number <= MAX_NUMBER:
                raise self._wrong(name, f"whole numbers from 0 to {MAX_NUMBER}", item)
            numbers.append(number)
        return numbers

    def time(self, name: str) -> int | None:
        """Return Unix seconds as milliseconds; 0 is absent (N4, N5)."""
        seconds = self.number(name, 0, None, zero_is_absent=True)
        return None if seconds is None else milliseconds(seconds, self.path(name))

    def fields(self, name: str) -> "Fields":
        """Return the fields of an object inside."""
        value = self._get(name)
        if value is None:
            return Fields({}, f"{self._path}{name}.")
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(value, f"{self._path}{name}.")

    def choice(self, name: str, words: tuple[str, ...]) -> str | None:
        """Return one of a few words."""
        value = self._get(name)
        if value is None:
            return None
        if value not in words:
            raise self._wrong(name, " or ".join(words), value)
        return str(value)

    def choices(self, name: str, words: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return some of a few words, given as a list or as one string with commas."""
        chosen = self.words(name, len(words), max(map(len, words)))
        for word in chosen or ():
            if word not in words:
                raise self._wrong(name, " or ".join(words), word)
        return chosen


FieldTable = Mapping[str, Callable[[Fields, str], Any]]
"""The fields of an object, each with what reads it by its name."""


class StrictFields:
    """The fields of a DIDComm message: only null and missing ones are absent, and most must be there (D12)."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def text(self, name: str, max_length: int = MAX_TEXT) -> str:
        """Return text that must be there, and not be empty."""
        value = self._values.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= max_length:
            raise BadRequestError(name, f"expected text of 1 to {max_length} characters")
        return value

    def optional_texts(self, max_lengths: Mapping[str, int]) -> dict[str, str | None]:
        """Return the texts of fields by name, each of so many characters at most; None for those that are absent."""
        texts: dict[str, str | None] = {}
        for name, max_length in max_lengths.items():
            value = self._values.get(name)
            if value is not None and (not isinstance(value, str) or len(value) > max_length):
                raise BadRequestError(name, f"expected text of at most {max_length} characters")
            texts[name] = value
        return texts

    def flag(self, name: str, absent: bool | None = None) -> bool:
        """Return true or false, also of text; ``absent`` stands for a field that is absent, None: it must be there."""
        value = self._values.get(name)
        value = absent if value is None else value
        if isinstance(value, str):
            value = _FLAGS.get(value)
        if not isinstance(value, bool):
            raise BadRequestError(name, "expected true or false")
        return value

    def count(self, name: str) -> int:
        """Return a number from 1 on that must be there; one above :data:`MAX_ITEMS` is clamped (D2)."""
        number = whole_number(self._values.get(name), clamped=True)
        if number is None or number < 1:
            raise BadRequestError(name, "expected a whole number from 1 on")
        return min(number, MAX_ITEMS)

    def items(self, name: str, max_count: int = MAX_ITEMS) -> list[Any]:
        """Return a list that must be there."""
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) > max_count:
            raise BadRequestError(name, f"expected a list of at most {max_count}")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts that must be there."""
        value = self.items(name)
        if not all(isinstance(item, str) and len(item) <= MAX_TEXT for item in value):
            raise BadRequestError(name, f"expected texts of at most {MAX_TEXT} characters")
        return value


def whole_number(value: object, *, clamped: bool = False) -> int | None:
    """Return a whole number, also of a whole float and of text (10, 10.0, "10", "10.0"); None for all else (N4).

    Floats from 2^53 on may not be the number that was written, so they count only where it is ``clamped``.
    """
    if isinstance(value, str):
        written = _WHOLE.fullmatch(value)
        return None if written is None else int(written[1])
    if isinstance(value, float):
        return int(value) if value.is_integer() and (clamped or abs(value) < 2**53) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def decimal_number(value: object) -> float | None:
    """Return a number, also of text; None for anything else (N4)."""
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        return float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def milliseconds(seconds: int, field: str) -> int:
    """Turn a time in Unix seconds into milliseconds; what cannot be seconds is refused (N5)."""
    if seconds > MILLISECONDS_FROM:
        raise BadRequestError(field, f"expected Unix seconds, got {seconds}, which looks like milliseconds")
    return seconds * 1000


def parse_words(value: Any, field: str, max_count: int, max_length: int) -> tuple[str, ...]:
    """Read words from a list or from one string with commas; each once, in their order."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise BadRequestError(field, f"expected a list of strings, got {_show(value)}")
    words = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if len(words) > max_count:
        raise BadRequestError(field, f"expected at most {max_count}, got {len(words)}")
    for word in words:
        if len(word) > max_length:
            raise BadRequestError(field, f"expected at most {max_length} characters each, got {len(word)}")
        if "," in word or has_controls(word):
            raise BadRequestError(field, "expected no commas or control characters inside")
    return words


def is_deep(value: Mapping[str, Any], levels: int) -> bool:
    """Whether a JSON object has more than so many levels of objects and lists inside each other, itself one."""
    level: list[Any] = [value]
    for _ in range(levels):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def has_controls(text: str) -> bool:
    """Whether a text has control characters, or halves of characters that no UTF-8 has."""
    if text.isascii():
        return not text.isprintable()
    return any(char < " " or "\x7f" <= char < "\xa0" or "\ud800" <= char <= "\udfff" for char in text)


def printable(text: str) -> str:
    """Show what a client wrote, or its beginning, in an error."""
    return "".join(char if char.isprintable() else "?" for char in text[:60])


_LINES = str.maketrans("\n\r\t", "   ")
_FLAGS = {"true": True, "false": False}
_WHOLE = re.compile(r"(-?[0-9]{1,30})(\.0{1,9})?")
_DECIMAL = re.compile(r"-?[0-9]{1,30}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?")


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}.get(
        type(value), "something else"
    )


def _show(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return printable(orjson.dumps(value).decode())
