"""Opens what serves subscriptions: the pushes, and the gateway in front of the NATS server."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mediator.broker import Broker
from mediator.config.sections import PushSettings
from mediator.config.settings import Settings
from mediator.http.health import Health
from mediator.mailboxes.bounds import DAY
from mediator.nats.connection import NatsConnection, Upstreams
from mediator.nats.subjects import OPEN, BroadcastSubject, MailboxSubject, PublicListSubject, Subject
from mediator.nats.verbs import ImmediateVerb, Verb
from mediator.ops.control import ControlServer
from mediator.ops.metrics import Metrics
from mediator.push import broadcast_verb
from mediator.push.broadcast_hub import BroadcastHub
from mediator.push.broadcast_verb import BroadcastVerb
from mediator.push.broadcasts import BroadcastSource
from mediator.push.gateway.opening import run_gateway
from mediator.push.push_writer import PushWriter
from mediator.push.sources import MailboxSource, PublicListSource, StoredMailSource
from mediator.push.subscriber import InFlightCounter
from mediator.push.subscriptions import SubscriptionServer


async def open_subscriptions(
    connection: NatsConnection, broker: Broker, metrics: Metrics, settings: PushSettings
) -> SubscriptionServer:
    """Serve subscriptions."""
    writer, in_flight = PushWriter(connection), InFlightCounter(metrics.pushed.inc)
    common = broker, writer, in_flight, settings.keep_days * DAY
    sources: dict[type[Subject], StoredMailSource] = {
        MailboxSubject: MailboxSource(*common),
        PublicListSubject: PublicListSource(*common),
        BroadcastSubject: BroadcastSource(*common, BroadcastHub(connection, writer, metrics.broadcasts_lost.inc)),
    }
    for source in sources.values():
        source.start()
    server = SubscriptionServer(connection, writer, sources, settings, in_flight)
    await server.open()
    metrics.push_subscriptions.set_function(lambda: server.count)
    metrics.push_waiting.set_function(lambda: in_flight.waiting)
    return server


def push_verbs(
    connection: NatsConnection, broker: Broker, server: SubscriptionServer
) -> dict[str, Verb | ImmediateVerb]:
    """Return OPEN and BROADCAST, for the door."""
    return {
        OPEN: ImmediateVerb("OPEN", server.take_open),
        broadcast_verb.PREFIX: BroadcastVerb(broker, connection).verb,
    }


@asynccontextmanager
async def open_push(
    settings: Settings, connection: NatsConnection, broker: Broker, metrics: Metrics
) -> AsyncIterator[dict[str, Verb | ImmediateVerb]]:
    """Serve subscriptions to stored mail inside this block; yields its verbs, for the door."""
    server = await open_subscriptions(connection, broker, metrics, settings.push)
    try:
        yield push_verbs(connection, broker, server)
    finally:
        await server.close(settings.drain_seconds)


@asynccontextmanager
async def open_gateway(
    settings: Settings, upstreams: Upstreams, metrics: Metrics, control: ControlServer, health: Health
) -> AsyncIterator[str]:
    """Run the gateway, if it is enabled, and let one that runs by itself log in; yields where clients connect."""

    async def get_login(_request: dict[str, Any]) -> dict[str, Any]:
        key = base64.b64encode(upstreams.control_key or b"").decode()
        login = {"user": upstreams.user, "password": upstreams.password, "control_key": key}
        return {"urls": list(upstreams.urls), **login}

    control.add_command("gateway-login", get_login)
    managed = settings.nats_url is None
    listen = settings.nats if managed else settings.gateway.listen
    if listen is None or not settings.gateway.enabled:
        yield upstreams.urls[0] if managed else "an external server"
        return
    name = f"mediator {settings.instance} gateway"
    async with run_gateway(upstreams, listen, settings.gateway, name, metrics.control_refused) as gateway:
        metrics.gateway_connections.set_function(lambda: gateway.connections)
        metrics.gateway_subscriptions.set_function(lambda: gateway.subscriptions)
        metrics.gateway_waiting.set_function(lambda: gateway.waiting)
        health.add("gateway", gateway.check)
        yield gateway.url
