"""What an identity is called: its DIDs, made of its keys and of where the door is reached, always the same way."""

import ipaddress
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import did_peer_2
import did_peer_4

from mediator.mediation.names import base58
from pickup.dids import material
from pickup.dids.keys import Keys
from pickup.dids.parsing import CONTEXT, V2_SERVICE

_V1_ACCEPT = ["didcomm/aip1", "didcomm/aip2;env=rfc19"]
_V2_ACCEPT = ["didcomm/v2"]
_SEGMENT = re.compile(r"[A-Za-z0-9._~-]+")


def endpoints(public_url: str) -> tuple[str, str]:
    """Return where the door is reached: HTTP, WebSocket."""
    return public_url, "ws" + public_url.removeprefix("http")


def v2_did(keys: Keys, public_url: str) -> str:
    """Make the did:peer:2: all curves to seal for, flat services as every reader of the method knows them."""
    specs = [did_peer_2.KeySpec.key_agreement(pair.multibase) for pair in keys.agreement]
    specs.append(did_peer_2.KeySpec.authentication(keys.signing.multibase))
    return str(did_peer_2.generate(specs, [_v2_service(url) for url in endpoints(public_url)]))


def _v2_service(url: str) -> dict[str, Any]:
    return {"type": V2_SERVICE, "serviceEndpoint": url, "routingKeys": [], "accept": _V2_ACCEPT}


def v1_did(keys: Keys, public_url: str) -> str:
    """Make the did:peer:4 in its long form: the kinds of keys that the wallets of v1 have known the longest."""
    document = {
        "@context": [CONTEXT],
        "verificationMethod": [
            {
                "id": "#key-1",
                "type": "Ed25519VerificationKey2018",
                "publicKeyBase58": base58(keys.verkey),
            },
            {
                "id": "#key-2",
                "type": "X25519KeyAgreementKey2019",
                "publicKeyBase58": base58(material.raw_of(keys.derived.public)),
            },
        ],
        "authentication": ["#key-1"],
        "keyAgreement": ["#key-2"],
        "service": [
            {
                "id": f"#didcomm-{priority}",
                "type": "did-communication",
                "priority": priority,
                "recipientKeys": ["#key-1"],
                "routingKeys": [],
                "serviceEndpoint": url,
                "accept": _V1_ACCEPT,
            }
            for priority, url in enumerate(endpoints(public_url))
        ],
    }
    return str(did_peer_4.encode(document))


def sov_did(keys: Keys) -> str:
    """Make the unqualified DID of connections/1.0."""
    return base58(keys.verkey[:16])


def web_did(public_url: str, tenant: str | None) -> str | None:
    """Make the did:web whose document is below the public URL; None when it could not be fetched there.

    ``tenant`` is None for the one that has the door's own path.
    """
    url = urlsplit(public_url)
    if url.scheme != "https" or _is_number(url.hostname or ""):
        return None
    segments = [segment for segment in url.path.split("/") if segment] + ([tenant] if tenant else [])
    if not all(map(_SEGMENT.fullmatch, segments)):
        return None
    return ":".join(["did:web", url.netloc.replace(":", "%3A"), *segments])


def web_path(did: str) -> str:
    """Return the URL path at which the document of a did:web is asked for."""
    segments = did.split(":")[3:] or [".well-known"]
    return f"/{'/'.join(segments)}/did.json"


def web_document(did: str, no: int, keys: Keys, public_url: str) -> Mapping[str, Any]:
    """Write the document of a did:web; ``no`` is in the key ids, so that those of earlier keys stay other ids."""
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


def web_fragments(no: int, keys: Keys) -> Mapping[str, Any]:
    """Return the pairs of a did:web by their fragments."""
    return {f"key-{no}-{pair.curve.lower()}": pair for pair in (*keys.agreement, keys.signing)}


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
