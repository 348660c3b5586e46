"""Signatures inside v2 envelopes: only that of a key its signer authenticates with counts."""

from typing import Any

from mediator.errors import EnvelopeError
from pickup.dids.document import Key
from pickup.envelope.keys import JsonWebSignature, public
from pickup.envelope.reading import SIGNERS, Jws


def verified(jws: Jws, key: Key) -> bytes:
    """Return what was signed; :class:`EnvelopeError` when it was not signed by this key."""
    if SIGNERS.get(key.curve) != jws.alg:
        raise EnvelopeError("the signature's alg is not that of its key")
    whole = {"payload": jws.payload, "signatures": [{"protected": jws.protected, "signature": jws.signature}]}
    try:
        result: Any = JsonWebSignature(algorithms=[jws.alg]).deserialize_json(whole, public(key))
    except Exception as error:
        raise EnvelopeError("the signature is not that of its key") from error
    payload: bytes = result.payload
    return payload
