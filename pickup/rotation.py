"""Reads ``from_prior``, by which a v2 peer changes its DID or ends its connection (DIDComm v2.1 §DID Rotation, D14)."""

import hashlib
from collections.abc import Mapping
from typing import Any

from mediator.errors import BadRequestError, EnvelopeError, UnresolvedDidError
from mediator.fields import whole_number
from pickup.dispatcher import InboundRequest, check_expiry
from pickup.envelope.reading import read_jwt
from pickup.rules.connecting import FROM_PRIOR
from pickup.rules.names import canonical
from pickup.rules.records import DidRotation
from pickup.rules.replays import CLOCK_SKEW


async def read_rotation(request: InboundRequest) -> DidRotation | None:
    """Return the verified rotation of a message; None when it has none, or repeats the last one of its connection.

    Raises :class:`BadRequestError` naming ``from_prior``, and :class:`UnresolvedDidError` for an old DID without a
    document.
    """
    message, caller = request.message, request.caller
    if message.from_prior is None or message.type.name == "forward":
        return None
    check_expiry(request)
    try:
        jws, claims = read_jwt(message.from_prior)
        prior_did = _did(claims, "iss")
        if request.connection is not None and request.connection.prior_did == prior_did:
            # It is repeated until the peer hears from us; by then the document of the old DID may be gone.
            return None
        signed_by = canonical(await request.context.envelopes.verify(jws))
    except UnresolvedDidError as error:
        raise UnresolvedDidError(f"{FROM_PRIOR}: {error}") from None
    except EnvelopeError as error:
        raise BadRequestError(FROM_PRIOR, str(error).partition(": ")[2]) from None
    if signed_by != prior_did:
        raise BadRequestError(FROM_PRIOR, "expected the signature of a key of its iss")
    signed_at, now = whole_number(claims.get("iat")), request.mediation.clock()
    if signed_at is None or not 0 <= signed_at * 1000 <= now + CLOCK_SKEW:
        raise BadRequestError(FROM_PRIOR, f"expected Unix seconds that are past as its iat; it is {now // 1000} here")
    ends = claims.get("sub") is None
    if ends and caller != prior_did and canonical(request.me) not in _audience(claims):
        # Nothing else in an anonymous ending says whom it is for: whoever was ever told one could repeat it here.
        raise BadRequestError(FROM_PRIOR, "an ending has to be sealed by its iss, or to have our DID as its aud")
    if not ends and (caller is None or caller != _did(claims, "sub") or caller == prior_did):
        raise BadRequestError(FROM_PRIOR, "expected a sub that is the new DID, which sealed the message, and no iss")
    sender = request.sender or ""
    return DidRotation(
        tenant=request.tenant,
        prior_did=prior_did,
        caller=None if ends else caller,
        their_did=sender,
        my_did=request.me.partition("#")[0],
        # The document is in the cache: the envelope was opened with it.
        endpoint=None if ends else (await request.context.resolver.resolve(sender)).endpoint,
        signed_at=signed_at * 1000,
        mark=hashlib.blake2b(f"{jws.protected}.{jws.payload}".encode(), digest_size=16).digest(),
    )


def _did(claims: Mapping[str, Any], name: str) -> str:
    value = claims.get(name)
    did = canonical(value) if isinstance(value, str) and value.startswith("did:") else None
    if did is None:
        raise BadRequestError(FROM_PRIOR, f"expected a DID as its {name}")
    return did


def _audience(claims: Mapping[str, Any]) -> set[str | None]:
    """Return whom a JWT is for (RFC 7519 §4.1.3), a text or a list."""
    written = claims.get("aud")
    named = written if isinstance(written, list) else [written]
    return {canonical(one) for one in named if isinstance(one, str)}
