"""Checks of routing 1.0 and 2.0: what becomes of a forward."""

import time

import orjson

from conformance.checks import Level, expect
from conformance.didcomm.session import SUITE, V1, V2, DidcommSession, Mailbox, delivered, eventually
from pickup.client import Wallet
from pickup.client.plaintext import new_id
from pickup.client.sender import forward_v1, forward_v2
from pickup.message import encode
from pickup.rules.names import base58, canonical, verkey
from pickup.rules.records import Generation

MUST, SHOULD, OWN = Level.MUST, Level.SHOULD, Level.OWN
SOURCES = {V1: "RFC 0094 §Corresponding Code: Forward", V2: "DIDComm v2.1 §Routing Protocol 2.0"}


async def _mailbox(session: DidcommSession, generation: Generation) -> Mailbox:
    return await session.mailbox(generation, pickup="2.0" if generation is V1 else "3.0")


for _generation in (V1, V2):

    @SUITE.check(
        f"didcomm.routing.{_generation}-passes-on",
        MUST,
        SOURCES[_generation],
        "The mediator unpacks (decrypts) the payload of a forward message and passes on the result to the recipient.",
    )
    async def passes_on(session: DidcommSession, generation: Generation = _generation) -> None:
        mailbox = await _mailbox(session, generation)
        envelope = await mailbox.seal("note")
        await mailbox.forward(envelope, mailbox.key)
        await eventually(mailbox, 1)
        came = [orjson.loads(mail.envelope) for mail in await delivered(mailbox)]
        expect(came == [orjson.loads(envelope)], "what was delivered is not what was forwarded")

    @SUITE.check(
        f"didcomm.routing.{_generation}-accepts-with-2xx",
        MUST,
        "RFC 0025 §HTTP(S)" if _generation is V1 else "DIDComm v2.1 §HTTP(S)",
        "A successful message receipt MUST return a code in the 2xx HTTP Status Code range.",
    )
    async def accepts_with_2xx(session: DidcommSession, generation: Generation = _generation) -> None:
        mailbox = await _mailbox(session, generation)
        body = await mailbox.wrap(await mailbox.seal("note"), mailbox.key)
        answer = await session.post(mailbox.grant.endpoint, body, generation)
        expect(200 <= answer.status < 300, f"a forward is answered with HTTP {answer.status}")
        expect(not answer.body, "a forward is answered with a body")

    @SUITE.check(
        f"didcomm.routing.{_generation}-unknown-recipient-looks-the-same",
        OWN,
        "docs/protocol.md D9",
        "The answer to a well-formed forward is 202, and does not depend on whether the recipient is known.",
    )
    async def unknown_recipient_looks_the_same(session: DidcommSession, generation: Generation = _generation) -> None:
        mailbox = await _mailbox(session, generation)
        stranger = Wallet()
        nobody = stranger.new_key() if generation is V1 else stranger.new_did()
        answers = []
        for to in (mailbox.key, nobody):
            body = await mailbox.wrap(await mailbox.seal("note", to), to)
            answer = await session.post(mailbox.grant.endpoint, body, generation)
            names = sorted(name for name in answer.headers if name.lower() not in ("date", "x-request-id"))
            answers.append((answer.status, names, answer.body))
        expect(answers[0] == answers[1], f"a known recipient gets {answers[0]}, an unknown one {answers[1]}")
        expect(answers[0][0] == 202, f"both get HTTP {answers[0][0]}")

    @SUITE.check(
        f"didcomm.routing.{_generation}-same-forward-twice",
        OWN,
        "docs/protocol.md Envelopes",
        "A forward that comes again is queued again: its sender may not have had the answer.",
    )
    async def same_forward_twice(session: DidcommSession, generation: Generation = _generation) -> None:
        mailbox = await _mailbox(session, generation)
        body = await mailbox.wrap(await mailbox.seal("note"), mailbox.key)
        for _ in range(2):
            answer = await session.post(mailbox.grant.endpoint, body, generation)
            expect(200 <= answer.status < 300, f"a forward is answered with HTTP {answer.status}")
        await eventually(mailbox, 2)

    @SUITE.check(
        f"didcomm.routing.{_generation}-sealed-by-a-sender",
        SHOULD,
        SOURCES[_generation],
        "The sender emits messages of type forward to the mediator.",
    )
    async def sealed_by_a_sender(session: DidcommSession, generation: Generation = _generation) -> None:
        mailbox = await _mailbox(session, generation)
        envelopes, envelope = mailbox.sender.resources.envelopes, await mailbox.seal("note")
        routing = mailbox.grant.routing[0]
        if generation is V1:
            forward = encode(forward_v1(base58(verkey(mailbox.key)), envelope))
            body = await envelopes.seal_v1(forward, [routing], mailbox.sender.key)
        else:
            forward_2 = {**forward_v2(mailbox.key, [envelope], routing), "from": mailbox.sender.did}
            body = await envelopes.seal_v2(forward_2, routing, mailbox.sender.did)
        await session.post(mailbox.grant.endpoint, body, generation)
        await eventually(mailbox, 1)


@SUITE.check(
    "didcomm.routing.v1-names-of-a-key",
    OWN,
    "docs/protocol.md Routing",
    "Keys are understood as base58, did:key and did:key#fragment.",
)
async def names_of_a_key(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, V1)
    envelope, envelopes = await mailbox.seal("note"), mailbox.sender.resources.envelopes
    did = str(canonical(mailbox.key))
    names = (base58(verkey(did)), did, f"{did}#{did.removeprefix('did:key:')}")
    for count, name in enumerate(names, 1):
        body = await envelopes.seal_v1(encode(forward_v1(name, envelope)), mailbox.grant.routing, None)
        await session.post(mailbox.grant.endpoint, body, V1)
        await eventually(mailbox, count)


@SUITE.check(
    "didcomm.routing.v2-please-ack",
    SHOULD,
    "DIDComm v2.1 §Routing Protocol 2.0",
    "Senders SHOULD NOT use please_ack on a forward, and mediators SHOULD NOT honor it if present.",
)
async def please_ack_is_not_honoured(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, V2)
    envelopes, routing = mailbox.sender.resources.envelopes, mailbox.grant.routing[0]
    forward = forward_v2(mailbox.key, [await mailbox.seal("note")], routing, please_ack=[""], return_route="all")
    body = await envelopes.seal_v2({**forward, "from": mailbox.sender.did}, routing, mailbox.sender.did)
    answer = await session.post(mailbox.grant.endpoint, body, V2)
    expect(not answer.body, "a forward is answered with a message")


@SUITE.check(
    "didcomm.routing.v2-expired",
    OWN,
    "docs/protocol.md Routing",
    "Each envelope is kept until its expires_time; with one that is past, the message is dropped.",
)
async def expired_forward(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, V2)
    envelope = await mailbox.seal("late")
    body = await mailbox.wrap(envelope, mailbox.key, expires_time=int(time.time()) - 3600)
    answer = await session.post(mailbox.grant.endpoint, body, V2)
    expect(200 <= answer.status < 300, f"the forward is answered with HTTP {answer.status}")
    await mailbox.send("in time")
    await eventually(mailbox, 1)
    texts = await mailbox.texts(await delivered(mailbox))
    expect(texts == ["in time"], f"the queue holds {texts}")


@SUITE.check(
    "didcomm.routing.v2-unknown-headers",
    MUST,
    "DIDComm v2.1 §Message Headers",
    "Any software that doesn't understand such fields SHOULD ignore them and MUST NOT fail because of their inclusion "
    "in a message.",
)
async def unknown_headers_are_ignored(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, V2)
    envelope = await mailbox.seal("note")
    body = await mailbox.wrap(envelope, mailbox.key, **{"colour": "blue", new_id(): {"nested": [1]}})
    await session.post(mailbox.grant.endpoint, body, V2)
    await eventually(mailbox, 1)


@SUITE.check(
    "didcomm.routing.large-message",
    OWN,
    "docs/protocol.md Limits",
    "A message inside a forward may have up to max_message_bytes; a photograph is taken whole.",
)
async def large_message(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, V1)
    text = "x" * 1_500_000
    await mailbox.send(text)
    await eventually(mailbox, 1)
    texts = await mailbox.texts(await delivered(mailbox))
    expect(texts == [text], f"of 1.5 MB, {sum(map(len, texts))} characters came")


@SUITE.check(
    "didcomm.routing.too-large-is-answered",
    OWN,
    "docs/protocol.md Limits",
    "An envelope above the limit is answered with 413.",
)
async def too_large_is_answered(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, V1)
    body = b'{"protected":"' + b"x" * (48 << 20) + b'"}'
    answer = await session.post(mailbox.grant.endpoint, body, V1)
    expect(answer.status == 413, f"48 MiB are answered with HTTP {answer.status}")
    ping = await mailbox.holder.ping()
    expect(ping >= 0, "the mediator is gone")
