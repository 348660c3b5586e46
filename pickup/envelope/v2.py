"""The interface of a library for v2 envelopes, the default one (``didcomm-messaging`` with authlib), and the choice."""

from collections.abc import Mapping, Sequence
from typing import Any

from pickup.dids.document import PublicKey, Secret
from pickup.envelope.keys import private, public
from pickup.envelope.reading import Jwe
from pickup.message import encode

# isort: split
# After the keys, which import the JOSE library without its warnings.
from typing import Protocol

from didcomm_messaging.crypto.backend.authlib import AuthlibCryptoService, AuthlibKey, AuthlibSecretKey

from mediator.errors import SetupError


class _PublicKey(AuthlibKey):  # type: ignore[misc]
    """Of any curve: the library can encrypt to all, but writes the multikey of few, which nothing here asks for."""

    @classmethod
    def key_to_multikey(cls, key: Any) -> str:
        return ""


class _Crypto(AuthlibCryptoService):  # type: ignore[misc]
    """With the cipher for anoncrypt that every receiver has to know."""

    def _build_header_ecdh_es(self, to: Any, alg: str, enc: str) -> Any:
        return super()._build_header_ecdh_es(to, alg, "A256CBC-HS512")


class DidcommMessagingLibrary:
    """Implements :class:`pickup.envelope.v2.V2Library`."""

    def __init__(self) -> None:
        self._crypto = _Crypto()

    async def decrypt(self, jwe: Jwe, recipient: Secret, sender: PublicKey | None) -> bytes:
        """Open a layer."""
        # The JOSE library takes it parsed too.
        envelope: Any = jwe.only_for(recipient.kid)
        key = AuthlibSecretKey(private(recipient), recipient.kid)
        if sender is None:
            payload: bytes = await self._crypto.ecdh_es_decrypt(envelope, key)
        else:
            payload = await self._crypto.ecdh_1pu_decrypt(envelope, key, _PublicKey(public(sender), sender.kid))
        return payload

    async def encrypt(self, message: Mapping[str, Any], to: Sequence[PublicKey], sender: Secret | None) -> bytes:
        """Seal."""
        keys = [_PublicKey(public(key), key.kid) for key in to]
        plaintext = encode(message)
        if sender is None:
            sealed: bytes = await self._crypto.ecdh_es_encrypt(keys, plaintext)
        else:
            secret = AuthlibSecretKey(private(sender), sender.kid)
            sealed = await self._crypto.ecdh_1pu_encrypt(keys, secret, plaintext)
        return sealed


DIDCOMM_MESSAGING = "didcomm-messaging"
DIDCOMM = "didcomm"


class V2Library(Protocol):
    """Encrypts and decrypts one layer, with keys that were chosen and checked before; any exception is a refusal."""

    async def decrypt(self, jwe: Jwe, recipient: Secret, sender: PublicKey | None) -> bytes:
        """Open a layer with the key of one of its recipients; ``sender`` is given for authcrypt."""

    async def encrypt(self, message: Mapping[str, Any], to: Sequence[PublicKey], sender: Secret | None) -> bytes:
        """Seal for keys of one curve: authcrypt from a key of ours on that curve, else anoncrypt."""


def load_library(name: str) -> V2Library:
    """Return the library that the setting ``didcomm.envelope_library`` names.

    Raises :class:`SetupError` when it is not installed.
    """
    if name == DIDCOMM_MESSAGING:
        return DidcommMessagingLibrary()
    try:
        from pickup.envelope.v2_didcomm import DidcommLibrary
    except ModuleNotFoundError as error:
        raise SetupError(
            f"didcomm.envelope_library: the package {error.name} is not installed; run "
            "pip install --no-deps didcomm==0.3.2 attrs base58 packaging varint, or use didcomm-messaging"
        ) from None
    return DidcommLibrary()
