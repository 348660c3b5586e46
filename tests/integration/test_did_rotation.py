"""Wallets that rotate their DIDs, sealed and signed by the library `didcomm` of SICPA, at a real door (D14)."""

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from pickup.client import Holder, ProblemError
from pickup.client.plaintext import new_id
from pickup.dids.resolver import read
from pickup.message import DIDCOMM
from pickup.rules.records import Generation
from tests.harness.didcomm_service import note_v2
from tests.harness.waiting import until
from tests.integration.test_didcomm_bad_input import Mediator, mediating

didcomm = pytest.importorskip("didcomm.pack_encrypted")
from didcomm.common.resolvers import ResolversConfig  # noqa: E402
from didcomm.common.types import (  # noqa: E402
    VerificationMaterial,
    VerificationMaterialFormat,
    VerificationMethodType,
)
from didcomm.did_doc.did_doc import DIDDoc  # noqa: E402
from didcomm.did_doc.did_resolver import DIDResolver  # noqa: E402
from didcomm.message import FromPrior, Message  # noqa: E402
from didcomm.secrets.secrets_resolver import Secret, SecretsResolver  # noqa: E402
from didcomm.unpack import unpack  # noqa: E402

V2 = Generation.V2
PLAIN = didcomm.PackEncryptedConfig(forward=False)


class Documents(DIDResolver):  # type: ignore[misc]
    """Reads the DIDs as the mediator does; the library has no resolver of its own."""

    async def resolve(self, did: str) -> Any:
        return DIDDoc.deserialize({**read(did).raw, "service": []})


class Secrets(SecretsResolver):  # type: ignore[misc]
    """The keys of a holder's wallet; ``claimed`` says which of them stand for those of others."""

    def __init__(self, holder: Holder, claimed: dict[str, str]) -> None:
        self._wallet = holder.wallet
        self._claimed = claimed

    async def get_key(self, kid: str) -> Any:
        found = self._wallet.kid(self._claimed.get(kid, kid))
        if found is None:
            return None
        value = orjson.dumps({**found.jwk, "kid": kid}).decode()
        material = VerificationMaterial(format=VerificationMaterialFormat.JWK, value=value)
        return Secret(kid, VerificationMethodType.JSON_WEB_KEY_2020, material)

    async def get_keys(self, kids: list[str]) -> list[str]:
        return [kid for kid in kids if self._wallet.kid(self._claimed.get(kid, kid)) is not None]


def tools(holder: Holder, claimed: dict[str, str]) -> Any:
    return ResolversConfig(secrets_resolver=Secrets(holder, claimed), did_resolver=Documents())


async def rotate(
    door: Mediator, holder: Holder, new: str, old: str | None = None, claimed: dict[str, str] | None = None
) -> Any:
    """Request the status under a new DID in place of an old one, with the library; return its answer."""
    prior = FromPrior(iss=old or holder.link.mine, sub=new, iat=int(time.time()))
    library = tools(holder, claimed or {})
    message = Message(
        id=new_id(),
        type=f"{DIDCOMM}messagepickup/3.0/status-request",
        body={},
        frm=new,
        to=[holder.link.theirs],
        from_prior=prior,
        custom_headers={"return_route": "all"},
    )
    packed = await didcomm.pack_encrypted(library, message, holder.link.theirs, frm=new, pack_config=PLAIN)
    status, _, body = await door.whole(packed.packed_msg.encode())
    assert status == 200
    return (await unpack(library, body.decode())).message


async def under(door: Mediator, holder: Holder, did: str) -> Holder:
    """Return the holder as it goes on under another DID."""
    holder.wallet.links["mediator"] = replace(holder.link, mine=did).written()
    return await door.stack.enter_async_context(Holder.resume(holder.wallet))


@pytest.mark.rule("D14")
async def test_mail_and_keys_stay_when_a_real_wallet_rotates(tmp_path: Path) -> None:
    async with mediating(tmp_path) as door:
        holder, did = await door.holder(V2)
        (routing,), sender = (await holder.mediate()).routing, await door.sender()
        await sender.send_v2(did, routing, door.url, note_v2("before"))
        new = holder.wallet.new_did()
        answer = await rotate(door, holder, new)
        assert answer.type.endswith("/status")
        assert (answer.body["message_count"], answer.to) == (1, [new])
        holder = await under(door, holder, new)
        await sender.send_v2(did, routing, door.url, note_v2("after"))
        mails = await holder.fetch()
        assert [(await holder.open(mail)).message["body"]["content"] for mail in mails] == ["before", "after"]
        await holder.received([mail.id for mail in mails])
        assert await holder.keys() == [did]
        await holder.remove_key(did)
        assert door.rows()["connection"] == 1


@pytest.mark.rule("D6", "D14")
async def test_live_mode_of_a_real_wallet_goes_on(tmp_path: Path) -> None:
    async with mediating(tmp_path) as door:
        holder, did = await door.holder(V2)
        (routing,), sender = (await holder.mediate()).routing, await door.sender()
        async with contextlib.aclosing(holder.live()) as arriving:
            first = asyncio.create_task(anext(arriving))
            await until(lambda: door.metrics.registry.get_sample_value("mediator_didcomm_live") == 1)
            await sender.send_v2(did, routing, door.url, note_v2("one"))
            await holder.received([(await first).id])
            # The new DID says so by a request of its own; the socket stays as it is.
            await rotate(door, holder, holder.wallet.new_did())
            second = asyncio.create_task(anext(arriving))
            await sender.send_v2(did, routing, door.url, note_v2("two"))
            assert (await holder.open(await second)).message["body"]["content"] == "two"


@pytest.mark.rule("D14")
@pytest.mark.parametrize("wrong", ["forged", "stranger"])
async def test_nobody_else_rotates_a_wallet(tmp_path: Path, wrong: str) -> None:
    async with mediating(tmp_path) as door:
        victim, did = await door.holder(V2)
        thief, _ = await door.holder(V2)
        old, new = victim.link.mine, thief.wallet.new_did()
        if wrong == "forged":
            # The library signs with whatever key it is given.
            answer = await rotate(door, thief, new, old, {f"{old}#key-1": f"{thief.link.mine}#key-1"})
        else:
            answer = await rotate(door, thief, new, thief.wallet.new_did())
        assert answer.type.endswith("/problem-report")
        assert answer.body["code"] == "e.p.msg"
        assert (await victim.status()).count == 0
        assert await victim.keys() == [did]
        with pytest.raises(ProblemError):
            await (await under(door, thief, new)).status()
