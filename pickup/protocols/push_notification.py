"""Push notifications 1.0 by FCM (RFC 0734) and APNs (RFC 0699): registers the phone to notify."""

from collections.abc import Sequence
from dataclasses import replace

from mediator.errors import BadRequestError, NotEnrolledError
from pickup.dispatcher import Dispatcher, InboundRequest
from pickup.message import ReplyMessage
from pickup.protocols.handshake import nothing
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
    handlers = {"set-device-info": set_device, "get-device-info": get_device, "problem-report": nothing}
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
