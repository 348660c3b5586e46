"""Push notifications 1.0 by FCM (RFC 0734) and by APNs (RFC 0699): where a sleeping phone is rung."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mediator.errors import BadRequestError, NoSuchConnectionError, NotEnrolledError
from mediator.mediation.records import Connection, Device, Generation
from mediator.store.base import Transaction
from pickup.dispatch import Call
from pickup.message import Reply
from pickup.protocols.handshake import nothing

if TYPE_CHECKING:
    from pickup.dispatch import Dispatcher

FCM = "push-notifications-fcm"
APNS = "push-notifications-apns"
APNS_PLATFORM = "apns"
"""What stands for the platform of a device that is rung by APNs, where the protocol names none."""
MAX_TOKEN = 4096
MAX_PLATFORM = 64
_TOKEN, _PLATFORM = "device_token", "device_platform"


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher."""
    handlers = {"set-device-info": set_device, "get-device-info": get_device, "problem-report": nothing}
    for family in (FCM, APNS):
        generations = {Generation.V1, Generation.V2}
        dispatcher.register(family, {(1, 0)}, handlers, generations=generations, once={"set-device-info"})


async def set_device(call: Call) -> Sequence[Reply]:
    """Keep where the caller is rung, or forget it when both values are null; answered with an ack."""
    connection = call.connected()
    device = _device(call)
    if call.repeated:
        return [_ack(call)]

    def keep(tx: Transaction, _now: int) -> Connection:
        current = tx.connections.get(connection.no)
        if current is None:
            raise NoSuchConnectionError(connection.no)
        changed = replace(current, device=device)
        tx.connections.save(changed)
        return changed

    call.connection = await call.write(keep)
    return [_ack(call)]


def _ack(call: Call) -> Reply:
    return Reply(call.message.type.named("ack"), {"status": "OK"}, thid=call.message.thread)


async def get_device(call: Call) -> Sequence[Reply]:
    """Tell the caller where it is rung by this service; :class:`NotEnrolledError` when it is not."""
    device = call.connected().device
    by_apns = call.message.type.family == APNS
    if device is None or by_apns != (device.platform == APNS_PLATFORM):
        raise NotEnrolledError("not registered for push notifications")
    body = {_TOKEN: device.token} if by_apns else {_TOKEN: device.token, _PLATFORM: device.platform}
    return [Reply(call.message.type.named("device-info"), body, thid=call.message.thread)]


def _device(call: Call) -> Device | None:
    token = _value(call, _TOKEN, MAX_TOKEN)
    if call.message.type.family == APNS:
        return None if token is None else Device(token, APNS_PLATFORM)
    platform = _value(call, _PLATFORM, MAX_PLATFORM)
    if token is None and platform is None:
        return None
    if token is None or platform is None:
        raise BadRequestError(_TOKEN if token is None else _PLATFORM, "missing-value, expected both values or neither")
    if platform == APNS_PLATFORM:
        raise BadRequestError(_PLATFORM, f"expected a platform of FCM; {APNS} is the protocol for this one")
    return Device(token, platform)


def _value(call: Call, name: str, longest: int) -> str | None:
    value = call.message.body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise BadRequestError(name, f"expected null, or text of at most {longest} characters")
    return value
