"""v2 envelopes by ``didcomm``, for those who choose it with ``didcomm.envelope_library``.

It only seals. Its ``unpack`` is not used: it parses every key again for each message, opens all layers at once without
bounds on the inner ones, fetches documents for ``from_prior``, and leaves generators for the event loop to close.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from pickup.dids.document import PublicKey, Secret
from pickup.envelope.v2 import JoseLibrary, private, public

# isort: split
# After the keys, which import the JOSE library without its warnings.
from didcomm.common.algorithms import AnonCryptAlg, AuthCryptAlg
from didcomm.core import types
from didcomm.core.anoncrypt import anoncrypt
from didcomm.core.authcrypt import authcrypt

_AUTH = AuthCryptAlg.A256CBC_HS512_ECDH_1PU_A256KW
_ANON = AnonCryptAlg.A256CBC_HS512_ECDH_ES_A256KW
"""The ciphers that every receiver has to know."""


class DidcommLibrary(JoseLibrary):
    """Seals by ``didcomm``."""

    async def encrypt(self, message: Mapping[str, Any], to: Sequence[PublicKey], sender: Secret | None) -> bytes:
        """Seal."""
        keys = [types.Key(kid=key.kid, key=public(key)) for key in to]
        if sender is None:
            sealed = anoncrypt(dict(message), keys, _ANON)
        else:
            sealed = authcrypt(dict(message), keys, types.Key(kid=sender.kid, key=private(sender)), _AUTH)
        return orjson.dumps(sealed.msg)
