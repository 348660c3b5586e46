"""did:web: fetches documents through the SSRF guard, bounded in time, size and number, and caches them."""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson

from mediator.errors import MediatorError, UnresolvedDidError
from mediator.http.guard import Guard
from pickup.dids.document import DidDocument, parse

MAX_BYTES = 64 * 1024
SECONDS = 5.0
"""For one fetch, including the wait for a free slot."""
KEPT_SECONDS = 300.0
MISSED_SECONDS = 30.0
"""How long a failed DID is not tried again."""
MAX_KEPT = 1024
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
        while len(self._kept) > MAX_KEPT:
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
