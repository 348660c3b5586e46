"""Reads invitations, and makes the v1 handshakes of a client: did-exchange (RFC 0023), connections (RFC 0160)."""

import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import did_peer_4
import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from mediator.errors import MediatorError
from pickup.client import conversation
from pickup.client.conversation import ClientResources, raise_problem
from pickup.client.plaintext import ClientError, Json, NoAnswerError, Plaintext, base64url, id_of, read, unbase64, write
from pickup.client.wallet import Link, Wallet
from pickup.message import encode
from pickup.rules import names
from pickup.rules.records import Generation

PARAMETERS = ("oob", "_oob", "c_i", "d_m")


@dataclass(frozen=True, slots=True)
class MediatorInvitation:
    """An out-of-band invitation, 1.x or 2.0, or one of connections/1.0."""

    generation: Generation
    id: str | None
    """None for a bare DID."""
    did: str | None
    """v2: the mediator's DID; v1: its DID when the service is one."""
    key: str | None
    """v1: canonical key of the service."""
    endpoint: str | None
    """v1: URL of the service."""
    raw: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> "MediatorInvitation":
        """Read an invitation's URL, or a mediator's DID (v2); :class:`ClientError` when it is neither."""
        if text.startswith("did:"):
            return cls(Generation.V2, None, text, None, None, {})
        written = _inside(text)
        if written is None:
            raise ClientError("expected a URL with an invitation in oob=, _oob= or c_i=, or a DID")
        try:
            return cls._read(orjson.loads(unbase64(written)))
        except ValueError as error:
            raise ClientError(f"invalid invitation: {error!r}") from error

    @classmethod
    async def load(cls, text: str, session: aiohttp.ClientSession, seconds: float) -> "MediatorInvitation":
        """Read what :meth:`parse` reads, or a short link (RFC 0434 §URL Shortening), which takes a request.

        Raises :class:`ClientError`, and what :func:`~pickup.client.conversation.get_json` raises.
        """
        if not text.startswith(("http://", "https://")) or _inside(text) is not None:
            return cls.parse(text)
        found = await conversation.get_json(session, text, seconds)
        return cls.parse(found) if isinstance(found, str) else cls._read(found)

    @classmethod
    def _read(cls, raw: Any) -> "MediatorInvitation":
        try:
            return cls._v1(raw) if "@type" in raw else cls._v2(raw)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ClientError(f"invalid invitation: {error!r}") from error

    @classmethod
    def _v2(cls, raw: Mapping[str, Any]) -> "MediatorInvitation":
        return cls(Generation.V2, raw["id"], raw["from"], None, None, raw)

    @classmethod
    def _v1(cls, raw: Mapping[str, Any]) -> "MediatorInvitation":
        if "recipientKeys" in raw:
            service: Any = raw
        else:
            # RFC 0434: one service of several may be chosen; handshakes are made over HTTP.
            services = raw["services"]
            service = next((each for each in services if _is_http(each)), services[0])
        if isinstance(service, str):
            return cls(Generation.V1, raw["@id"], service, None, None, raw)
        key = names.canonical(service["recipientKeys"][0])
        if key is None:
            raise ValueError(service["recipientKeys"][0])
        return cls(Generation.V1, raw["@id"], None, key, service["serviceEndpoint"], raw)


def _is_http(service: Any) -> bool:
    return isinstance(service, Mapping) and str(service.get("serviceEndpoint")).startswith("http")


def _inside(url: str) -> str | None:
    """Return the invitation that a URL carries; None for one without."""
    try:
        found = parse_qs(urlsplit(url).query)
    except ValueError as error:
        raise ClientError(f"not a URL: {error}") from error
    return next((found[name][0] for name in PARAMETERS if name in found), None)


HANDSHAKES = ("didexchange/1.1", "didexchange/1.0", "connections/1.0")
QUEUE = "didcomm:transport/queue"
"""The endpoint of an agent without one (RFC 0092)."""
V1 = Generation.V1


class ClientHandshake:
    """One handshake with the sender of an invitation."""

    def __init__(
        self,
        invitation: MediatorInvitation,
        resources: ClientResources,
        *,
        label: str,
        endpoint: str | None,
        seconds: float,
    ) -> None:
        """``endpoint`` is this client's own URL, None without one."""
        self._invitation = invitation
        self._wallet = resources.wallet
        self._envelopes = resources.envelopes
        self._session = resources.session
        self._label = label
        self._endpoint = endpoint or QUEUE
        self._seconds = seconds
        self._key, self._url = _service_of(invitation)

    async def make(self, handshake: str) -> Link:
        """Run it, and return the link. Raises :class:`ClientError` when a reply is wrong or unsigned."""
        if handshake not in HANDSHAKES:
            raise ClientError(f"handshake: expected one of {', '.join(HANDSHAKES)}, got {handshake!r}")
        steps: dict[str, Callable[[], Any]] = {
            "didexchange/1.1": self._exchange_1_1,
            "didexchange/1.0": self._exchange_1_0,
            "connections/1.0": self._connections,
        }
        mine, document = await steps[handshake]()
        theirs, endpoints = services(document)
        return Link(V1, mine, theirs, endpoints, invitation=self._invitation.id)

    async def _exchange_1_1(self) -> tuple[str, Json]:
        did, key = self._wallet.new_v1_did(self._endpoint)
        response = await self._request("didexchange/1.1/request", {"label": self._label, "did": did}, key)
        signed = self._signed(response.body.get("did_rotate~attach"))
        if signed.decode(errors="replace") != response.body.get("did"):
            raise ClientError("did_rotate~attach signs another DID than the response has")
        document = dict(did_peer_4.resolve(response.body["did"]))
        await self._complete("didexchange/1.1/complete", response, key, services(document))
        return key, document

    async def _exchange_1_0(self) -> tuple[str, Json]:
        key = self._wallet.new_key()
        # As ACA-Py writes both, and the only form that it reads: the DID is qualified in the document alone.
        did, document = self._old_document(key, "did:sov:")
        attached = _sign_jws(self._wallet, key, orjson.dumps(document))
        body = {"label": self._label, "did": did.removeprefix("did:sov:"), "did_doc~attach": attached}
        response = await self._request("didexchange/1.0/request", body, key)
        theirs = orjson.loads(self._signed(response.body.get("did_doc~attach")))
        await self._complete("didexchange/1.0/complete", response, key, services(theirs))
        return key, theirs

    async def _connections(self) -> tuple[str, Json]:
        key = self._wallet.new_key()
        nym, document = self._old_document(key)
        body = {"label": self._label, "connection": {"DID": nym, "DIDDoc": document}}
        response = await self._request("connections/1.0/request", body, key)
        theirs = self._signed_field(response.body.get("connection~sig"))["DIDDoc"]
        ping = write(V1, "trust_ping/1.0/ping", {"response_requested": False}, pthid=self._invitation.id)
        await self._post(ping, key, *services(theirs))
        return key, dict(theirs)

    async def _request(self, type: str, body: Json, key: str) -> Plaintext:
        request = write(V1, type, body, pthid=self._invitation.id, route="all")
        request["~thread"]["thid"] = id_of(request)
        came = await self._post(request, key, self._key, (self._url,))
        if came is None:
            raise NoAnswerError(f"no answer to {type}")
        opened = await self._envelopes.open(came)
        answer = read(opened.plaintext, opened.generation)
        raise_problem(answer)
        if answer.thid != id_of(request) or answer.name != "response":
            raise ClientError(f"expected the response to {type}, got {answer.type}")
        return answer

    async def _complete(self, type: str, response: Plaintext, key: str, to: tuple[str, tuple[str, ...]]) -> None:
        complete = write(V1, type, thid=response.thid, pthid=self._invitation.id, route="none")
        if await self._post(complete, key, *to) is not None:
            raise ClientError("complete was answered")

    async def _post(self, message: Json, key: str, to: str, urls: tuple[str, ...]) -> bytes | None:
        try:
            sealed = await self._envelopes.seal_v1(encode(message), [to], key)
        except MediatorError as error:
            raise ClientError(str(error)) from error
        url = next((url for url in urls if url.startswith("http")), None)
        if url is None:
            raise ClientError(f"a handshake needs HTTP, the mediator names {', '.join(urls)}")
        return await conversation.post(self._session, url, sealed, V1, self._seconds)

    def _old_document(self, key: str, method: str = "") -> tuple[str, Json]:
        verkey = names.verkey(key)
        nym, written = f"{method}{names.base58(verkey[:16])}", names.base58(verkey)
        return nym, {
            "@context": "https://w3id.org/did/v1",
            "id": nym,
            "publicKey": [
                {"id": f"{nym}#1", "type": "Ed25519VerificationKey2018", "controller": nym, "publicKeyBase58": written}
            ],
            "authentication": [{"type": "Ed25519SignatureAuthentication2018", "publicKey": f"{nym}#1"}],
            "service": [
                {
                    "id": f"{nym};indy",
                    "type": "IndyAgent",
                    "priority": 0,
                    "recipientKeys": [written],
                    "routingKeys": [],
                    "serviceEndpoint": self._endpoint,
                }
            ],
        }

    def _signed(self, attachment: Any) -> bytes:
        """Return what the invitation's key signed in an attachment."""
        try:
            data = attachment["data"]
            jws = data["jws"]
            payload = unbase64(data["base64"])
            signed = f"{jws['protected']}.{base64url(payload)}".encode()
            if (kid := names.canonical(jws["header"]["kid"])) != self._key:
                raise ClientError(f"the response is signed by {kid}, the invitation has {self._key}")
            self._verify(unbase64(jws["signature"]), signed)
        except (KeyError, TypeError, ValueError) as error:
            raise ClientError(f"the response's signature is malformed: {error!r}") from error
        return payload

    def _signed_field(self, field: Any) -> Mapping[str, Any]:
        """Return what the invitation's key signed in a field (RFC 0234)."""
        try:
            if names.canonical(field["signer"]) != self._key:
                raise ClientError("the response is not signed by the invitation's key")
            signed = unbase64(field["sig_data"])
            self._verify(unbase64(field["signature"]), signed)
            (at,) = struct.unpack(">Q", signed[:8])
            # Seconds; Credo writes milliseconds.
            if at and abs((at if at < 1 << 36 else at / 1000) - time.time()) > 3600:
                raise ClientError(f"the response was signed at {at}")
            value: Mapping[str, Any] = orjson.loads(signed[8:])
            return value
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise ClientError(f"the response's signature is malformed: {error!r}") from error

    def _verify(self, signature: bytes, signed: bytes) -> None:
        try:
            Ed25519PublicKey.from_public_bytes(names.verkey(self._key)).verify(signature, signed)
        except InvalidSignature:
            raise ClientError("the response's signature is wrong") from None


def _sign_jws(wallet: Wallet, key: str, payload: bytes) -> Json:
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": base64url(names.verkey(key)), "kid": key}
    protected = base64url(orjson.dumps({"alg": "EdDSA", "kid": key, "jwk": jwk}))
    signature = wallet.sign(key, f"{protected}.{base64url(payload)}".encode())
    jws = {"header": {"kid": key}, "protected": protected, "signature": base64url(signature)}
    return {"@id": "doc", "mime-type": "application/json", "data": {"base64": base64url(payload), "jws": jws}}


def _service_of(invitation: MediatorInvitation) -> tuple[str, str]:
    if invitation.key is not None and invitation.endpoint is not None:
        return invitation.key, invitation.endpoint
    if invitation.did is None or not invitation.did.startswith("did:peer:4"):
        raise ClientError("expected an invitation with a service, or with a did:peer:4")
    key, endpoints = services(dict(did_peer_4.resolve(invitation.did)))
    return key, next((url for url in endpoints if url.startswith("http")), endpoints[0])


def services(document: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the canonical key and the endpoints of a v1 document, old or new, by its services' priority."""
    keys: dict[str, str] = {}
    lists = (document.get(name) or [] for name in ("publicKey", "verificationMethod", "authentication"))
    # What an authentication refers to is an object of another list, or stands there itself.
    for method in (method for listed in lists for method in listed if isinstance(method, Mapping) and "id" in method):
        written = method.get("publicKeyBase58") or "did:key:" + str(method.get("publicKeyMultibase"))
        if (key := names.canonical(written)) is not None:
            keys[method["id"].rpartition("#")[2]] = key
    found = [
        item
        for item in document.get("service") or []
        if item.get("recipientKeys") and isinstance(item.get("serviceEndpoint"), str)
    ]
    found.sort(key=lambda item: int(item.get("priority") or 0))
    for service in found:
        written = str(service["recipientKeys"][0])
        key = keys.get(written.rpartition("#")[2]) or names.canonical(written)
        if key is not None:
            return key, tuple(item["serviceEndpoint"] for item in found)
    raise ClientError("the mediator's document has no service with a key")
