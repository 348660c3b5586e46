"""The interface of a library for DIDComm v2 envelopes, and the choice of one."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mediator.errors import SetupError
from pickup.dids.document import PublicKey, Secret
from pickup.envelope.reading import Jwe

DIDCOMM_MESSAGING = "didcomm-messaging"
DIDCOMM = "didcomm"


class V2Library(Protocol):
    """Encrypts and decrypts one layer, with keys that were chosen and checked before; any exception is a refusal."""

    async def decrypt(self, jwe: Jwe, kid: str, recipient: Secret, sender: PublicKey | None) -> bytes:
        """Open a layer with the key of the recipient ``kid``; ``sender`` is given for authcrypt."""

    async def encrypt(self, message: Mapping[str, Any], to: Sequence[PublicKey], sender: Secret | None) -> bytes:
        """Seal for keys of one curve: authcrypt from a key of ours on that curve, else anoncrypt."""


def load_library(name: str) -> V2Library:
    """Return the library that the setting ``didcomm.envelope_library`` names.

    Raises :class:`SetupError` when it is not installed.
    """
    if name == DIDCOMM_MESSAGING:
        from pickup.envelope.v2_messaging import DidcommMessagingLibrary

        return DidcommMessagingLibrary()
    try:
        from pickup.envelope.v2_didcomm import DidcommLibrary
    except ModuleNotFoundError as error:
        raise SetupError(
            f"didcomm.envelope_library: the package {error.name} is not installed; run "
            "pip install --no-deps didcomm==0.3.2 attrs base58 packaging varint, or use didcomm-messaging"
        ) from None
    return DidcommLibrary()
