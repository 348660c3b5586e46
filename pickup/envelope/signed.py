"""Verifies signatures inside v2 envelopes (JWS)."""

from typing import Any

from mediator.errors import EnvelopeError
from pickup.dids.document import PublicKey
from pickup.envelope.keys import JsonWebSignature, public
from pickup.envelope.reading import SIGNERS, Jws


def verify(jws: Jws, key: PublicKey) -> bytes:
    """Return the signed payload; :class:`EnvelopeError` when this key did not sign it."""
    if SIGNERS.get(key.curve) != jws.alg:
        raise EnvelopeError("the signature's alg is not that of its key")
    whole = {"payload": jws.payload, "signatures": [{"protected": jws.protected, "signature": jws.signature}]}
    try:
        result: Any = JsonWebSignature(algorithms=[jws.alg]).deserialize_json(whole, public(key))
    except Exception as error:
        raise EnvelopeError("the signature is not that of its key") from error
    payload: bytes = result.payload
    return payload
