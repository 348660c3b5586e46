"""Reading of fields that peers write: strict and bounded, and each error names its field (D12)."""

from collections.abc import Mapping
from typing import Any

from mediator.errors import BadRequestError
from mediator.mediation.names import MAX_NAME

MAX_ITEMS = 1000
"""Items of one list, messages of one delivery."""


def text(body: Mapping[str, Any], name: str, longest: int = MAX_NAME) -> str:
    """Return text that must be there, and not be empty."""
    value = optional_text(body, name, longest)
    if not value:
        raise BadRequestError(name, f"expected text of 1 to {longest} characters")
    return value


def optional_text(body: Mapping[str, Any], name: str, longest: int = MAX_NAME) -> str | None:
    """Return text, or None when the field is absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > longest:
        raise BadRequestError(name, f"expected text of at most {longest} characters")
    return value


def flag(body: Mapping[str, Any], name: str, absent: bool | None = None) -> bool:
    """Return true or false; ``absent`` stands for a field that is not there, None: it must be."""
    value = body.get(name)
    if value is None:
        value = absent
    if not isinstance(value, bool):
        raise BadRequestError(name, "expected true or false")
    return value


def count(body: Mapping[str, Any], name: str) -> int:
    """Return a number of items from 1 on that must be there; one above :data:`MAX_ITEMS` is clamped (D2)."""
    value = body.get(name)
    if type(value) is not int or value < 1:
        raise BadRequestError(name, "expected a whole number from 1 on")
    return min(value, MAX_ITEMS)


def items(body: Mapping[str, Any], name: str, most: int = MAX_ITEMS) -> list[Any]:
    """Return a list that must be there."""
    value = body.get(name)
    if not isinstance(value, list) or len(value) > most:
        raise BadRequestError(name, f"expected a list of at most {most}")
    return value


def texts(body: Mapping[str, Any], name: str, most: int = MAX_ITEMS) -> list[str]:
    """Return a list of texts that must be there."""
    value = items(body, name, most)
    if not all(isinstance(item, str) and len(item) <= MAX_NAME for item in value):
        raise BadRequestError(name, f"expected texts of at most {MAX_NAME} characters")
    return value
