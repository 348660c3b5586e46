"""v2 envelopes by ``didcomm-messaging`` with its authlib backend, as it is installed: what ours are held against."""

from collections.abc import Mapping, Sequence
from typing import Any

from pickup.dids.document import PublicKey, Secret
from pickup.envelope.reading import Jwe
from pickup.envelope.v2 import JoseLibrary, private, public
from pickup.message import encode

# isort: split
# After our own module, which suppresses the JOSE library's import warnings.
from didcomm_messaging.crypto.backend.authlib import AuthlibCryptoService, AuthlibKey, AuthlibSecretKey


class _PublicKey(AuthlibKey):
    """Of any curve: it can encrypt to all, but writes the multikey of few, which nothing here asks for."""

    @classmethod
    def key_to_multikey(cls, key: Any) -> str:
        return ""


class DidcommMessaging(JoseLibrary):
    """Seals anonymously with XC20P."""

    def __init__(self) -> None:
        self._crypto = AuthlibCryptoService()

    async def decrypt(self, jwe: Jwe, recipient: Secret, sender: PublicKey | None) -> bytes:
        # Its JOSE library takes it parsed too.
        envelope: Any = jwe.only_for(recipient.kid)
        key = AuthlibSecretKey(private(recipient), recipient.kid)
        if sender is None:
            return await self._crypto.ecdh_es_decrypt(envelope, key)
        return await self._crypto.ecdh_1pu_decrypt(envelope, key, _PublicKey(public(sender), sender.kid))

    async def encrypt(self, message: Mapping[str, Any], to: Sequence[PublicKey], sender: Secret | None) -> bytes:
        keys = [_PublicKey(public(key), key.kid) for key in to]
        if sender is None:
            return await self._crypto.ecdh_es_encrypt(keys, encode(message))
        return await self._crypto.ecdh_1pu_encrypt(keys, AuthlibSecretKey(private(sender), sender.kid), encode(message))
