"""What may be asked over the control socket about the outbox: to let go of what the archive has (S6)."""

from typing import Any

from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.housekeeping.archived import REMOVED_AT_ONCE, Range, remove_slowly
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
        return {"removed": await remove_slowly(self._broker, _ranges(request.get("ranges")))}


def _ranges(value: object) -> list[Range]:
    if not isinstance(value, list) or not all(_is_range(each) for each in value):
        raise BadRequestError("ranges", "expected pairs of whole numbers, the lower one first")
    count = sum(last - first + 1 for first, last in value)
    if count > REMOVED_AT_ONCE:
        raise BadRequestError("ranges", f"expected at most {REMOVED_AT_ONCE} numbers, got {count}")
    return [(first, last) for first, last in value]


def _is_range(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(number) is int for number in value)
        and 0 <= value[0] <= value[1] < 2**63
    )
