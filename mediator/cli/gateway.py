"""The command gateway: the gateway as a separate process, on another core than the service."""

import asyncio
import base64
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from mediator.cli.options import CommandGroup, SettingsOptions
from mediator.errors import MediatorError, SetupError, UnavailableError

if TYPE_CHECKING:
    from mediator.config.settings import Settings
    from mediator.endpoint import Endpoint
    from mediator.nats.connection import Upstreams
    from mediator.push.gateway.gateway import Gateway

LOOK_SECONDS = 1.0
"""Between two checks whether NATS is connected, and, while it is not, whether the service's login has changed."""


app = CommandGroup()


@app.command(epilog="Example: mediator gateway --listen 0.0.0.0:4222")
def gateway(
    options: SettingsOptions,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where clients connect.", show_default="gateway.listen")
    ] = None,
    nats_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The NATS server or cluster behind it, with the service's own login. Without it, the one that the "
            "service on this data directory runs.",
        ),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C, beside a service with gateway.enabled off."""
    chosen: dict[str, object] = {"enabled": False}
    if listen is not None:
        chosen["listen"] = listen
    settings = options.load(nats_url=nats_url, log_level=log_level, gateway=chosen)
    if settings.gateway.listen is None:
        raise SetupError("gateway.listen: expected HOST:PORT; give it with --listen")
    import uvloop

    from mediator.ops import logs

    logs.setup(settings.log_level, settings.log_format)
    uvloop.run(_run(settings, settings.gateway.listen))


async def _run(settings: "Settings", listen: "Endpoint") -> None:
    import structlog

    from mediator.ops.open_files import fit_gateway
    from mediator.push.gateway.opening import run_gateway

    settings = fit_gateway(settings)
    log = structlog.get_logger("gateway")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    upstreams = await _find_upstreams(settings)
    while not stop.is_set():
        try:
            async with run_gateway(upstreams, listen, settings.gateway, "mediator gateway") as running:
                log.info("ready", nats=running.url)
                upstreams = await _until_it_changes(settings, upstreams, running, stop)
        except SetupError as error:
            log.warning("not connected", problem=str(error))
            upstreams = await _until_it_changes(settings, upstreams, None, stop)
    log.info("stopped")


async def _find_upstreams(settings: "Settings") -> "Upstreams":
    """Find the servers and the login of the service; raises MediatorError if neither settings nor service tell."""
    from mediator.nats.connection import Upstreams
    from mediator.ops.control import send_command

    key = None if settings.control_key is None else base64.b64decode(settings.control_key.get_secret_value())
    urls = None if settings.nats_url is None else settings.nats_url.get_secret_value().split(",")
    if urls is not None and key is not None:
        return Upstreams(urls, control_key=key)
    try:
        answer = await send_command(settings.data_dir, "gateway-login")
    except (SetupError, UnavailableError) as error:
        if urls is None:
            raise
        raise SetupError(
            "control_key: expected the key that the services have set as well, or a running service on "
            f"{settings.data_dir} to ask for it ({error})"
        ) from error
    if answer["error"]:
        # The service is still starting.
        raise UnavailableError(answer["error"])
    key = key or base64.b64decode(answer["control_key"])
    return (
        Upstreams(urls, control_key=key) if urls else Upstreams(answer["urls"], answer["user"], answer["password"], key)
    )


async def _until_it_changes(
    settings: "Settings", upstreams: "Upstreams", running: "Gateway | None", stop: asyncio.Event
) -> "Upstreams":
    """Wait for the end, or until a restarted service has a new login; return the login."""
    while not stop.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await stop.wait()
        if running is not None and await running.check() is None:
            continue
        with suppress(MediatorError):
            if (found := await _find_upstreams(settings)) != upstreams or running is None:
                return found
    return upstreams
