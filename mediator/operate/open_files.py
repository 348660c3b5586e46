"""Lowers the configured numbers of connections to the files that this process may open."""

from typing import Any, Final

import structlog

from mediator.http.connections import RESERVE
from mediator.settings.settings import Settings
from mediator.system.limits import budget_files

GATEWAY: Final = "gateway.max_connections"
HTTP: Final = "http_max_connections"

log = structlog.get_logger("service")


def fit_service(settings: Settings) -> Settings:
    """Return the settings with each door's connections limited by the available files."""
    wanted = {HTTP: settings.http_max_connections + RESERVE}
    if settings.gateway.enabled and (settings.nats_url is None or settings.gateway.listen is not None):
        wanted[GATEWAY] = 2 * settings.gateway.max_connections
    for part, options in settings.part_sections.items():
        wanted |= {f"{part}.{option}": files for option, files in options.open_files.items()}
    given = budget_files(wanted)
    allowed = {
        **given,
        HTTP: max(1, given.get(HTTP, 0) - RESERVE),
        GATEWAY: max(1, given.get(GATEWAY, 0) // 2),
    }
    changed: dict[str, Any] = {}
    for name, files in given.items():
        if files == wanted[name]:
            continue
        section, _, option = name.rpartition(".")
        model = getattr(settings, section) if section else settings
        # Falling short of a default is no reason to warn.
        say = log.warning if option in model.model_fields_set else log.info
        say("fewer open files allowed than wanted", option=name, wanted=getattr(model, option), allowed=allowed[name])
        if section:
            changed[section] = model.model_copy(update={option: allowed[name]})
        else:
            changed[option] = allowed[name]
    return settings.model_copy(update=changed)
