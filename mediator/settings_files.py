"""Fits the connections that the settings ask for into the files that the system lets this process open."""

from typing import Any, Final

import structlog

from mediator import descriptors
from mediator.http.connections import RESERVE
from mediator.settings import Settings

GATEWAY: Final = "gateway.max_connections"
HTTP: Final = "http_max_connections"
SOCKETS: Final = "didcomm.max_sockets"

log = structlog.get_logger("service")


def fit_service(settings: Settings) -> Settings:
    """Return the settings with as many connections at each door as there are files for."""
    wanted = {HTTP: settings.http_max_connections + RESERVE}
    if settings.gateway.enabled and (settings.nats_url is None or settings.gateway.listen is not None):
        wanted[GATEWAY] = 2 * settings.gateway.max_connections
    if settings.didcomm.enabled:
        wanted[SOCKETS] = settings.didcomm.max_sockets
    return _fit(settings, wanted)


def fit_gateway(settings: Settings) -> Settings:
    """Do the same for a gateway that is a process of its own."""
    return _fit(settings, {GATEWAY: 2 * settings.gateway.max_connections})


def _fit(settings: Settings, wanted: dict[str, int]) -> Settings:
    given = descriptors.budget(wanted)
    allowed = {
        HTTP: max(1, given.get(HTTP, 0) - RESERVE),
        GATEWAY: max(1, given.get(GATEWAY, 0) // 2),
        SOCKETS: given.get(SOCKETS, 0),
    }
    changed: dict[str, Any] = {}
    for name, files in given.items():
        if files == wanted[name]:
            continue
        section, _, option = name.rpartition(".")
        model = getattr(settings, section) if section else settings
        # Falling short of a default that nobody chose is no reason to warn.
        say = log.warning if option in model.model_fields_set else log.info
        say("fewer open files allowed than wanted", option=name, wanted=getattr(model, option), allowed=allowed[name])
        if section:
            changed[section] = model.model_copy(update={option: allowed[name]})
        else:
            changed[option] = allowed[name]
    return settings.model_copy(update=changed)
