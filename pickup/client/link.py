"""What a client knows of its mediator after they have met."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from mediator.mediation.records import Generation
from pickup.client.errors import ClientError
from pickup.client.plain import Json


@dataclass(frozen=True, slots=True)
class Link:
    """A mediator, and who we are to it."""

    generation: Generation
    mine: str
    """v1: our canonical key; v2: our DID."""
    theirs: str
    """v1: the mediator's canonical key; v2: its DID."""
    endpoints: tuple[str, ...]
    """URLs of the mediator, in its order of preference."""
    invitation: str | None = None
    """Id of the invitation we came by."""
    endpoint: str | None = None
    """v1: where senders find us, once mediation is granted."""
    routing: tuple[str, ...] = ()
    """v1: canonical keys, v2: DIDs of mediators in front of us, once mediation is granted."""

    def url(self, *schemes: str) -> str:
        """Return the first endpoint of such a scheme."""
        for endpoint in self.endpoints:
            if endpoint.partition("://")[0] in schemes:
                return endpoint
        raise ClientError(f"the mediator names no endpoint with {' or '.join(schemes)}: {', '.join(self.endpoints)}")

    def granted(self, endpoint: str | None, routing: Sequence[str]) -> "Link":
        """Return the link with what a grant says."""
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
