"""The office: what every protocol handler may use, put together once for the door."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mediator.broker import Broker
from mediator.mediation.records import Rules
from pickup.dids.document import Resolver
from pickup.envelope import Envelopes

if TYPE_CHECKING:
    from pickup.dids.identities import Identities
    from pickup.dispatch import Dispatcher
    from pickup.meters import Meters
    from pickup.sessions import Sessions


@dataclass(slots=True)
class Office:
    """The parts of the DIDComm door."""

    broker: Broker
    rules: Rules
    resolver: Resolver
    envelopes: Envelopes
    identities: "Identities"
    sessions: "Sessions"
    meters: "Meters"
    public_url: str
    """Where wallets reach this door over HTTP; the same with ws for WebSocket."""
    label: str
    max_envelope: int
    """Bytes of the largest envelope that the transports take."""
    dispatcher: "Dispatcher"
