"""Resolves DIDs, our own first, and caches the parsed documents."""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import unquote

import did_peer_4
import orjson
from nacl.bindings import crypto_sign_ed25519_pk_to_curve25519
from nacl.exceptions import CryptoError

from mediator.errors import MediatorError, UnresolvedDidError
from mediator.http.guard import Guard
from pickup import base64url
from pickup.dids import material
from pickup.dids.document import V2_SERVICE, DidDocument, parse
from pickup.dids.material import AGREEMENT, ED25519, X25519
from pickup.rules.names import MAX_NAME

MAX_BYTES = 64 * 1024
SECONDS = 5.0
"""For one fetch, including the wait for a free slot."""
KEPT_SECONDS = 300.0
MISSED_SECONDS = 30.0
"""How long a failed DID is not tried again."""
MAX_WEB_KEPT = 1024
MAX_AT_ONCE = 16
MAX_WAITING = 256

_HOST = re.compile(r"(?=[A-Za-z0-9.-]*[A-Za-z])[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(?::[1-9][0-9]{0,4})?")
_SEGMENT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~!$&'()*+,;=@-]+")
_PREFIX = "did:web:"


def url_of(did: str) -> str:
    """Return where the document of a did:web is; :class:`UnresolvedDidError` when the DID is none.

    The method allows no numeric hosts; a port is percent-encoded.
    """
    host, *path = did.removeprefix(_PREFIX).split(":")
    host = re.sub("%3a", ":", host, count=1, flags=re.IGNORECASE)
    segments = [unquote(segment) for segment in path]
    if not did.startswith(_PREFIX) or not _HOST.fullmatch(host) or not all(map(_SEGMENT.fullmatch, segments)):
        raise UnresolvedDidError("did:web: expected a host, its port after %3A, and path segments")
    return f"https://{host}/{'/'.join(segments or ['.well-known'])}/did.json"


@dataclass(frozen=True, slots=True)
class _CachedDocument:
    document: DidDocument | None
    until: float


class DidWebResolver:
    """Resolves did:web. Made on the event loop it serves."""

    def __init__(self, guard: Guard, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds."""
        self._guard = guard
        self._clock = clock
        self._kept: OrderedDict[str, _CachedDocument] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[DidDocument | None]] = {}
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def resolve(self, did: str) -> DidDocument:
        """Return the document, at most five minutes old; :class:`UnresolvedDidError` when there is none now."""
        url = url_of(did)
        kept = self._kept.get(did)
        if kept is None or kept.until <= self._clock():
            document = await self._get(did, url)
        else:
            document = kept.document
        if document is None:
            raise UnresolvedDidError("did:web: DID document not available")
        return document

    async def _get(self, did: str, url: str) -> DidDocument | None:
        task = self._under_way.get(did)
        if task is None:
            if len(self._under_way) >= MAX_WAITING:
                raise UnresolvedDidError("did:web: too many documents are being fetched")
            task = self._under_way[did] = asyncio.create_task(self._fetch(did, url))
            task.add_done_callback(lambda _: self._under_way.pop(did))
        # A caller that is cancelled does not cancel the fetch that others wait for.
        return await asyncio.shield(task)

    async def _fetch(self, did: str, url: str) -> DidDocument | None:
        document = None
        try:
            async with asyncio.timeout(SECONDS), self._turns:
                document = _read(await self._guard.get(url, MAX_BYTES, SECONDS), did)
        except (MediatorError, TimeoutError):
            pass
        seconds = MISSED_SECONDS if document is None else KEPT_SECONDS
        self._kept[did] = _CachedDocument(document, self._clock() + seconds)
        self._kept.move_to_end(did)
        while len(self._kept) > MAX_WEB_KEPT:
            self._kept.popitem(last=False)
        return document


def _read(body: bytes, did: str) -> DidDocument:
    try:
        raw: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise UnresolvedDidError("did:web: expected JSON") from None
    if not isinstance(raw, dict) or raw.get("id") != did:
        raise UnresolvedDidError("did:web: expected a document of that DID")
    return parse(raw, did)


MAX_KEPT = 4096
"""Documents, and as many long forms of did:peer:4."""
MAX_KEPT_CHARACTERS = 2 * 1024 * 1024
"""Characters of the cached DIDs; a document takes up to 40 bytes for each character of its DID."""

MAX_LONG_FORM = 4096
"""Characters of a did:peer:4, usually 1500; the time to decode one grows with the square of its length."""

T = TypeVar("T")

_BASE58 = re.compile(r"z[1-9A-HJ-NP-Za-km-z]+")
_PEER_2_PURPOSES = {
    "A": "assertionMethod",
    "D": "capabilityDelegation",
    "E": "keyAgreement",
    "I": "capabilityInvocation",
    "V": "authentication",
}
_PEER_2_NAMES = {"t": "type", "s": "serviceEndpoint", "r": "routingKeys", "a": "accept"}
_PEER_4 = "did:peer:4"
_DID = re.compile(r"did:[a-z0-9]+:[A-Za-z0-9._:%-]+")


class KnownDids(Protocol):
    """DIDs that are known without a request to others."""

    def document(self, did: str) -> DidDocument | None:
        """Return the document of a DID of ours."""

    async def long_form(self, short: str) -> str | None:
        """Return the long form of a did:peer:4 that a connection came with."""


class CachingResolver:
    """Resolves did:key, did:peer 0, 2 and 4, did:web; implements :class:`pickup.dids.document.DidResolver`."""

    def __init__(self, known: KnownDids, web: DidWebResolver) -> None:
        self._known = known
        self._web = web
        self._documents: _Cache[DidDocument] = _Cache()
        self._long_forms: _Cache[str] = _Cache()

    async def resolve(self, did: str) -> DidDocument:
        """Return the document of a DID without fragment; :class:`UnresolvedDidError` when there is none."""
        document = self._documents.get(did) or self._known.document(did)
        if document is not None:
            return document
        # A DID URL with parameters would have its own document, but be compared without them.
        _check(did)
        if did.startswith("did:web:"):
            return await self._web.resolve(did)
        if did.startswith(_PEER_4) and did.count(":") == 2:
            return await self._short(did)
        document = read(did)
        if did.startswith(_PEER_4):
            self._long_forms.keep(_short_form(did), did, len(did))
        self._documents.keep(did, document, len(did))
        return document

    async def _short(self, short: str) -> DidDocument:
        long = self._long_forms.get(short) or await self._known.long_form(short)
        if long is None or _short_form(long) != short:
            raise UnresolvedDidError("did:peer:4: the short form of a DID whose long form is unknown")
        document = read_short(long)
        self._documents.keep(short, document, len(long))
        return document


class _Cache(Generic[T]):
    """The last used values, bounded in number and in the sum of their weights."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._weight = 0

    def get(self, name: str) -> T | None:
        found = self._values.get(name)
        if found is None:
            return None
        self._values.move_to_end(name)
        return found[0]

    def keep(self, name: str, value: T, weight: int) -> None:
        if name in self._values:
            self._weight -= self._values.pop(name)[1]
        self._values[name] = value, weight
        self._weight += weight
        while len(self._values) > MAX_KEPT or self._weight > MAX_KEPT_CHARACTERS:
            self._weight -= self._values.popitem(last=False)[1][1]


def read_short(long: str) -> DidDocument:
    """Return the document of a did:peer:4 under the short form of its DID; errors as those of :func:`read`."""
    return parse(_decoded(long), _short_form(long))


def read(did: str) -> DidDocument:
    """Return the document that a DID carries in itself; :class:`UnresolvedDidError` when it carries none."""
    _check(did)
    if did.startswith("did:key:"):
        return _of_key(did, did.removeprefix("did:key:"))
    if did.startswith("did:peer:0"):
        return _of_key(did, did.removeprefix("did:peer:0"))
    if did.startswith("did:peer:2"):
        return parse(_peer_2(did), did)
    if did.startswith(_PEER_4):
        return parse(_decoded(did), did)
    raise UnresolvedDidError("DID: expected did:key, did:peer 0, 2 or 4, or did:web")


def _check(did: str) -> None:
    if len(did) > MAX_NAME or not _DID.fullmatch(did):
        raise UnresolvedDidError(f"DID: expected one without fragment, of at most {MAX_NAME} characters")


def _of_key(did: str, multibase: str) -> DidDocument:
    try:
        jwk = material.from_multibase(multibase)
    except ValueError:
        raise UnresolvedDidError("DID: expected a key of a known curve in multibase") from None
    methods = [_method(multibase)]
    agreement = [f"#{multibase}"] if jwk["crv"] in AGREEMENT else []
    if jwk["crv"] == ED25519:
        try:
            derived = crypto_sign_ed25519_pk_to_curve25519(material.raw_of(jwk))
        except CryptoError:
            raise UnresolvedDidError("DID: expected a point of the curve") from None
        methods.append(_method(material.multibase(material.from_raw(X25519, derived))))
        agreement = [methods[-1]["id"]]
    authentication = [f"#{multibase}"] if jwk["crv"] != X25519 else []
    raw = {"verificationMethod": methods, "authentication": authentication, "keyAgreement": agreement}
    return parse(raw, did)


def _method(multibase: str) -> dict[str, Any]:
    return {"id": f"#{multibase}", "type": "Multikey", "publicKeyMultibase": multibase}


def _peer_2(did: str) -> Mapping[str, Any]:
    """Read the keys and services of a did:peer:2, abbreviated or not; errors name the malformed part.

    The libraries refuse lists of services, which ``peerdid`` and the wallets of Identus write.
    """
    parts = did.removeprefix("did:peer:2").split(".")
    raw: dict[str, list[Any]] = {"verificationMethod": [], "service": []}
    if parts[0] or len(parts) < 2:
        raise UnresolvedDidError("did:peer:2: expected a key or a service, each behind a dot")
    for at, part in enumerate(parts[1:], 1):
        purpose, value = part[:1], part[1:]
        if purpose == "S":
            raw["service"] += _peer_2_services(at, value)
        elif purpose in _PEER_2_PURPOSES and _BASE58.fullmatch(value):
            raw["verificationMethod"].append({**_method(value), "id": f"#key-{len(raw['verificationMethod']) + 1}"})
            raw.setdefault(_PEER_2_PURPOSES[purpose], []).append(raw["verificationMethod"][-1]["id"])
        else:
            raise UnresolvedDidError(f"did:peer:2: part {at}: expected A, D, E, I or V and a key in base58, or S")
    return raw


def _peer_2_services(at: int, encoded: str) -> list[dict[str, Any]]:
    try:
        written = orjson.loads(base64url.decode(encoded))
    except ValueError:
        raise UnresolvedDidError(f"did:peer:2: part {at}: expected services as JSON in base64url") from None
    services = written if isinstance(written, list) else [written]
    if not all(isinstance(service, dict) for service in services):
        raise UnresolvedDidError(f"did:peer:2: part {at}: expected a service, or a list of services")
    return [_expanded(service) for service in services]


def _expanded(service: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the abbreviations in a service of a did:peer:2, also in its endpoints."""
    whole = _renamed(service)
    if whole.get("type") == "dm":
        whole["type"] = V2_SERVICE
    endpoints = whole.get("serviceEndpoint")
    if isinstance(endpoints, list):
        whole["serviceEndpoint"] = [_renamed(one) if isinstance(one, dict) else one for one in endpoints]
    elif isinstance(endpoints, dict):
        whole["serviceEndpoint"] = _renamed(endpoints)
    return whole


def _renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {_PEER_2_NAMES.get(name, name): value for name, value in fields.items()}


def _decoded(long: str) -> object:
    if len(long) > MAX_LONG_FORM:
        raise UnresolvedDidError(f"did:peer:4: expected at most {MAX_LONG_FORM} characters")
    return _carefully(_PEER_4, partial(did_peer_4.decode, long))


def _carefully(method: str, decode: Callable[[], object]) -> object:
    try:
        return decode()
    # Whatever the libraries stumble over, deep nesting too, is the DID's fault.
    except Exception:
        raise UnresolvedDidError(f"{method}: not well formed") from None


def _short_form(did: str) -> str:
    return did.rpartition(":")[0]
