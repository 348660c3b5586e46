"""Opens and seals envelopes of both generations by the libraries, and checks that all they say agrees (D8)."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from mediator.errors import EnvelopeError, UnresolvedDidError
from mediator.mediation.names import canonical
from mediator.mediation.records import Generation
from pickup.dids.document import Key, Resolver, Secret, Secrets
from pickup.envelope import Opened
from pickup.envelope.reading import MAX_V2_RECIPIENTS, Jwe, Jws, V1Envelope, mark_of, read, read_layer
from pickup.envelope.signed import verified
from pickup.envelope.v1 import NOT_FOR_US, V1
from pickup.envelope.v2 import V2

AGREEING = ("X25519", "P-256", "P-384")


class LibraryEnvelopes:
    """Implements :class:`pickup.envelope.Envelopes`.

    All is done on the event loop. A layer costs 0.1 to 0.4 ms, most of it in Python that holds the interpreter's lock:
    a pool of two threads on two cores opens 0.8 (v1) to 1.0 (v2) times as many envelopes a second
    (``python -m benchmarks envelopes``).
    """

    def __init__(self, resolver: Resolver, secrets: Secrets, *, max_bytes: int, v2: V2 | None = None) -> None:
        self._resolver = resolver
        self._secrets = secrets
        self._max_bytes = max_bytes
        self._v1 = V1(secrets)
        self._v2 = preferred() if v2 is None else v2

    async def open(self, data: bytes) -> Opened:
        """Open bytes for one of our keys, and see that key, plaintext and signature name the same sender."""
        envelope = read(data, self._max_bytes)
        if isinstance(envelope, V1Envelope):
            return await self._v1.open(envelope)
        mark = mark_of(envelope)
        kid, sealed_by, layer = await self._decrypted(envelope)
        if isinstance(layer, Jwe):
            # didcomm.org allows one thing to be encrypted twice: what hides the sender from mediators.
            if sealed_by is not None or layer.sender_kid is None:
                raise EnvelopeError("expected at most an authcrypt layer inside an anoncrypt one")
            # Anybody can put another anoncrypt layer around what the sender sealed.
            mark = mark_of(layer)
            kid, sealed_by, layer = await self._decrypted(layer)
        signed_by = None
        if isinstance(layer, Jws):
            signed_by, layer = await self._verified(layer)
        if not isinstance(layer, dict):
            raise EnvelopeError("expected a plaintext inside its layers")
        _agree(layer, kid, sealed_by, signed_by)
        return Opened(Generation.V2, layer, kid, sealed_by, mark)

    async def seal_v1(self, plaintext: bytes, to: Sequence[str], sender: str | None) -> bytes:
        """Seal for canonical Ed25519 keys, from one of ours, or anonymously."""
        return await self._v1.seal(plaintext, to, sender)

    async def seal_v2(self, plaintext: Mapping[str, Any], to: str, sender: str | None) -> bytes:
        """Seal for the key agreement keys of a DID, those of the first curve that both sides have, or for one key id.

        Raises :class:`UnresolvedDidError` when its document has no such key, :class:`EnvelopeError` when we have none.
        """
        keys = await self._agreeing(to)
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

    async def _decrypted(self, jwe: Jwe) -> tuple[str, str | None, Jwe | Jws | dict[str, Any]]:
        """Return the key of ours that opened a layer, the DID whose key sealed it, and what it held."""
        kid, secret = await self._ours(jwe)
        sender, did = None, None
        if jwe.sender_kid is not None:
            did, sender = await self._key(jwe.sender_kid, "key_agreement")
            if sender.curve != jwe.curve:
                raise EnvelopeError("the sender's key and epk are on different curves")
        try:
            payload = await self._v2.decrypt(jwe, kid, secret, sender)
        except Exception as error:
            raise EnvelopeError(NOT_FOR_US) from error
        return kid, did, read_layer(payload)

    async def _ours(self, jwe: Jwe) -> tuple[str, Secret]:
        found = self._known(jwe)
        if found is None and await self._secrets.renew():
            found = self._known(jwe)
        if found is None:
            raise EnvelopeError(NOT_FOR_US)
        return found

    def _known(self, jwe: Jwe) -> tuple[str, Secret] | None:
        for kid in jwe.recipients:
            secret = self._secrets.kid(kid)
            if secret is not None and secret.curve == jwe.curve:
                return kid, secret
        return None

    async def _verified(self, jws: Jws) -> tuple[str, Jwe | Jws | dict[str, Any]]:
        did, key = await self._key(jws.kid, "authentication")
        return did, read_layer(verified(jws, key))

    async def _key(self, kid: str, purpose: str) -> tuple[str, Key]:
        """Return the DID of a key id as written, and its key; the DID's own document has to list it for the purpose."""
        did, _, fragment = kid.partition("#")
        document = await self._resolver.resolve(did)
        name = canonical(did)
        keys: tuple[Key, ...] = getattr(document, purpose)
        for key in keys:
            # The document of a did:peer:4 may name its keys by the other form of the DID.
            owner, _, own_fragment = key.kid.partition("#")
            if own_fragment == fragment and name is not None and canonical(owner) == name:
                return did, key
        raise UnresolvedDidError(f"the sender's document has no such key for {purpose}")

    async def _agreeing(self, to: str) -> list[Key]:
        if "#" in to:
            keys = [(await self._key(to, "key_agreement"))[1]]
        else:
            keys = list((await self._resolver.resolve(to)).key_agreement)
        keys = [key for key in keys if key.curve in AGREEING]
        if not keys:
            raise UnresolvedDidError("the receiver's document has no key to seal for")
        return keys

    async def _secret(self, sender: str, curves: Sequence[str]) -> Secret:
        """Return our key on the first of the receiver's curves that we have one on."""
        document = await self._resolver.resolve(sender)
        secrets = [self._secrets.kid(key.kid) for key in document.key_agreement]
        for curve in curves:
            for secret in secrets:
                if secret is not None and secret.curve == curve:
                    return secret
        raise EnvelopeError("expected a key of ours on a curve of the receiver's")


def preferred() -> V2:
    """Return the v2 library: ``didcomm`` where it is installed, which ``pip`` alone does not do."""
    if importlib.util.find_spec("didcomm") is not None:
        from pickup.envelope.v2_didcomm import DidcommV2

        return DidcommV2()
    from pickup.envelope.v2_messaging import MessagingV2

    return MessagingV2()


def _agree(plaintext: Mapping[str, Any], kid: str, sealed_by: str | None, signed_by: str | None) -> None:
    """Check what didcomm.org calls message layer addressing consistency."""
    claimed = plaintext.get("from")
    if claimed is not None and not isinstance(claimed, str):
        raise EnvelopeError("expected a DID in from")
    author = None if claimed is None else canonical(claimed)
    for did, what in ((sealed_by, "sealed"), (signed_by, "signed")):
        if did is not None and (author is None or author != canonical(did)):
            raise EnvelopeError(f"from is not the DID whose key {what} the message")
    to = plaintext.get("to")
    if to is not None:
        if not isinstance(to, list) or not all(isinstance(did, str) for did in to):
            raise EnvelopeError("expected a list of DIDs in to")
        mine = canonical(kid)
        if mine is None or mine not in {canonical(did) for did in to}:
            raise EnvelopeError("to does not name the DID the message is encrypted for")
