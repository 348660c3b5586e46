"""Measures what the envelope libraries alone cost for the envelopes of one message.

They are measured as they are installed, with keys read and DID documents resolved before the clock starts. The service
needs less: it remembers what v1 keys come to (:mod:`pickup.envelope.v1`), and composes the usual suites of v2 itself
(:mod:`pickup.envelope.v2_cryptography`).
"""

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from benchmarks.didcomm_clients import BATCH, TEXT
from pickup.client import Sender, Wallet
from pickup.client.conversation import ClientResources
from pickup.client.plaintext import write
from pickup.client.sender import forward_v1
from pickup.dids.resolver import read as document_of
from pickup.envelope.reading import Jwe, read
from pickup.rules import names
from pickup.rules.records import Generation
from tests.harness.didcomm_messaging import DidcommMessaging

REPEAT = 100
MAX_BYTES = 1 << 24
IDS = [f"123456-{number}" for number in range(BATCH)]

_V1 = importlib.util.find_spec("didcomm_messaging.legacy.crypto")


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of the libraries in microseconds per message."""

    forward: float
    """To open the forward."""
    pickup: float
    """To open delivery-request and messages-received and to seal delivery and status, divided by ten messages."""


def cost(generation: Generation) -> Cost:
    """Measure it on envelopes with the same content as the benchmark's."""
    return asyncio.run(_v1() if generation is Generation.V1 else _v2())


async def _v1() -> Cost:
    assert _V1 is not None
    assert _V1.loader is not None
    # A copy of the module, without what the service changes in it.
    crypto: Any = importlib.util.module_from_spec(_V1)
    _V1.loader.exec_module(crypto)
    wallet = Wallet()
    holder, mediator = wallet.new_key(), wallet.new_key()
    pairs = {}
    for key in (holder, mediator):
        seed = await wallet.seed(key)
        assert seed is not None
        pairs[key] = crypto.create_keypair(seed)
    async with Sender() as sender:
        packed = await sender.pack_v1(holder, [mediator], {"@type": "https://x/y/1.0/z", "@id": "1", "content": TEXT})
        inner = await sender.pack_v1(holder, [], {"@type": "https://x/y/1.0/z", "@id": "1", "content": TEXT})
    assert "msg" in forward_v1(holder, inner)
    requests = [
        orjson.dumps(crypto.pack_message(text, [names.verkey(mediator)], *pairs[holder]))
        for text in _questions(Generation.V1)
    ]
    answers = _answers(Generation.V1, inner)

    async def unpack(envelope: bytes) -> None:
        crypto.unpack_message(orjson.loads(envelope), *pairs[mediator])

    async def pack(text: str) -> None:
        orjson.dumps(crypto.pack_message(text, [names.verkey(holder)], *pairs[mediator]))

    return await _measure(packed, requests, answers, unpack, pack)


async def _v2() -> Cost:
    wallet = Wallet()
    holder, mediator = wallet.new_did(), wallet.new_did()
    library, tools = DidcommMessaging(), ClientResources(wallet)
    theirs, ours = document_of(holder).key_agreement[0], document_of(mediator).key_agreement[0]
    secret = wallet.kid(ours.kid)
    assert secret is not None
    known = secret
    async with Sender() as sender:
        message = {"id": "1", "type": "https://x/y/1.0/z", "body": {"content": TEXT}}
        packed = await sender.pack_v2(holder, mediator, message)
        inner = await sender.pack_v2(holder, None, message)
    requests = [
        await tools.envelopes.seal_v2({**orjson.loads(text), "from": holder, "to": [mediator]}, mediator, holder)
        for text in _questions(Generation.V2)
    ]
    await tools.close()
    answers = _answers(Generation.V2, inner)

    async def unpack(envelope: bytes) -> None:
        jwe = read(envelope, MAX_BYTES)
        assert isinstance(jwe, Jwe)
        orjson.loads(await library.decrypt(jwe, known, theirs if jwe.sender_kid else None))

    async def pack(text: str) -> None:
        message = orjson.loads(text)
        await library.encrypt({**message, "from": mediator, "to": [holder]}, [theirs], known)

    return await _measure(packed, requests, answers, unpack, pack)


def _questions(generation: Generation) -> list[str]:
    family = "messagepickup/2.0" if generation is Generation.V1 else "messagepickup/3.0"
    return [
        _text(write(generation, f"{family}/delivery-request", {"limit": BATCH}, route="all")),
        _text(write(generation, f"{family}/messages-received", {"message_id_list": IDS}, route="all")),
    ]


def _answers(generation: Generation, inner: bytes) -> list[str]:
    from pickup.client.plaintext import base64url

    v1 = generation is Generation.V1
    family = "messagepickup/2.0" if v1 else "messagepickup/3.0"
    attached = [{"@id" if v1 else "id": id, "data": {"base64": base64url(inner)}} for id in IDS]
    status = {"message_count": 100, "longest_waited_seconds": 1, "total_bytes": 100_000, "live_delivery": False}
    return [
        _text(write(generation, f"{family}/delivery", thid="1", attachments=attached)),
        _text(write(generation, f"{family}/status", status, thid="1")),
    ]


def _text(message: dict[str, Any]) -> str:
    return orjson.dumps(message).decode()


async def _measure(
    packed: bytes,
    requests: list[bytes],
    answers: list[str],
    unpack: Callable[[bytes], Awaitable[None]],
    pack: Callable[[str], Awaitable[None]],
) -> Cost:
    async def spent(works: list[Callable[[], Awaitable[None]]]) -> float:
        for work in works:
            await work()
        started = time.process_time()
        for _ in range(REPEAT):
            for work in works:
                await work()
        return (time.process_time() - started) / REPEAT * 1e6

    forward = await spent([lambda: unpack(packed)])
    steps: list[Callable[[], Awaitable[None]]] = []
    steps += [lambda envelope=envelope: unpack(envelope) for envelope in requests]  # type: ignore[misc]
    steps += [lambda text=text: pack(text) for text in answers]  # type: ignore[misc]
    return Cost(forward, await spent(steps) / BATCH)
