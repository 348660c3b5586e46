"""Opens and seals envelopes with the libraries, and checks that all layers agree (D8)."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mediator.errors import EnvelopeError, SetupError, UnresolvedDidError
from pickup.dids.document import DidResolver, PublicKey, Secret, Secrets
from pickup.dids.material import multibase, peer_2_fragments
from pickup.envelope import OpenedEnvelope
from pickup.envelope.reading import MAX_V2_RECIPIENTS, Jwe, Jws, V1Envelope, envelope_digest, read, read_layer
from pickup.envelope.v1 import NOT_FOR_US, V1Library
from pickup.envelope.v2 import JoseLibrary, verify
from pickup.envelope.v2_cryptography import CryptographyLibrary
from pickup.rules.names import canonical
from pickup.rules.records import Generation

DIDCOMM_MESSAGING = "didcomm-messaging"
DIDCOMM = "didcomm"
AGREEMENT_CURVES = ("X25519", "P-256", "P-384")
MAX_FRAGMENTS = 4096
"""Peers of which it is remembered that they name the keys of their did:peer:2 otherwise than ``key-1``."""
_PEER_2 = "did:peer:2"


def load_library(name: str) -> JoseLibrary:
    """Return the library that the setting ``didcomm.envelope_library`` names.

    Raises :class:`SetupError` when it is not installed.
    """
    if name == DIDCOMM_MESSAGING:
        return CryptographyLibrary()
    try:
        from pickup.envelope.v2_didcomm import DidcommLibrary
    except ModuleNotFoundError as error:
        raise SetupError(
            f"didcomm.envelope_library: the package {error.name} is not installed; run "
            "pip install --no-deps didcomm==0.3.2 attrs base58 packaging varint, or use didcomm-messaging"
        ) from None
    return DidcommLibrary()


class LibraryEnvelopes:
    """Implements :class:`pickup.envelope.Envelopes`.

    Everything runs on the event loop. A layer costs 0.1 to 0.4 ms, most of it in Python with the interpreter's lock
    held: two threads on two cores open only 0.8 (v1) to 1.0 (v2) times as many envelopes a second
    (``python -m benchmarks envelopes``).
    """

    def __init__(self, resolver: DidResolver, secrets: Secrets, *, max_bytes: int, v2: JoseLibrary) -> None:
        self._resolver = resolver
        self._secrets = secrets
        self._max_bytes = max_bytes
        self._v1 = V1Library(secrets)
        self._v2 = v2
        self._fragments: OrderedDict[str, int] = OrderedDict()
        """Which of :func:`peer_2_fragments` a did:peer:2 names its keys by, of those that do."""

    async def open(self, data: bytes) -> OpenedEnvelope:
        """Open bytes for one of our keys, and check that key, plaintext and signature name the same sender."""
        envelope = read(data, self._max_bytes)
        if isinstance(envelope, V1Envelope):
            return await self._v1.open(envelope)
        digest = envelope_digest(envelope)
        kid, sealed_by, layer = await self._decrypt(envelope)
        if isinstance(layer, Jwe):
            # didcomm.org allows one double encryption: anoncrypt(authcrypt) hides the sender from mediators.
            if sealed_by is not None or layer.sender_kid is None:
                raise EnvelopeError("expected at most an authcrypt layer inside an anoncrypt one")
            # Anybody can wrap the sender's envelope in another anoncrypt layer, so the inner one identifies it.
            digest = envelope_digest(layer)
            kid, sealed_by, layer = await self._decrypt(layer)
        signed_by = None
        if isinstance(layer, Jws):
            signed_by, payload = await self._verify(layer)
            layer = read_layer(payload)
        if not isinstance(layer, dict):
            raise EnvelopeError("expected a plaintext inside its layers")
        _check_consistency(layer, kid, sealed_by, signed_by)
        return OpenedEnvelope(Generation.V2, layer, kid, sealed_by, digest)

    async def verify(self, jws: Jws) -> str:
        """Return the DID as the key id has it; the key must be one for authentication."""
        return (await self._verify(jws))[0]

    async def seal_v1(self, plaintext: bytes, to: Sequence[str], sender: str | None) -> bytes:
        """Seal for canonical Ed25519 keys, from one of ours, or anonymously."""
        return await self._v1.seal(plaintext, to, sender)

    async def seal_v2(self, plaintext: Mapping[str, Any], to: str, sender: str | None) -> bytes:
        """Seal for the key agreement keys of a DID, on the first curve that both sides have, or for one key id.

        Raises :class:`UnresolvedDidError` when its document has no such key, :class:`EnvelopeError` when we have none.
        """
        keys = await self._agreement_keys(to)
        secret = None
        if sender is None:
            curve = keys[0].curve
        else:
            secret = await self._secret(sender, [key.curve for key in keys])
            curve = secret.curve
        same = [key for key in keys if key.curve == curve][:MAX_V2_RECIPIENTS]
        try:
            return await self._v2.encrypt(plaintext, same, secret)
        except Exception as error:
            raise EnvelopeError("cannot be sealed for these keys") from error

    async def _decrypt(self, jwe: Jwe) -> tuple[str, str | None, Jwe | Jws | dict[str, Any]]:
        """Return the key of ours that opened a layer, the DID whose key sealed it, and the layer inside."""
        secret = await self._find_recipient(jwe)
        sender, did = None, None
        if jwe.sender_kid is not None:
            did, sender = await self._key(jwe.sender_kid, "key_agreement")
            if sender.curve != jwe.curve:
                raise EnvelopeError("the sender's key and epk are on different curves")
        try:
            payload = await self._v2.decrypt(jwe, secret, sender)
        except Exception as error:
            raise EnvelopeError(NOT_FOR_US) from error
        if did is not None and sender is not None:
            self._remember_fragment(did, sender)
        return secret.kid, did, read_layer(payload)

    async def _find_recipient(self, jwe: Jwe) -> Secret:
        """Return the first key of ours among the recipients, on the curve of the layer."""
        renewed = False
        while True:
            for kid in jwe.recipients:
                secret = self._secrets.kid(kid)
                if secret is not None and secret.curve == jwe.curve:
                    return secret
            if renewed or not await self._secrets.renew():
                raise EnvelopeError(NOT_FOR_US)
            renewed = True

    async def _verify(self, jws: Jws) -> tuple[str, bytes]:
        did, key = await self._key(jws.kid, "authentication")
        return did, verify(jws, key)

    async def _key(self, kid: str, purpose: str) -> tuple[str, PublicKey]:
        """Return the DID of a key id as written, and its key, which the DID's document must list for the purpose."""
        did, _, fragment = kid.partition("#")
        document = await self._resolver.resolve(did)
        keys: tuple[PublicKey, ...] = getattr(document, purpose)
        for key in keys:
            # The document of a did:peer:4 may name its keys by either form of the DID.
            owner, _, own_fragment = key.kid.partition("#")
            if owner != did and (canonical(did) is None or canonical(owner) != canonical(did)):
                continue
            if own_fragment == fragment:
                return did, key
            if did.startswith(_PEER_2) and fragment in peer_2_fragments(multibase(key.jwk)):
                return did, replace(key, kid=kid)
        raise UnresolvedDidError(f"the sender's document has no such key for {purpose}")

    async def _agreement_keys(self, to: str) -> list[PublicKey]:
        if "#" in to:
            keys = [(await self._key(to, "key_agreement"))[1]]
        else:
            keys = list((await self._resolver.resolve(to)).key_agreement)
            form = self._fragments.get(to)
            if form is not None:
                keys = [replace(key, kid=f"{to}#{peer_2_fragments(multibase(key.jwk))[form]}") for key in keys]
        keys = [key for key in keys if key.curve in AGREEMENT_CURVES]
        if not keys:
            raise UnresolvedDidError("the receiver's document has no key to seal for")
        return keys

    def _remember_fragment(self, did: str, key: PublicKey) -> None:
        """Note how a peer names its keys: it finds its secrets by the same names."""
        if not did.startswith(_PEER_2):
            return
        fragment = key.kid.partition("#")[2]
        # The usual key-1 is no multibase, which is slow to write.
        forms = () if "-" in fragment else peer_2_fragments(multibase(key.jwk))
        if fragment in forms:
            self._fragments[did] = forms.index(fragment)
            self._fragments.move_to_end(did)
            if len(self._fragments) > MAX_FRAGMENTS:
                self._fragments.popitem(last=False)
        else:
            self._fragments.pop(did, None)

    async def _secret(self, sender: str, curves: Sequence[str]) -> Secret:
        """Return our key on the first of the receiver's curves that we have."""
        document = await self._resolver.resolve(sender)
        secrets = [self._secrets.kid(key.kid) for key in document.key_agreement]
        for curve in curves:
            for secret in secrets:
                if secret is not None and secret.curve == curve:
                    return secret
        raise EnvelopeError("expected a key of ours on a curve of the receiver's")


def _check_consistency(plaintext: Mapping[str, Any], kid: str, sealed_by: str | None, signed_by: str | None) -> None:
    """Check the message layer addressing consistency (DIDComm v2 §message-layer-addressing-consistency)."""
    claimed = plaintext.get("from")
    if claimed is not None and not isinstance(claimed, str):
        raise EnvelopeError("expected a DID in from")
    for did, what in ((sealed_by, "sealed"), (signed_by, "signed")):
        if did is None or did == claimed:
            continue
        author = None if claimed is None else canonical(claimed)
        if author is None or author != canonical(did):
            raise EnvelopeError(f"from is not the DID whose key {what} the message")
    to = plaintext.get("to")
    if to is not None:
        if not isinstance(to, list) or not all(isinstance(did, str) for did in to):
            raise EnvelopeError("expected a list of DIDs in to")
        mine = kid.partition("#")[0]
        if mine not in to and (canonical(mine) or "") not in {canonical(did) for did in to}:
            raise EnvelopeError("to does not name the DID the message is encrypted for")
