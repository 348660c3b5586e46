"""The subscriptions that this instance serves: opened, confirmed and ended as gateways say (E6, E7).

Whoever is not heard of is dead: a gateway whose signs fail takes its subscriptions with it, and one that lives learns
from the answer to its signs what is not served here any more, and opens it anew.
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

from mediator.errors import BadRequestError, BusyError, MediatorError, QuotaExceededError, UnavailableError
from mediator.mailboxes.lanes import parse_lane
from mediator.nats import control, pushwire, stored
from mediator.nats.client import Request
from mediator.nats.connection import Connection
from mediator.nats.editions import python_client
from mediator.nats.push.outlet import Outlet
from mediator.nats.push.subscription import Asked, Served, Source, Tally, guarded
from mediator.nats.pushwire import Opened, Signs

LOST = "lost"
"""How a subscription ended that this instance does not know."""
MAX_TASKS = 10_000
"""Subscriptions that are being opened at the same time."""
CONFIRM_SECONDS = 1.0
"""How long the end waits for clients to confirm what they were pushed."""
_SECRET = re.compile(r"[a-z2-7]{26,32}")

log = structlog.get_logger("push")


@dataclass(eq=False, slots=True)
class _Owned:
    """A subscription by whom it was opened; not yet served while its source makes it ready."""

    gateway: str
    tenant: str
    served: Served | None = None
    closed: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many subscriptions there may be."""

    instance: int
    tenant: int


class Pushes:
    """Speaks with the gateways. Made and used on the event loop."""

    def __init__(
        self,
        connection: Connection,
        outlet: Outlet,
        sources: Mapping[type[stored.Subject], Source],
        limits: Limits,
        tally: Tally,
    ) -> None:
        """``sources`` serve subscriptions by the kind of their subject; other kinds are refused."""
        self.instance = base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]
        """Who this is for gateways; another one after each start, which knows nothing of what was before."""
        self._connection = connection
        self._outlet = outlet
        self._sources = sources
        self._limits = limits
        self._tally = tally
        self._owned: dict[str, _Owned] = {}
        self._of_tenant: Counter[str] = Counter()
        self._heard: dict[str, float] = {}
        """When each gateway was heard of last."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._leaving = False

    @property
    def count(self) -> int:
        """How many subscriptions are open."""
        return len(self._owned)

    async def open(self) -> None:
        """Begin to listen to gateways."""
        await self._connection.subscribe_control(control.PUSH + self.instance, "", self._signed)
        self._connection.after_loss(self._lost)
        self._reaper = asyncio.create_task(guarded(self._reap()), name="push-reaper")

    async def close(self, seconds: float) -> None:
        """Let gateways go elsewhere, when what their clients had is settled as far as a moment's wait can do it."""
        self._leaving = True
        if self._reaper is not None:
            self._reaper.cancel()
        for source in self._sources.values():
            source.pause()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._tally.idle(), min(seconds, CONFIRM_SECONDS))
        gateways = list(self._heard)
        for gateway in gateways:
            self._bury(gateway, "drained")
        for source in self._sources.values():
            await source.close(seconds)
        await self._say_goodbye(gateways)

    # Opening.

    def ask(self, account: str | None, tenant: str, request: Request) -> None:
        """Take an OPEN; the gateway learns on a subject of its own what became of it.

        ``account``: whose pushes go through the server's import; None where there is only one. Raises
        :class:`MediatorError` for what is no OPEN, or cannot be served now: the gateway asks again.
        """
        asked = pushwire.read_open(request.data)
        for name, value in (("gateway", asked.gateway), ("token", asked.token)):
            if not _SECRET.fullmatch(value):
                raise BadRequestError(name, "expected 26 characters of lowercase base32")
        after = {parse_lane(word, "after"): msg_id for word, msg_id in asked.after.items()}
        if self._leaving or len(self._tasks) >= MAX_TASKS:
            raise BusyError("too many subscriptions are being opened")
        self._heard[asked.gateway] = time.monotonic()
        owned = self._owned.get(asked.token)
        if owned is not None:
            if owned.served is not None and (owned.gateway, owned.tenant) == (asked.gateway, tenant):
                self._soon(self._answer(asked.gateway, Opened(asked.token, self.instance)))
            return
        subject = stored.classify(asked.subject)
        source = self._sources.get(type(subject))
        if source is None:
            text = subject.text if isinstance(subject, stored.Refused) else stored.violation(asked.subject)
            self._soon(self._answer(asked.gateway, Opened(asked.token, self.instance, text)))
            return
        root = f"mq9out.{account}." if account is not None else pushwire.PRIVATE
        to = f"{root}{asked.token}."
        wanted = Asked(tenant, to, subject, asked.queue, python_client.speaks(request), after)
        owned = self._owned[asked.token] = _Owned(asked.gateway, tenant)
        self._of_tenant[tenant] += 1
        self._soon(self._serve(owned, asked.token, source, wanted))

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, owned: _Owned, token: str, source: Source, wanted: Asked) -> None:
        try:
            self._admit(owned.tenant)
            served = await source.open(wanted)
        except UnavailableError as error:
            # Nothing is answered, so that the gateway asks again.
            log.warning("not opened", error=str(error))
            self._forget(token, owned)
            return
        except MediatorError as error:
            self._forget(token, owned)
            await self._answer(owned.gateway, Opened(token, self.instance, str(error)))
            return
        except Exception:
            self._forget(token, owned)
            raise
        if not owned.closed:
            await self._answer(owned.gateway, Opened(token, self.instance))
        owned.served = served
        if owned.closed:
            served.close(owned.closed)
        else:
            served.start()

    def _admit(self, tenant: str) -> None:
        if len(self._owned) > self._limits.instance:
            raise BusyError(f"{self._limits.instance} subscriptions are open")
        use = self._of_tenant[tenant] - 1
        if use >= self._limits.tenant:
            raise QuotaExceededError("subscriptions of the tenant", self._limits.tenant, use)

    async def _answer(self, gateway: str, told: Opened | Signs) -> None:
        await self._outlet.tell(control.GATEWAY + gateway, pushwire.pack(told))

    # What gateways tell.

    def _signed(self, message: Request) -> None:
        try:
            signs = pushwire.read_signs(message.data)
        except BadRequestError as error:
            log.warning("signs of a gateway", error=str(error))
            return
        if not _SECRET.fullmatch(signs.sender):
            return
        # It may have been taken for dead, with all it had here.
        known = signs.sender in self._heard
        self._heard[signs.sender] = time.monotonic()
        lost: dict[str, str] = {}
        for token, total in signs.credits.items():
            owned = self._owned.get(token)
            if owned is None or owned.gateway != signs.sender:
                lost[token] = LOST
            elif owned.served is not None:
                owned.served.confirm(total)
        for token, how in signs.closed.items():
            if (owned := self._owned.get(token)) is not None and owned.gateway == signs.sender:
                self._end(token, owned, how)
            lost.pop(token, None)
        if signs.leaving:
            self._bury(signs.sender)
        elif not self._leaving:
            self._soon(self._answer(signs.sender, Signs(self.instance, closed=lost, leaving=not known)))

    def _end(self, token: str, owned: _Owned, how: str) -> None:
        self._forget(token, owned)
        owned.closed = how
        if owned.served is not None:
            owned.served.close(how)

    def _forget(self, token: str, owned: _Owned) -> None:
        if self._owned.get(token) is owned:
            del self._owned[token]
            self._of_tenant[owned.tenant] -= 1
            if not self._of_tenant[owned.tenant]:
                del self._of_tenant[owned.tenant]

    def _bury(self, gateway: str, how: str = "broken") -> None:
        """End all that a gateway had."""
        self._heard.pop(gateway, None)
        for token, owned in list(self._owned.items()):
            if owned.gateway == gateway:
                self._end(token, owned, how)

    async def _reap(self) -> None:
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(pushwire.BEAT_SECONDS)
            now = time.monotonic()
            if not self._connection.connected or now - looked_at > 2 * pushwire.BEAT_SECONDS:
                # It was this instance that heard nobody.
                self._heard = dict.fromkeys(self._heard, now)
            looked_at = now
            for gateway in [each for each, at in self._heard.items() if now - at > pushwire.DEAD_SECONDS]:
                if any(owned.gateway == gateway for owned in self._owned.values()):
                    log.warning("a gateway is dead")
                self._bury(gateway)

    def _lost(self) -> None:
        """Let everything be opened anew: of what was pushed last, nobody knows whether it arrived."""
        gateways = list(self._heard)
        for gateway in gateways:
            self._bury(gateway, "drained")
        self._soon(self._say_goodbye(gateways))

    async def _say_goodbye(self, gateways: Iterable[str]) -> None:
        for gateway in gateways:
            await self._answer(gateway, Signs(self.instance, leaving=True))
