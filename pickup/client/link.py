"""What a client stores about its mediator."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pickup.client.errors import ClientError
from pickup.client.plaintext import Json
from pickup.rules.records import Generation


@dataclass(frozen=True, slots=True)
class Link:
    """A mediator, and our identity towards it."""

    generation: Generation
    mine: str
    """v1: our canonical key; v2: our DID."""
    theirs: str
    """v1: the mediator's canonical key; v2: its DID."""
    endpoints: tuple[str, ...]
    """URLs of the mediator, in its order of preference."""
    invitation: str | None = None
    """Id of our invitation."""
    endpoint: str | None = None
    """v1: the URL for our senders, once mediation is granted."""
    routing: tuple[str, ...] = ()
    """v1: canonical keys, v2: DIDs of mediators in front of us, once mediation is granted."""

    def url(self, *schemes: str) -> str:
        """Return the first endpoint with one of these schemes.

        A mediator whose DID names no WebSocket has it at its HTTP URL: not every reader takes a second service.
        """
        sockets = [f"ws{endpoint.removeprefix('http')}" for endpoint in self.endpoints if endpoint.startswith("http")]
        for endpoint in (*self.endpoints, *sockets):
            if endpoint.partition("://")[0] in schemes:
                return endpoint
        raise ClientError(f"the mediator names no endpoint with {' or '.join(schemes)}: {', '.join(self.endpoints)}")

    def granted(self, endpoint: str | None, routing: Sequence[str]) -> "Link":
        """Return the link with a grant."""
        return replace(self, endpoint=endpoint, routing=tuple(routing))

    def written(self) -> Json:
        """Return it as JSON for a wallet's file."""
        return asdict(self)

    @classmethod
    def read(cls, kept: Json) -> "Link":
        """Read what :meth:`written` wrote."""
        fields = {**kept, "generation": Generation(kept["generation"])}
        fields |= {name: tuple(kept[name]) for name in ("endpoints", "routing")}
        return cls(**fields)
