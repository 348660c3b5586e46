"""The empty message (DIDComm v2.1 §The Empty Message): carries headers alone, such as ``ack`` or ``from_prior``."""

from pickup.dispatcher import EMPTY, Dispatcher
from pickup.protocols.handshake import nothing
from pickup.rules.records import Generation


def register(dispatcher: Dispatcher) -> None:
    """Register the handler."""
    dispatcher.register(EMPTY, {(1, 0)}, {EMPTY: nothing}, generations={Generation.V2}, anonymous=True)
