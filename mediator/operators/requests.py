"""Reading of what is asked over the control socket.

Whoever may open the socket owns the data, so this guards against mistakes only. All raise :class:`BadRequestError`
that names the field.
"""

from typing import Any

from mediator.errors import BadRequestError

Request = dict[str, Any]


def text(request: Request, name: str) -> str:
    """Return text; empty when it is not there."""
    value = request.get(name, "")
    if not isinstance(value, str):
        raise BadRequestError(name, "expected text")
    return value


def number(request: Request, name: str, lowest: int, highest: int) -> int:
    """Return a whole number that must be there."""
    value = request.get(name)
    if type(value) is not int or not lowest <= value <= highest:
        raise BadRequestError(name, f"expected {lowest} to {highest}")
    return value


def optional_number(request: Request, name: str, lowest: int, highest: int) -> int | None:
    """Return a whole number, or None when it is not there or null."""
    return None if request.get(name) is None else number(request, name, lowest, highest)
