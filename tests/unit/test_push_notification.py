"""Where a sleeping phone is rung: RFC 0734 (FCM) and RFC 0699 (APNs)."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from mediator.errors import BadRequestError, NotEnrolledError
from pickup.message import DIDCOMM
from pickup.protocols import handshakes
from pickup.protocols.push_notification import get_device, set_device
from pickup.rules.records import PushDevice
from tests.harness.handshaking import Peer, Setup, exchange, only, setup


@pytest.fixture
async def door() -> AsyncIterator[Setup]:
    async with setup() as made:
        yield made


@pytest.fixture
async def peer(door: Setup) -> Peer:
    peer, invitation = Peer(), await door.invitations.make("default")
    await handshakes.exchange_dids(await door.call(exchange(1, peer.peer_4(), invitation), peer.key, invitation.key))
    return peer


def message(name: str, family: str = "fcm", **fields: Any) -> dict[str, Any]:
    return {"@type": f"{DIDCOMM}push-notifications-{family}/1.0/{name}", "@id": "push-1", **fields}


async def device_of(door: Setup, peer: Peer) -> PushDevice | None:
    kept = await door.kept(peer.key)
    return kept.device


async def test_a_device_is_set_told_changed_and_removed(door: Setup, peer: Peer) -> None:
    me = door.identity.key
    for token in ("first", "second"):
        setting = message("set-device-info", device_token=token, device_platform="android")
        reply = only(await set_device(await door.call(setting, peer.key, me)))
        assert str(reply.type) == f"{DIDCOMM}push-notifications-fcm/1.0/ack"
        assert (reply.body, reply.thid) == ({"status": "OK"}, "push-1")
        assert await device_of(door, peer) == PushDevice(token, "android")
        told = only(await get_device(await door.call(message("get-device-info"), peer.key, me)))
        assert told.type.name == "device-info"
        assert (told.body, told.thid) == ({"device_token": token, "device_platform": "android"}, "push-1")
    removing = message("set-device-info", device_token=None, device_platform=None)
    await set_device(await door.call(removing, peer.key, me))
    assert await device_of(door, peer) is None
    with pytest.raises(NotEnrolledError, match="not registered for push notifications"):
        await get_device(await door.call(message("get-device-info"), peer.key, me))


async def test_apns_names_no_platform(door: Setup, peer: Peer) -> None:
    me = door.identity.key
    await set_device(await door.call(message("set-device-info", "apns", device_token="t"), peer.key, me))
    told = only(await get_device(await door.call(message("get-device-info", "apns"), peer.key, me)))
    assert told.body == {"device_token": "t"}
    with pytest.raises(NotEnrolledError):
        await get_device(await door.call(message("get-device-info", "fcm"), peer.key, me))
    await set_device(await door.call(message("set-device-info", "apns", device_token=None), peer.key, me))
    assert await device_of(door, peer) is None


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"device_token": "t"}, "device_platform"),
        ({"device_platform": "ios"}, "device_token"),
        ({"device_token": "", "device_platform": "ios"}, "device_token"),
        ({"device_token": 7, "device_platform": "ios"}, "device_token"),
        ({"device_token": "x" * 5000, "device_platform": "ios"}, "device_token"),
        ({"device_token": "t", "device_platform": ["ios"]}, "device_platform"),
        ({"device_token": "t", "device_platform": "apns"}, "device_platform"),
    ],
)
async def test_what_is_no_device_is_refused_and_names_the_field(door: Setup, peer: Peer, fields, named) -> None:
    with pytest.raises(BadRequestError) as caught:
        await set_device(await door.call(message("set-device-info", **fields), peer.key, door.identity.key))
    assert caught.value.field == named
    assert await device_of(door, peer) is None


@pytest.mark.rule("D8")
async def test_strangers_have_no_device(door: Setup) -> None:
    fields = {"device_token": "t", "device_platform": "ios"}
    for sender in (Peer().key, None):
        with pytest.raises(NotEnrolledError):
            await set_device(await door.call(message("set-device-info", **fields), sender, door.identity.key))
        with pytest.raises(NotEnrolledError):
            await get_device(await door.call(message("get-device-info"), sender, door.identity.key))
