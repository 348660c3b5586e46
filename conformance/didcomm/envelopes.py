"""Checks of envelopes that are damaged, forged, plain or repeated: none of them may have an effect."""

import contextlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Any

import orjson

from conformance.checks import CannotTryError, Level, expect
from conformance.didcomm.mediation import MEDIATION_1, MEDIATION_3, Mediation
from conformance.didcomm.session import SUITE, V1, V2, DidcommSession, HttpAnswer, Mailbox, eventually, written
from pickup.client import ProblemError
from pickup.client.plaintext import Json, id_of, write
from pickup.message import encode
from pickup.rules.names import canonical

MUST, SHOULD, OWN = Level.MUST, Level.SHOULD, Level.OWN
MEDIATIONS = {V1: MEDIATION_1, V2: MEDIATION_3}
INTEGRITY = {
    V1: ("RFC 0019 §Summary", "The encryption envelope provides confidentiality, integrity and authenticity."),
    V2: ("DIDComm v2.1 §DIDComm Encrypted Messages", "An encrypted message provides integrity guarantees."),
}


def flipped(text: str) -> str:
    """Return base64url in which one bit in the middle is another."""
    raw = bytearray(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    raw[len(raw) // 2] ^= 1
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def add_key(mailbox: Mailbox, key: str) -> Json:
    """Write an update that adds a key: something with an effect that can be seen."""
    version = MEDIATIONS[mailbox.holder.generation]
    updates = [{version.recipient: key, "action": "add"}]
    return written(mailbox.holder, version.type("keylist-update"), {"updates": updates})


async def has_no_effect(session: DidcommSession, mailbox: Mailbox, body: bytes, key: str) -> HttpAnswer | None:
    """Post a bad update, fail where the key is registered afterwards, and return the answer; None: there was none."""
    answer = None
    with contextlib.suppress(CannotTryError):
        answer = await session.post(mailbox.holder.link.url("http", "https"), body, mailbox.holder.generation)
    expect(not await is_registered(mailbox, key), "the envelope was obeyed: the key is registered")
    return answer


async def is_registered(mailbox: Mailbox, key: str) -> bool:
    """Whether a key is in the keylist; where that cannot be read, whether mail for it arrives."""
    version = MEDIATIONS[mailbox.holder.generation]
    for _ in range(2):
        # A report on the bad envelope may come first, as the answer to another request.
        with contextlib.suppress(ProblemError):
            return canonical(key) in version.keys(await version.query(mailbox.holder))
    try:
        before = (await mailbox.holder.status()).count
        await mailbox.try_to_send("is it registered?", key)
        return (await mailbox.holder.status()).count > before
    except ProblemError as error:
        raise CannotTryError(f"neither the keylist nor the queue can be read: {error}") from error


async def _mailbox(session: DidcommSession, version: Mediation) -> tuple[Mailbox, str]:
    mailbox = await version.mailbox(session)
    return mailbox, version.new_key(mailbox.holder)


def _damage(name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    for generation in (V1, V2):
        source, sentence = INTEGRITY[generation]

        @SUITE.check(f"didcomm.envelopes-{generation}.{name}-is-refused", MUST, source, sentence)
        async def is_refused(session: DidcommSession, version: Mediation = MEDIATIONS[generation]) -> None:
            mailbox, key = await _mailbox(session, version)
            whole = orjson.loads(await session.seal(mailbox.holder, add_key(mailbox, key)))
            await has_no_effect(session, mailbox, orjson.dumps(change(whole)), key)


_damage("damaged-ciphertext", lambda whole: {**whole, "ciphertext": flipped(whole["ciphertext"])})
_damage("damaged-tag", lambda whole: {**whole, "tag": flipped(whole["tag"])})
_damage("damaged-iv", lambda whole: {**whole, "iv": flipped(whole["iv"])})
_damage("missing-tag", lambda whole: {name: value for name, value in whole.items() if name != "tag"})


def _other_sender(whole: dict[str, Any]) -> dict[str, Any]:
    """Write another sender into the header that the content is bound to."""
    text = whole["protected"]
    header = orjson.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    header["skid" if "skid" in header else "more"] = "did:example:somebody#key-1"
    return {**whole, "protected": urlsafe_b64encode(orjson.dumps(header)).rstrip(b"=").decode()}


_damage("changed-header", _other_sender)

for _generation in (V1, V2):

    @SUITE.check(
        f"didcomm.envelopes-{_generation}.for-another-key-is-refused",
        MUST,
        *INTEGRITY[_generation],
    )
    async def for_another_key(session: DidcommSession, version: Mediation = MEDIATIONS[_generation]) -> None:
        mailbox, key = await _mailbox(session, version)
        # Sealed for somebody whose keys the mediator has not.
        stranger = await session.sender()
        envelopes, mine = mailbox.holder.resources.envelopes, mailbox.holder.link.mine
        if version.generation is V1:
            body = await envelopes.seal_v1(encode(add_key(mailbox, key)), [stranger.key], mine)
        else:
            message = {**add_key(mailbox, key), "from": mine, "to": [stranger.did]}
            body = await envelopes.seal_v2(message, stranger.did, mine)
        answer = await has_no_effect(session, mailbox, body, key)
        expect(not (answer and 200 <= answer.status < 300 and answer.body), "it is answered with a message")

    @SUITE.check(
        f"didcomm.envelopes-{_generation}.anonymous-update-is-refused",
        OWN,
        "docs/protocol.md D8",
        "If a pickup or keylist message is anonymous, it is refused.",
    )
    async def anonymous_update(session: DidcommSession, version: Mediation = MEDIATIONS[_generation]) -> None:
        mailbox, key = await _mailbox(session, version)
        link, envelopes = mailbox.holder.link, mailbox.holder.resources.envelopes
        message = add_key(mailbox, key)
        if version.generation is V1:
            body = await envelopes.seal_v1(encode(message), [link.theirs], None)
        else:
            body = await envelopes.seal_v2({**message, "from": link.mine, "to": [link.theirs]}, link.theirs, None)
        await has_no_effect(session, mailbox, body, key)

    @SUITE.check(
        f"didcomm.envelopes-{_generation}.plaintext-is-refused",
        OWN,
        "docs/protocol.md D12",
        "A message in plain text is refused, whatever it says about its sender.",
    )
    async def plaintext(session: DidcommSession, version: Mediation = MEDIATIONS[_generation]) -> None:
        mailbox, key = await _mailbox(session, version)
        link = mailbox.holder.link
        message = {**add_key(mailbox, key), "from": link.mine, "to": [link.theirs]}
        for media_type in ("application/didcomm-plain+json", "application/json", ""):
            answer = await session.post(
                link.url("http", "https"), encode(message), version.generation, **{"Content-Type": media_type}
            )
            expect(answer.status >= 400, f"a plaintext of type {media_type!r} is answered with HTTP {answer.status}")
        await has_no_effect(session, mailbox, encode(message), key)

    @SUITE.check(
        f"didcomm.envelopes-{_generation}.garbage-is-a-client-error",
        OWN,
        "docs/protocol.md D9",
        "A 4xx is for bytes that cannot be unpacked.",
    )
    async def garbage(session: DidcommSession, version: Mediation = MEDIATIONS[_generation]) -> None:
        session.invited(version.generation)
        wallet = await session.wallet(version.generation)
        url = wallet.link.url("http", "https")
        for body in (b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"protected": 1}'):
            answer = await session.post(url, body, version.generation)
            expect(400 <= answer.status < 500, f"{body[:20]!r} is answered with HTTP {answer.status}")
        seconds = await wallet.ping()
        expect(seconds < session.seconds, "the mediator is gone")

    @SUITE.check(
        f"didcomm.envelopes-{_generation}.replayed-update-changes-nothing",
        OWN,
        "docs/protocol.md D13",
        "An envelope that was taken once changes nothing when it comes again.",
    )
    async def replayed_update(session: DidcommSession, version: Mediation = MEDIATIONS[_generation]) -> None:
        mailbox, key = await _mailbox(session, version)
        url = mailbox.holder.link.url("http", "https")
        add = await session.seal(mailbox.holder, add_key(mailbox, key))
        await session.post(url, add, version.generation)
        await version.update(mailbox.holder, (key, "remove"))
        # Somebody has recorded the first envelope.
        await has_no_effect(session, mailbox, add, key)


@SUITE.check(
    "didcomm.envelopes-v2.from-of-another-is-refused",
    MUST,
    "DIDComm v2.1 §Message Headers",
    "When a message is encrypted, the sender key MUST be authorized for encryption by the DID in from. Authorization "
    "of the encryption key for this DID MUST be verified by message recipient.",
)
async def from_of_another(session: DidcommSession) -> None:
    (mailbox, key), thief = await _mailbox(session, MEDIATION_3), await MEDIATION_3.mailbox(session)
    forged = {**add_key(mailbox, key), "from": mailbox.holder.link.mine}
    await has_no_effect(session, mailbox, await session.seal(thief.holder, forged), key)
    expect(not await is_registered(thief, key), "the envelope was obeyed as one of its sealer")


@SUITE.check(
    "didcomm.envelopes-v2.from-of-another-reads-no-mail",
    MUST,
    "DIDComm v2.1 §Message Consistency",
    "The from of the plaintext MUST match the skid of the authcrypt layer.",
)
async def from_of_another_reads_no_mail(session: DidcommSession) -> None:
    mailbox = await session.mailbox(V2, pickup="3.0")
    thief = await session.mailbox(V2, pickup="3.0")
    await mailbox.send("a secret")
    await eventually(mailbox, 1)
    request = written(thief.holder, "messagepickup/3.0/delivery-request", {"limit": 10})
    forged = {**request, "from": mailbox.holder.link.mine}
    answer = await session.request(thief.holder, forged)
    expect(answer is None or not answer.attachments, "somebody else's mail is delivered")
    await eventually(mailbox, 1)


@SUITE.check(
    "didcomm.envelopes-v2.sealed-without-from-is-refused",
    OWN,
    "docs/protocol.md Envelopes",
    "A sealed message without from is refused.",
)
async def without_from(session: DidcommSession) -> None:
    mailbox, key = await _mailbox(session, MEDIATION_3)
    link = mailbox.holder.link
    message = {**add_key(mailbox, key), "to": [link.theirs]}
    body = await mailbox.holder.resources.envelopes.seal_v2(message, link.theirs, link.mine)
    await has_no_effect(session, mailbox, body, key)


@SUITE.check(
    "didcomm.envelopes-v2.expired-is-refused",
    SHOULD,
    "DIDComm v2.1 §Message Headers",
    "expires_time signals when the message is considered no longer valid by the sender.",
)
async def expired(session: DidcommSession) -> None:
    mailbox, key = await _mailbox(session, MEDIATION_3)
    late = {**add_key(mailbox, key), "expires_time": 1_500_000_000}
    await has_no_effect(session, mailbox, await session.seal(mailbox.holder, late), key)


@SUITE.check(
    "didcomm.envelopes-v1.message-of-v2-is-refused",
    OWN,
    "docs/protocol.md The DIDComm messages",
    "A message of one generation in the envelope of the other is refused.",
)
async def message_of_v2(session: DidcommSession) -> None:
    mailbox, key = await _mailbox(session, MEDIATION_1)
    wrong = write(V2, MEDIATION_3.type("keylist-update"), {"updates": [{"recipient_did": key, "action": "add"}]})
    assert id_of(wrong)
    await has_no_effect(session, mailbox, await session.seal(mailbox.holder, wrong), key)


@SUITE.check(
    "didcomm.envelopes-v1.unpadded-and-padded",
    OWN,
    "docs/protocol.md D12",
    "Base64 with and without padding is the same: deployed wallets write both.",
)
async def unpadded_and_padded(session: DidcommSession) -> None:
    mailbox, _ = await _mailbox(session, MEDIATION_1)
    version = MEDIATION_1
    for pad in (True, False):
        key = version.new_key(mailbox.holder)
        whole = orjson.loads(await session.seal(mailbox.holder, add_key(mailbox, key)))
        for name in ("ciphertext", "iv", "tag"):
            text = whole[name].rstrip("=")
            whole[name] = text + "=" * (-len(text) % 4) if pad else text
        await session.post(mailbox.holder.link.url("http", "https"), orjson.dumps(whole), V1)
        expect(await is_registered(mailbox, key), f"an envelope {'with' if pad else 'without'} padding is not taken")


@SUITE.check(
    "didcomm.envelopes-v1.old-media-type",
    OWN,
    "docs/protocol.md Where",
    "The media type application/ssi-agent-wire is taken as well.",
)
async def old_media_type(session: DidcommSession) -> None:
    wallet = await session.wallet(V1)
    body = await session.seal(wallet, written(wallet, "trust_ping/1.0/ping", {"response_requested": True}))
    answer = await session.post(
        wallet.link.url("http", "https"), body, V1, **{"Content-Type": "application/ssi-agent-wire"}
    )
    expect(answer.status == 200 and answer.body, f"answered with HTTP {answer.status}")


@SUITE.check(
    "didcomm.envelopes-v1.old-prefix",
    MUST,
    "RFC 0348 §Step 1",
    "All DIDComm messages with the prefix did:sov:BzCbsNYhMrjHiqZDTUASHg;spec are taken as those with "
    "https://didcomm.org.",
)
async def old_prefix(session: DidcommSession) -> None:
    wallet = await session.wallet(V1)
    ping = written(wallet, "trust_ping/1.0/ping", {"response_requested": True})
    ping["@type"] = "did:sov:BzCbsNYhMrjHiqZDTUASHg;spec/trust_ping/1.0/ping"
    answer = await session.request(wallet, ping)
    expect(answer is not None and answer.name == "ping_response", f"answered with {answer and answer.type}")
