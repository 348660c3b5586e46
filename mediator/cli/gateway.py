"""The command gateway: the gateway as a process of its own, on another core than the service."""

import asyncio
import base64
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from mediator.cli.options import Config, DataDir, load
from mediator.errors import MediatorError, SetupError, UnavailableError

if TYPE_CHECKING:
    from mediator.endpoint import Endpoint
    from mediator.gateway.gateway import Gateway
    from mediator.gateway.opening import Behind
    from mediator.settings import Settings

LOOK_SECONDS = 1.0
"""Between two looks whether NATS is there, and, while it is not, whether the service logs in otherwise."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: mediator gateway --listen 0.0.0.0:4222")(gateway)


def gateway(
    config: Config = None,
    data_dir: DataDir = None,
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
    settings = load(config, data_dir=data_dir, nats_url=nats_url, log_level=log_level, gateway=chosen)
    if settings.gateway.listen is None:
        raise SetupError("gateway.listen: expected HOST:PORT; give it with --listen")
    import uvloop

    from mediator import logs

    logs.setup(settings.log_level, settings.log_format)
    uvloop.run(_run(settings, settings.gateway.listen))


async def _run(settings: "Settings", listen: "Endpoint") -> None:
    import structlog

    from mediator.gateway.opening import gateway_before
    from mediator.gateway_options import gateway_options
    from mediator.settings_files import fit_gateway

    settings = fit_gateway(settings)
    log = structlog.get_logger("gateway")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    behind = await _behind(settings)
    while not stop.is_set():
        try:
            async with gateway_before(behind, gateway_options(settings, listen), "mediator gateway") as running:
                log.info("ready", nats=running.url)
                behind = await _until_it_changes(settings, behind, running, stop)
        except SetupError as error:
            log.warning("not connected", problem=str(error))
            behind = await _until_it_changes(settings, behind, None, stop)
    log.info("stopped")


async def _behind(settings: "Settings") -> "Behind":
    """Say what is behind the gateway, and how the service logs in there; raises MediatorError when nobody says it."""
    from mediator.gateway.opening import Behind
    from mediator.operators.control import ask

    key = None if settings.control_key is None else base64.b64decode(settings.control_key.get_secret_value())
    urls = None if settings.nats_url is None else settings.nats_url.get_secret_value().split(",")
    if urls is not None and key is not None:
        return Behind(urls, control_key=key)
    try:
        answer = await ask(settings.data_dir, "gateway-login")
    except (SetupError, UnavailableError) as error:
        if urls is None:
            raise
        raise SetupError(
            "control_key: expected the key that the services have set as well, or a running service on "
            f"{settings.data_dir} to ask for it ({error})"
        ) from error
    if answer["error"]:
        # It has only begun to start.
        raise UnavailableError(answer["error"])
    key = key or base64.b64decode(answer["control_key"])
    return Behind(urls, control_key=key) if urls else Behind(answer["urls"], answer["user"], answer["password"], key)


async def _until_it_changes(
    settings: "Settings", behind: "Behind", running: "Gateway | None", stop: asyncio.Event
) -> "Behind":
    """Wait for the end, or until a service that was started again has made itself a new login; return the login."""
    while not stop.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await stop.wait()
        if running is not None and await running.check() is None:
            continue
        with suppress(MediatorError):
            if (found := await _behind(settings)) != behind or running is None:
                return found
    return behind
