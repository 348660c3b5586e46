"""What the opener asks of a v2 library: one layer at a time, with the keys already chosen and looked at."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pickup.dids.document import Key, Secret
from pickup.envelope.reading import Jwe


class V2(Protocol):
    """A library for encrypted messages. What it cannot do, it says by any exception."""

    async def decrypt(self, jwe: Jwe, kid: str, recipient: Secret, sender: Key | None) -> bytes:
        """Open a layer with the key of the recipient ``kid``; ``sender`` is there when the layer says who sealed it."""

    async def encrypt(self, message: Mapping[str, Any], to: Sequence[Key], sender: Secret | None) -> bytes:
        """Seal for keys of one curve: authcrypt from a key of ours on that curve, else anoncrypt."""
