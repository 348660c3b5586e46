"""Removes archived messages from the outbox (S6): in the service in small transactions, for commands wherever it is."""

import time
from collections.abc import Sequence
from typing import Any

from mediator.broker import Broker
from mediator.cleanup.collector import AdaptiveLimit
from mediator.errors import BadRequestError
from mediator.mailboxes.message import OutboxKey
from mediator.operate.operations import ANY, COUNT, Answer, OperationRequest, Right, many, object_schema, operation
from mediator.operate.store_access import ask_or_use_store
from mediator.settings.settings import Settings
from mediator.store.base import Store, Transaction

MAX_COPIES = 750
"""Copies in one request: it is answered in time, and fits into a line of the socket."""
SLICE_SECONDS = 0.0015
"""Target duration of a transaction until it is on disk; senders wait that long behind it."""


class ArchiveOperations:
    """The operation ``archive-remove``."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @operation(
        "archive-remove",
        Right.ADMIN,
        "Remove archived messages from the outbox",
        object_schema(removed=COUNT),
        fields={"copies": many(ANY)},
        method="POST",
        audited=False,
    )
    async def _remove(self, request: OperationRequest) -> dict[str, Any]:
        """Remove copies while senders leave time for it; return how many were there."""
        copies = _read_copies(request.get("copies"))
        size = AdaptiveLimit(SLICE_SECONDS)
        removed = 0
        while copies:
            part, copies = copies[: size.limit], copies[size.limit :]

            def work(tx: Transaction, _now: int, part: Sequence[OutboxKey] = part) -> tuple[int, float]:
                begun = time.perf_counter()
                return tx.outbox.remove(part), begun

            count, begun = await self._broker.write_background(work, even_when_full=True)
            size.took(len(part), time.perf_counter() - begun)
            removed += count
        return {"removed": removed}


def _read_copies(value: object) -> list[OutboxKey]:
    """Read ``copies``: a list for each copy, in the order of the fields of :class:`OutboxKey`."""
    if not isinstance(value, list) or not all(_is_copy(each) for each in value):
        raise BadRequestError("copies", f"expected lists of whole numbers: {', '.join(OutboxKey._fields)}")
    if len(value) > MAX_COPIES:
        raise BadRequestError("copies", f"expected at most {MAX_COPIES}, got {len(value)}")
    return [OutboxKey(*each) for each in value]


def _is_copy(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(OutboxKey._fields)
        and all(type(number) is int and 0 <= number < 2**63 for number in value)
    )


class OutboxClient:
    """The outbox of one installation, for commands; raises as :func:`mediator.operate.store_access.ask_or_do`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def remove(self, copies: Sequence[OutboxKey]) -> int:
        """Remove copies, and return how many were there."""
        return sum(self._remove(copies[start : start + MAX_COPIES]) for start in range(0, len(copies), MAX_COPIES))

    def _remove(self, copies: Sequence[OutboxKey]) -> int:
        def work(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"removed": tx.outbox.remove(copies)}

        fields = {"copies": [list(copy) for copy in copies]}
        return int(ask_or_use_store(self._settings, "archive-remove", fields, work)["removed"])
