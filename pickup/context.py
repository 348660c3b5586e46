"""What every protocol handler may use, put together once when the door opens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pickup.broker import MediationBroker
from pickup.dids.document import DidResolver
from pickup.envelope import Envelopes

if TYPE_CHECKING:
    from pickup.dids.identities import OwnIdentities
    from pickup.dispatcher import Dispatcher
    from pickup.live_sessions import LiveSessions
    from pickup.metrics import DidcommMetrics


@dataclass(slots=True)
class DidcommContext:
    """The services of the DIDComm door."""

    mediation: MediationBroker
    resolver: DidResolver
    envelopes: Envelopes
    identities: "OwnIdentities"
    sessions: "LiveSessions"
    metrics: "DidcommMetrics"
    public_url: str
    """URL of this door over HTTP; with ws in place of http for WebSocket."""
    max_envelope: int
    """Bytes of the largest envelope that is accepted."""
    dispatcher: "Dispatcher"
