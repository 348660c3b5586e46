"""What is fuzzed of the DIDComm door: the parsers that read what strangers send."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import orjson

from mediator.errors import BusyError, MediatorError, UnresolvedDidError
from pickup import message as messages
from pickup.dids import document as documents
from pickup.dids import resolver
from pickup.dispatcher import report_problem
from pickup.envelope import reading
from pickup.envelope.v2 import public
from pickup.invitations import id_inside
from pickup.protocols import coordinate_mediation, handshakes, message_pickup, routing, signatures
from pickup.rules import forwarding as shape
from pickup.rules import message_queue, names
from pickup.rules.records import Generation


def check_short(error: MediatorError) -> None:
    """Hold that a refusal is one short line that says nothing of what was inside."""
    text = str(error)
    assert 0 < len(text) < 1000, text
    assert text.isprintable(), text


def envelope(data: bytes) -> None:
    """Read an envelope: what passes is within all bounds, and is known by the same mark when it is read again."""
    try:
        made = reading.read(data, len(data))
    except MediatorError as error:
        check_short(error)
        return
    assert reading.envelope_digest(made) == reading.envelope_digest(reading.read(data, len(data)))
    if isinstance(made, reading.V1Envelope):
        assert 1 <= len(made.recipients) <= reading.MAX_V1_RECIPIENTS
        assert all(recipient["header"]["kid"] for recipient in made.recipients)
        return
    assert 1 <= len(made.recipients) <= reading.MAX_V2_RECIPIENTS
    for kid in (*made.recipients, made.sender_kid):
        assert kid is None or len(kid) <= reading.MAX_KID
        assert kid is None or kid.startswith("did:")
    assert all(orjson.dumps(made.only_for(kid)) for kid in made.recipients)


def layer(data: bytes) -> None:
    """Read what a layer held, and a plaintext as a message of either generation."""
    try:
        made = reading.read_layer(data)
    except MediatorError as error:
        check_short(error)
        return
    if isinstance(made, dict):
        plaintext(made)


def plaintext(raw: dict[str, Any]) -> None:
    """Read a message, what is attached to it, and the fields of the protocols, each of which may be wrong."""
    for generation in Generation:
        try:
            read = messages.read(raw, generation)
        except MediatorError as error:
            check_short(error)
            continue
        assert read.id
        assert len(read.thread) <= messages.MAX_ID
        assert messages.MessageType.parse(str(read.type), "type") == read.type
        assert orjson.loads(messages.encode(messages.write(report_problem(read, BUSY), generation, "a", "b")))
        for look in LOOKS:
            try:
                look(read)
            except MediatorError as error:
                check_short(error)


BUSY = BusyError("é")
LOOKS: Sequence[Callable[[messages.DidcommMessage], object]] = (
    messages.attachments,
    lambda read: [coordinate_mediation.parse_change(item, coordinate_mediation.VERSIONS[1]) for item in _items(read)],
    lambda read: [coordinate_mediation.parse_change(item, coordinate_mediation.VERSIONS[3]) for item in _items(read)],
    coordinate_mediation.parse_page,
    lambda read: [message_queue.parse_attachment_id(text) for text in read.fields.texts("message_id_list")],
    lambda read: read.fields.count("limit"),
    lambda read: read.fields.flag("live_delivery"),
    lambda read: read.fields.optional_texts({"recipient_key": 2048}),
    lambda read: routing.parse_recipients(read.body.get("next"), "next"),
    lambda read: routing.parse_expiry(read, 0),
    lambda read: routing.parse_delay(read, 1000),
    lambda read: signatures.verify_attachment(read.body.get("did_doc~attach"), "did_doc~attach"),
    lambda read: handshakes.read_attached(read.body.get("DIDDoc"), str(read.body.get("DID")), "DIDDoc"),
)


def _items(read: messages.DidcommMessage) -> list[Any]:
    return read.fields.items("updates")


def invitation(data: bytes) -> None:
    """Read the id of the invitation inside an URL."""
    try:
        assert isinstance(id_inside(data.decode("utf-8", "replace")), str)
    except MediatorError as error:
        check_short(error)


def document(data: bytes) -> None:
    """Read a DID document: what is made of it belongs to its DID, and can be written."""
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError:
        return
    did = "did:example:subject"
    try:
        made = documents.parse(raw, did)
    except MediatorError as error:
        check_short(error)
        return
    assert orjson.dumps(made.raw)
    for key in (*made.key_agreement, *made.authentication):
        assert key.kid.startswith(f"{did}#")
        assert "d" not in key.jwk
        public(key)
    for service in made.services:
        service.endpoint.encode()
        assert all(names.is_ed25519(one) for one in service.recipient_keys)


def did(data: bytes) -> None:
    """Resolve a DID that carries its document, under the name it is compared by."""
    text = data.decode("utf-8", "replace")
    with suppress(UnresolvedDidError):
        made = resolver.read(text)
        assert made.did == text
        assert names.canonical(text) is not None or len(text) > names.MAX_CANONICAL
    with suppress(UnresolvedDidError):
        assert resolver.url_of(text).startswith("https://")


def name(data: bytes) -> None:
    """Bring a name into its one form, which has no other."""
    text = data.decode("utf-8", "replace")
    made = names.canonical(text)
    if made is None:
        return
    assert names.canonical(made) == made
    assert made.isascii()
    assert len(made) <= names.MAX_CANONICAL
    if names.is_ed25519(made):
        raw = names.verkey(made)
        assert names.from_verkey(raw) == made
        assert names.canonical(names.base58(raw)) == made
        assert names.unbase58(names.base58(raw)) == raw


def queued(data: bytes) -> None:
    """Look at an envelope as the mailbox does: what is let in by a forward can be handed out inside other JSON."""
    found = shape.recipients(data)
    assert found is None or 1 <= len(found) <= shape.MAX_RECIPIENTS
    text = message_queue.parse_attachment_id(data.decode("utf-8", "replace"))
    assert text is None or data.decode() in (message_queue.attachment_id(*text), f"{text[0]}-{text[1]}")
    orjson.dumps({"messages~attach": [{"message": message_pickup.envelope_json(data)}]})


_V1 = {
    "enc": reading.V1_CIPHER,
    "typ": "JWM/1.0",
    "alg": "Anoncrypt",
    "recipients": [{"encrypted_key": "AA", "header": {"kid": "x"}}],
}
_KEY = "did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK"
_EPK = {"kty": "OKP", "crv": "X25519", "x": "AA"}


def _protected(header: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(header)).decode().rstrip("=")


def _v2(**more: Any) -> bytes:
    apv = base64.urlsafe_b64encode(hashlib.sha256(b"did:x:y#1").digest()).decode().rstrip("=")
    header = {"alg": reading.ANONCRYPT, "enc": "A256GCM", "apv": apv, "epk": _EPK, **more}
    recipients = [{"header": {"kid": "did:x:y#1"}, "encrypted_key": "AA"}]
    sealed = {"protected": _protected(header), "recipients": recipients, "iv": "AA", "ciphertext": "AA", "tag": "AA"}
    return orjson.dumps(sealed)


_ENVELOPES = (
    orjson.dumps({"protected": _protected(_V1), "iv": "AA", "ciphertext": "AA", "tag": "AA"}),
    _v2(),
    _v2(alg=reading.AUTHCRYPT, enc="A256CBC-HS512", apu="ZGlkOng6eiMx", skid="did:x:z#1"),
    b'{"ciphertext": "AA", "protected": "e30"}',
)
_PLAINTEXTS = (
    b'{"@type": "https://didcomm.org/messagepickup/2.0/messages-received", "@id": "1", "message_id_list": ["1-2"],'
    b' "~thread": {"thid": "t", "pthid": "p"}, "~transport": {"return_route": "all"}, "limit": 1}',
    b'{"type": "https://didcomm.org/coordinate-mediation/3.0/recipient-update", "id": "1", "from": "did:x:y",'
    b' "to": ["did:x:y"], "body": {"updates": [{"recipient_did": "did:x:y", "action": "add"}], "paginate":'
    b' {"limit": 1, "offset": 0}, "next": ["a"], "delay_milli": -5, "expires_time": 1}, "expires_time": 1}',
    b'{"@type": "did:sov:BzCbsNYhMrjHiqZDTUASHg;spec/didexchange/1.0/request", "@id": "1", "DID": "a", "DIDDoc":'
    b' {"id": "a", "publicKey": []}, "did_doc~attach": {"data": {"base64": "e30", "jws": {"protected": "e30",'
    b' "signature": "AA", "header": {"kid": "k"}}}}, "~attach": [{"@id": "1", "data": {"json": {}}}]}',
)

DIDCOMM: dict[str, tuple[Callable[[bytes], None], Sequence[bytes]]] = {
    "envelope": (envelope, _ENVELOPES),
    "layer": (layer, (*_PLAINTEXTS, *_ENVELOPES, b'{"signatures": [{"protected": "e30"}], "payload": "e30"}')),
    "invitation": (invitation, (b"eyJAaWQiOiAieCJ9", b"e30", b"eyJpZCI6ICJcdTAwMDAifQ==", b"-_-")),
    "document": (
        document,
        (
            b'{"verificationMethod": [{"id": "#k", "type": "Multikey", "publicKeyMultibase":'
            b' "z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK"}, {"id": "#j", "type": "JsonWebKey2020",'
            b' "publicKeyJwk": {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}}],'
            b' "authentication": ["#k"], "keyAgreement": [{"id":'
            b' "#x", "type": "X25519KeyAgreementKey2019", "publicKeyBase58": "111"}], "service": [{"id": "#s", "type":'
            b' ["DIDCommMessaging"], "serviceEndpoint": [{"uri": "https://x", "routingKeys": ["a"], "accept": []}]}]}',
            b'{"publicKey": [], "service": [{"type": "IndyAgent", "priority": 1e9, "serviceEndpoint": "http://x",'
            b' "recipientKeys": ["#1"]}], "authentication": [{"publicKey": "a#1"}]}',
        ),
    ),
    "did": (
        did,
        (
            _KEY.encode(),
            b"did:peer:0z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK",
            b"did:peer:2.Ez6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc.SeyJ0IjoiZG0iLCJzIjoiaHR0cDovL3gifQ",
            b"did:peer:4zQmWaQkjZVrFmnEyMrDuXsckFPEDyPXZBRpEREx9b3V5Jd5:z6Mk",
            b"did:web:example.org%3A8443:a:b",
        ),
    ),
    "name": (name, (_KEY.encode(), _KEY.encode() + b"#z6Mk", b"did:peer:4zQm:z2", b"1" * 32, b"did:web:x;a=b?c/d#e")),
    "queued": (queued, (*_ENVELOPES, b"12-34", b'{"protected": NaN}')),
}
"""Each target with seeds for it."""
