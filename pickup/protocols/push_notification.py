"""Push notifications: registers phones by FCM (RFC 0734) and APNs (RFC 0699), and calls a webhook when mail waits.

The body of a call names the connection, the device and how many messages wait; never mail, keys or DIDs.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import orjson
import structlog
from prometheus_client import CollectorRegistry, Counter

from mediator.errors import BadRequestError, MediatorError, NotEnrolledError
from mediator.http.guard import Guard
from mediator.mailboxes.events import EventType
from mediator.store.writer import Committed
from pickup.broker import MediationBroker
from pickup.dispatcher import Dispatcher, InboundRequest, no_reply
from pickup.message import ReplyMessage
from pickup.rules.listing import DeviceQueue
from pickup.rules.records import Generation, PushDevice

FCM = "push-notifications-fcm"
APNS = "push-notifications-apns"
APNS_PLATFORM = "apns"
"""The platform of an APNs device, since RFC 0699 names none."""
MAX_TOKEN = 4096
MAX_PLATFORM = 64
_TOKEN, _PLATFORM = "device_token", "device_platform"


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers."""
    handlers = {"set-device-info": set_device, "get-device-info": get_device, "problem-report": no_reply}
    for family in (FCM, APNS):
        generations = {Generation.V1, Generation.V2}
        dispatcher.register(family, {(1, 0)}, handlers, generations=generations, once={"set-device-info"})


async def set_device(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Store the caller's device, or forget it when both values are null (§set-device-info)."""
    connection = request.connected()
    device = _device(request)
    if not request.repeated:
        request.connection = await request.mediation.set_push_device(connection, device)
    # It can come at more than one step, so it says of which message it is (DIDComm v2.1 §ACKs).
    return [replace(request.reply("ack", {"status": "OK"}), ack=[request.message.id])]


async def get_device(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Return the caller's device (§get-device-info); :class:`NotEnrolledError` when there is none."""
    device = request.connected().device
    by_apns = request.message.type.family == APNS
    if device is None or by_apns != (device.platform == APNS_PLATFORM):
        raise NotEnrolledError("not registered for push notifications")
    body = {_TOKEN: device.token} if by_apns else {_TOKEN: device.token, _PLATFORM: device.platform}
    return [request.reply("device-info", body)]


def _device(request: InboundRequest) -> PushDevice | None:
    token = _value(request, _TOKEN, MAX_TOKEN)
    if request.message.type.family == APNS:
        return None if token is None else PushDevice(token, APNS_PLATFORM)
    platform = _value(request, _PLATFORM, MAX_PLATFORM)
    if token is None and platform is None:
        return None
    if token is None or platform is None:
        raise BadRequestError(_TOKEN if token is None else _PLATFORM, "missing-value, expected both values or neither")
    if platform == APNS_PLATFORM:
        raise BadRequestError(_PLATFORM, f"expected a platform of FCM; {APNS} is the protocol for this one")
    return PushDevice(token, platform)


def _value(request: InboundRequest, name: str, longest: int) -> str | None:
    value = request.message.body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise BadRequestError(name, f"expected null, or text of at most {longest} characters")
    return value


EVERY_SECONDS = 30.0
"""A holder is notified at most once in this time."""
GRACE_SECONDS = 1.0
"""Mail that is fetched within this time causes no notification: the phone is awake."""
MAX_DUE = 100_000
"""Mailboxes that may wait to be checked; beyond that, mail causes no notification."""
MAX_CALLS = 8
"""Concurrent calls of the webhook."""
BATCH = 100
"""Mailboxes checked in one read."""
CALL_SECONDS = 10.0
GONE = 410
"""The webhook's answer for a device that its push service does not know any more."""
RETRY_SECONDS = (1.0, 5.0)
"""Waits before the second and the third attempt, which is the last."""

_ARRIVED = frozenset({EventType.STORED, EventType.RELEASED})

log = structlog.get_logger("didcomm.push_notifier")


class PushNotifier:
    """Watches commits for new mail, and calls the webhook."""

    def __init__(
        self,
        mediation: MediationBroker,
        guard: Guard,
        webhook: str,
        awake: Callable[[int], bool],
        registry: CollectorRegistry,
        *,
        every: float = EVERY_SECONDS,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """``awake`` says whether a connection number has a live session; spans are in seconds."""
        self._mediation = mediation
        self._guard = guard
        self._webhook = webhook
        self._awake = awake
        self._every = every
        self._grace = grace
        self._due: list[tuple[float, int]] = []
        self._waiting: set[int] = set()
        self._checked: dict[int, float] = {}
        """When each mailbox was last checked, in that order."""
        self._woken = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_CALLS)
        self._task: asyncio.Task[None] | None = None
        self._outcomes = Counter(
            "mediator_didcomm_push_notifications",
            "Calls of the push webhook, by outcome: sent, gone (the device was forgotten), failed (all attempts), or "
            "dropped (too many mailboxes).",
            ["outcome"],
            registry=registry,
        )

    async def start(self) -> None:
        """Start listening to commits."""
        self._mediation.broker.listen(self._committed, "events")
        self._task = asyncio.create_task(self._run(), name="didcomm-push-notifier")

    async def stop(self) -> None:
        """Stop; calls under way are cancelled."""
        tasks = [task for task in (self._task, *self._calls) if task is not None]
        self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _committed(self, committed: Committed) -> None:
        if self._task is None:
            return
        for event in committed.events:
            if event.type in _ARRIVED and event.mailbox_id not in self._waiting:
                self._wait(event.mailbox_id)

    def _wait(self, mailbox_id: int) -> None:
        if len(self._waiting) >= MAX_DUE:
            self._outcomes.labels("dropped").inc()
            return
        now = time.monotonic()
        # Mail that comes soon after a notification waits until the next one is allowed.
        at = max(now + self._grace, self._checked.get(mailbox_id, now - self._every) + self._every)
        self._waiting.add(mailbox_id)
        heapq.heappush(self._due, (at, mailbox_id))
        self._woken.set()

    async def _run(self) -> None:
        while True:
            await self._wait_until_due()
            numbers = self._take_due()
            try:
                queues = await self._mediation.list_devices(numbers)
            except MediatorError as error:
                log.warning("push notifications: cannot read the store", code=error.code)
                for number in numbers:
                    self._wait(number)
                continue
            for queue in queues:
                if not queue.messages or self._awake(queue.connection_id):
                    # No notification was sent, so the next mail need not wait.
                    self._checked.pop(queue.mailbox_id, None)
                    continue
                await self._room.acquire()
                call = asyncio.create_task(self._notify(queue), name="didcomm-push-notification")
                self._calls.add(call)
                call.add_done_callback(self._done)

    async def _wait_until_due(self) -> None:
        while not self._due or self._due[0][0] > time.monotonic():
            self._woken.clear()
            rest = self._due[0][0] - time.monotonic() if self._due else None
            with suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._woken.wait()

    def _take_due(self) -> list[int]:
        """Return the mailboxes that are due, and forget those that were checked long ago."""
        now = time.monotonic()
        numbers: list[int] = []
        while self._due and self._due[0][0] <= now and len(numbers) < BATCH:
            numbers.append(heapq.heappop(self._due)[1])
        for number in numbers:
            self._waiting.discard(number)
            self._checked.pop(number, None)
            self._checked[number] = now
        while self._checked and next(iter(self._checked.values())) <= now - self._every:
            del self._checked[next(iter(self._checked))]
        return numbers

    def _done(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        self._room.release()

    async def _notify(self, queue: DeviceQueue) -> None:
        body = orjson.dumps(
            {
                "connection": queue.connection_id,
                "service": "apns" if queue.device.platform == APNS_PLATFORM else "fcm",
                "platform": queue.device.platform,
                "token": queue.device.token,
                "messages": queue.messages,
            }
        )
        problem = ""
        for wait in (0.0, *RETRY_SECONDS):
            await asyncio.sleep(wait)
            try:
                status = await self._guard.post(self._webhook, body, "application/json", CALL_SECONDS)
            except MediatorError as error:
                problem = error.code
                continue
            if 200 <= status < 300:
                self._outcomes.labels("sent").inc()
                return
            if status == GONE:
                await self._forget(queue)
                return
            problem = f"status {status}"
        self._outcomes.labels("failed").inc()
        log.warning("push notifications: the webhook failed", problem=problem)

    async def _forget(self, queue: DeviceQueue) -> None:
        """Forget a device that is gone; its holder registers again when it gets a new token."""
        self._outcomes.labels("gone").inc()
        try:
            await self._mediation.forget_push_device(queue.connection_id, queue.device)
        except MediatorError as error:
            log.warning("push notifications: cannot forget a device", code=error.code)
