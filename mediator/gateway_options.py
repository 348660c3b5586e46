"""What a gateway needs of the settings; apart from the service, so that a gateway of its own loads nothing of that."""

from mediator.endpoint import Endpoint
from mediator.gateway.gateway import Options
from mediator.settings import Settings


def gateway_options(settings: Settings, listen: Endpoint) -> Options:
    """Return what can be chosen for a gateway that listens there."""
    chosen = settings.gateway
    return Options(
        listen.host, listen.port, chosen.max_connections, chosen.max_subscriptions, chosen.tls_cert, chosen.tls_key
    )
