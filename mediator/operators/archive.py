"""What may be asked over the control socket about the outbox: to let go of what the archive has (S6)."""

from typing import Any

from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.housekeeping.archived import REMOVED_AT_ONCE, remove_slowly
from mediator.mailboxes.ports import Copy
from mediator.operators.control import ControlServer
from mediator.operators.requests import Request


class ArchiveOperating:
    """The command ``archive-remove``."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def register(self, control: ControlServer) -> None:
        """Answer from now on."""
        control.register("archive-remove", self._remove)

    async def _remove(self, request: Request) -> dict[str, Any]:
        return {"removed": await remove_slowly(self._broker, _copies(request.get("copies")))}


def _copies(value: object) -> list[Copy]:
    """``copies``: lists of what names a copy, in the order of :class:`Copy`."""
    if not isinstance(value, list) or not all(_is_copy(each) for each in value):
        raise BadRequestError("copies", f"expected lists of whole numbers: {', '.join(Copy._fields)}")
    if len(value) > REMOVED_AT_ONCE:
        raise BadRequestError("copies", f"expected at most {REMOVED_AT_ONCE}, got {len(value)}")
    return [Copy(*each) for each in value]


def _is_copy(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(Copy._fields)
        and all(type(number) is int and 0 <= number < 2**63 for number in value)
    )
