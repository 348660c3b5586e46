"""Makes the DIDs and documents of our identities from their keys and the public URL, always the same way."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import did_peer_2
import did_peer_4

from pickup.dids import material
from pickup.dids.identity_keys import IdentityKeys
from pickup.dids.parsing import CONTEXT, V2_SERVICE
from pickup.mediation.names import base58, canonical

_V1_ACCEPT = ["didcomm/aip1", "didcomm/aip2;env=rfc19"]
_V2_ACCEPT = ["didcomm/v2"]
_SEGMENT = re.compile(r"[A-Za-z0-9._~-]+")


def endpoints(public_url: str) -> tuple[str, str]:
    """Return the URLs of the door: HTTP, WebSocket."""
    return public_url, "ws" + public_url.removeprefix("http")


def v1_services(public_url: str, name: str, type: str, key: str, first: int = 0) -> list[dict[str, Any]]:
    """Write the services of a v1 document, one for each URL of the door.

    Their ids are ``name`` and a number from ``first`` on. The order of the fields is part of the DIDs hashed from it.
    """
    return [
        {
            "id": f"{name}{first + priority}",
            "type": type,
            "priority": priority,
            "recipientKeys": [key],
            "routingKeys": [],
            "serviceEndpoint": url,
        }
        for priority, url in enumerate(endpoints(public_url))
    ]


def v2_did(keys: IdentityKeys, public_url: str, invitation: str | None = None) -> str:
    """Make the did:peer:2 in the one form that every known reader takes.

    It has keys of 32 bytes only, and one service whose endpoint is one object (DIDComm v2.1 §service-endpoint): some
    readers refuse longer keys or a second service, others read nothing in a text or a list of objects.

    ``invitation`` is the canonical key of one: as a second key for authentication it makes a DID of its own.
    """
    return _peer_2(keys, [public_url], invitation)


def socket_did(keys: IdentityKeys, public_url: str, invitation: str | None = None) -> str:
    """Make the did:peer:2 with a second service for the WebSocket, where wallets look for it before they go live."""
    return _peer_2(keys, endpoints(public_url), invitation)


def _peer_2(keys: IdentityKeys, urls: Sequence[str], invitation: str | None) -> str:
    specs = [
        did_peer_2.KeySpec.key_agreement(keys.agreement[0].multibase),
        did_peer_2.KeySpec.authentication(keys.signing.multibase),
    ]
    if invitation is not None:
        specs.append(did_peer_2.KeySpec.authentication(invitation.removeprefix("did:key:")))
    services = [{"type": V2_SERVICE, "serviceEndpoint": {"uri": url, "accept": _V2_ACCEPT}} for url in urls]
    return str(did_peer_2.generate(specs, services))


def invitation_key(did: str) -> str | None:
    """Return the canonical key of the invitation that a DID of ours was made for; None for any other DID."""
    signing = [part[1:] for part in did.split(".") if part.startswith("Vz")]
    return canonical(f"did:key:{signing[1]}") if did.startswith("did:peer:2") and len(signing) == 2 else None


def v1_did(keys: IdentityKeys, public_url: str) -> str:
    """Make the did:peer:4 in its long form, with the key types that v1 wallets have known the longest."""
    document = {
        "@context": [CONTEXT],
        "verificationMethod": [
            {"id": "#key-1", "type": "Ed25519VerificationKey2018", "publicKeyBase58": base58(keys.verkey)},
            {
                "id": "#key-2",
                "type": "X25519KeyAgreementKey2019",
                "publicKeyBase58": base58(material.raw_of(keys.derived.public)),
            },
        ],
        "authentication": ["#key-1"],
        "keyAgreement": ["#key-2"],
        "service": [
            {**service, "accept": _V1_ACCEPT}
            for service in v1_services(public_url, "#didcomm-", "did-communication", "#key-1")
        ],
    }
    return str(did_peer_4.encode(document))


def sov_did(keys: IdentityKeys) -> str:
    """Make the unqualified DID of connections/1.0."""
    return base58(keys.verkey[:16])


def web_did(public_url: str, tenant: str | None) -> str | None:
    """Make the did:web whose document is below the public URL; None when the method does not allow that URL.

    ``tenant`` is None for the tenant that has the door's own path.
    """
    url = urlsplit(public_url)
    if url.scheme != "https" or _is_number(url.hostname or ""):
        return None
    segments = [segment for segment in url.path.split("/") if segment] + ([tenant] if tenant else [])
    if not all(map(_SEGMENT.fullmatch, segments)):
        return None
    return ":".join(["did:web", url.netloc.replace(":", "%3A"), *segments])


def web_path(did: str) -> str:
    """Return the URL path of the document of a did:web."""
    segments = did.split(":")[3:] or [".well-known"]
    return f"/{'/'.join(segments)}/did.json"


def web_document(did: str, no: int, keys: IdentityKeys, public_url: str) -> Mapping[str, Any]:
    """Write the document of a did:web; ``no`` is part of the key ids, so that rotated keys have other ids."""
    pairs = {f"{did}#{fragment}": pair for fragment, pair in web_fragments(no, keys).items()}
    return {
        "@context": [CONTEXT, "https://w3id.org/security/suites/jws-2020/v1"],
        "id": did,
        "verificationMethod": [
            {"id": kid, "type": "JsonWebKey2020", "controller": did, "publicKeyJwk": dict(pair.public)}
            for kid, pair in pairs.items()
        ],
        "authentication": [kid for kid, pair in pairs.items() if pair is keys.signing],
        "keyAgreement": [kid for kid, pair in pairs.items() if pair is not keys.signing],
        "service": [
            {"id": f"{did}#didcomm-{at}", "type": V2_SERVICE, "serviceEndpoint": {"uri": url, "accept": _V2_ACCEPT}}
            for at, url in enumerate(endpoints(public_url))
        ],
    }


def web_fragments(no: int, keys: IdentityKeys) -> Mapping[str, Any]:
    """Return the pairs of a did:web by their fragments."""
    return {f"key-{no}-{pair.curve.lower()}": pair for pair in (*keys.agreement, keys.signing)}


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
