"""The subscriptions that this instance serves: opened, confirmed and ended as gateways ask (E6, E7).

A gateway whose heartbeats stop is dead, and its subscriptions end. A gateway that lives learns from the heartbeats of
the instance which subscriptions the instance does not serve any more, and opens them again.
"""

import asyncio
import base64
import re
import secrets
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from mediator.config.sections import PushSettings
from mediator.errors import BadRequestError, BusyError, MediatorError, QuotaExceededError, UnavailableError
from mediator.mailboxes.lanes import parse_lane
from mediator.nats import control_messages, subjects
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection
from mediator.nats.editions import python_client
from mediator.nats.subjects import RefusedSubject
from mediator.push import protocol
from mediator.push.protocol import Heartbeat, OpenReply
from mediator.push.push_writer import PushWriter
from mediator.push.sources import StoredMailSource
from mediator.push.subscriber import InFlightCounter, ServedSubscription, SubscriptionRequest, log_failure

LOST = "lost"
"""How a subscription ended that this instance does not know."""
MAX_TASKS = 10_000
"""Subscriptions that are being opened at the same time."""
CONFIRM_SECONDS = 1.0
"""How long :meth:`SubscriptionServer.close` waits for clients to confirm what was pushed to them."""
_SECRET = re.compile(r"[a-z2-7]{26,32}")

log = structlog.get_logger("push")


@dataclass(eq=False, slots=True)
class _OpenSubscription:
    """A subscription and the gateway that opened it; not yet served while its source prepares it."""

    gateway: str
    tenant: str
    served: ServedSubscription | None = None
    closed: str = ""


class SubscriptionServer:
    """Talks to the gateways. Made and used on the event loop."""

    def __init__(
        self,
        connection: NatsConnection,
        writer: PushWriter,
        sources: Mapping[type[subjects.Subject], StoredMailSource],
        settings: PushSettings,
        in_flight: InFlightCounter,
    ) -> None:
        """``sources`` serve subscriptions by the kind of their subject; other kinds are refused."""
        self.instance = base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]
        """The name of this instance for gateways; a new one after each start, which knows nothing of the past."""
        self._connection = connection
        self._writer = writer
        self._sources = sources
        self._settings = settings
        self._in_flight = in_flight
        self._entries: dict[str, _OpenSubscription] = {}
        """By token."""
        self._of_tenant: Counter[str] = Counter()
        self._heard: dict[str, float] = {}
        """When the last message of each gateway came."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._leaving = False

    @property
    def count(self) -> int:
        """How many subscriptions are open."""
        return len(self._entries)

    async def open(self) -> None:
        """Start listening to gateways."""
        await self._connection.subscribe_control(control_messages.PUSH + self.instance, "", self._take_heartbeat)
        self._connection.on_reconnect(self._reconnected)
        self._reaper = asyncio.create_task(log_failure(self._reap()), name="push-reaper")

    async def close(self, seconds: float) -> None:
        """Send gateways to other instances, once clients have confirmed what they got, or a moment has passed."""
        self._leaving = True
        if self._reaper is not None:
            self._reaper.cancel()
        for source in self._sources.values():
            source.pause()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._in_flight.idle(), min(seconds, CONFIRM_SECONDS))
        gateways = list(self._heard)
        for gateway in gateways:
            self._end_all(gateway, "drained")
        for source in self._sources.values():
            await source.close(seconds)
        await self._say_goodbye(gateways)

    # Opening.

    def take_open(self, tenant: str, _tail: str, request: Request, _started: float) -> None:
        """Take an OPEN; the gateway gets the reply as a control message.

        Raises :class:`MediatorError` for a malformed request, or if it cannot be served now: the gateway asks again.
        """
        asked = protocol.read_open(request.data)
        gateway, token = asked.gateway, asked.token
        for name, value in (("gateway", gateway), ("token", token)):
            if not _SECRET.fullmatch(value):
                raise BadRequestError(name, "expected 26 characters of lowercase base32")
        after = {parse_lane(word, "after"): msg_id for word, msg_id in asked.after.items()}
        if self._leaving or len(self._tasks) >= MAX_TASKS:
            raise BusyError("too many subscriptions are being opened")
        self._heard[gateway] = time.monotonic()
        entry = self._entries.get(token)
        if entry is not None:
            if entry.served is not None and (entry.gateway, entry.tenant) == (gateway, tenant):
                self._soon(self._send(gateway, OpenReply(token, self.instance)))
            return
        subject = subjects.classify(asked.subject)
        source = self._sources.get(type(subject))
        if source is None:
            text = subject.text if isinstance(subject, RefusedSubject) else subjects.violation(asked.subject)
            self._soon(self._send(gateway, OpenReply(token, self.instance, text)))
            return
        # Where tenants are accounts, their pushes go through the server's import.
        account, _ = subjects.split_request(request.subject)
        root = subjects.PUSH if account is None else f"mq9out.{account}."
        opening = SubscriptionRequest(
            tenant, f"{root}{token}.", subject, asked.queue, python_client.speaks(request), after
        )
        entry = self._entries[token] = _OpenSubscription(gateway, tenant)
        self._of_tenant[tenant] += 1
        self._soon(self._serve(entry, token, source, opening))

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(log_failure(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, entry: _OpenSubscription, token: str, source: StoredMailSource, opening: SubscriptionRequest
    ) -> None:
        try:
            self._check_limits(entry.tenant)
            served = await source.open(opening)
        except UnavailableError as error:
            # No reply is sent, so that the gateway asks again.
            log.warning("subscription not opened", error=str(error))
            self._forget(token, entry)
            return
        except MediatorError as error:
            self._forget(token, entry)
            await self._send(entry.gateway, OpenReply(token, self.instance, str(error)))
            return
        except Exception:
            self._forget(token, entry)
            raise
        if not entry.closed:
            await self._send(entry.gateway, OpenReply(token, self.instance))
        entry.served = served
        if entry.closed:
            served.close(entry.closed)
        else:
            served.start()

    def _check_limits(self, tenant: str) -> None:
        if len(self._entries) > self._settings.max_subscriptions:
            raise BusyError(f"{self._settings.max_subscriptions} subscriptions are open")
        use, most = self._of_tenant[tenant] - 1, self._settings.tenant_subscriptions
        if use >= most:
            raise QuotaExceededError("subscriptions of the tenant", most, use)

    async def _send(self, gateway: str, message: OpenReply | Heartbeat) -> None:
        await self._writer.send_control(control_messages.GATEWAY + gateway, protocol.encode(message))

    # Heartbeats.

    def _take_heartbeat(self, request: Request) -> None:
        try:
            heartbeat = protocol.read_heartbeat(request.data)
        except BadRequestError as error:
            log.warning("invalid gateway heartbeat", error=str(error))
            return
        gateway = heartbeat.sender
        if not _SECRET.fullmatch(gateway):
            return
        # It may have been considered dead, and lost all its subscriptions here.
        known = gateway in self._heard
        self._heard[gateway] = time.monotonic()
        lost: dict[str, str] = {}
        for token, total in heartbeat.credits.items():
            entry = self._entries.get(token)
            if entry is None or entry.gateway != gateway:
                lost[token] = LOST
            elif entry.served is not None:
                entry.served.confirm(total)
        for token, how in heartbeat.closed.items():
            if (entry := self._entries.get(token)) is not None and entry.gateway == gateway:
                self._end(token, entry, how)
            lost.pop(token, None)
        if heartbeat.leaving:
            self._end_all(gateway)
        elif not self._leaving:
            self._soon(self._send(gateway, Heartbeat(self.instance, closed=lost, leaving=not known)))

    def _end(self, token: str, entry: _OpenSubscription, how: str) -> None:
        self._forget(token, entry)
        entry.closed = how
        if entry.served is not None:
            entry.served.close(how)

    def _forget(self, token: str, entry: _OpenSubscription) -> None:
        if self._entries.get(token) is entry:
            del self._entries[token]
            self._of_tenant[entry.tenant] -= 1
            if not self._of_tenant[entry.tenant]:
                del self._of_tenant[entry.tenant]

    def _end_all(self, gateway: str, how: str = "broken") -> None:
        """End all subscriptions of a gateway."""
        self._heard.pop(gateway, None)
        for token, entry in list(self._entries.items()):
            if entry.gateway == gateway:
                self._end(token, entry, how)

    async def _reap(self) -> None:
        """End the subscriptions of dead gateways."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(protocol.BEAT_SECONDS)
            now = time.monotonic()
            if not self._connection.connected or now - checked_at > 2 * protocol.BEAT_SECONDS:
                # This instance could not hear anybody.
                self._heard = dict.fromkeys(self._heard, now)
            checked_at = now
            for gateway in [each for each, at in self._heard.items() if now - at > protocol.DEAD_SECONDS]:
                if any(entry.gateway == gateway for entry in self._entries.values()):
                    log.warning("gateway is dead")
                self._end_all(gateway)

    def _reconnected(self) -> None:
        """Have everything opened again: nobody knows whether the last pushes arrived."""
        gateways = list(self._heard)
        for gateway in gateways:
            self._end_all(gateway, "drained")
        self._soon(self._say_goodbye(gateways))

    async def _say_goodbye(self, gateways: Iterable[str]) -> None:
        for gateway in gateways:
            await self._send(gateway, Heartbeat(self.instance, leaving=True))
