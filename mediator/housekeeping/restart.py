"""What is done once, before a service that starts serves anybody."""

from functools import partial

import structlog

from mediator.broker import Broker
from mediator.mailboxes import restarting
from mediator.store.base import Transaction

SLICE = 1000

_log = structlog.get_logger("restart")


async def forget_volatile(broker: Broker, instance: str) -> int:
    """Remove all that was to last until this start of the instance, and return how many messages it was (E5)."""
    total = 0
    while gone := await broker.write(partial(_slice, instance), when_full=True):
        total += gone
    if total:
        _log.info("removed what was to last until this start", messages=total)
    return total


def _slice(instance: str, tx: Transaction, now: int) -> int:
    return restarting.forget_volatile(tx, instance, now, SLICE)
