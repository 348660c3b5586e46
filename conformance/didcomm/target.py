"""The mediator that is tried: its invitations, found from whatever its operator gives to wallets."""

import asyncio
import re
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import aiohttp
import orjson

from conformance.checks import CannotTryError
from mediator.http.bodies import read_body
from pickup.client import ClientError, MediatorInvitation
from pickup.rules.records import Generation

V1, V2 = Generation.V1, Generation.V2
PLACES = ("", "/invitation", "/didcomm/did")
"""Paths below a URL at which mediators publish an invitation."""
ACCEPTED = ("application/json", "application/didcomm-plain+json", "text/html")
"""What is asked for at each: some servers give v1 and v2 by the media type."""
_LINK = re.compile(r"""(?:https?|didcomm)://[^\s"'<>]*[?&](?:oob|_oob|c_i|d_m)=[^\s"'<>&]+""")
MAX_PAGE = 1 << 20


@dataclass(slots=True)
class Target:
    """A mediator by the invitations that were found, one a generation."""

    invitations: dict[Generation, MediatorInvitation]
    features: dict[Generation, frozenset[str] | None] = field(default_factory=dict)
    """Protocols with their versions that it discloses, once asked; None where it does not say."""

    handshake: str | None = None
    """The v1 handshake that works; None before one was made, empty when none does."""
    unusable: str = ""
    """Why none does."""

    @classmethod
    async def find(cls, words: Sequence[str], seconds: float) -> "Target":
        """Read invitations (links, files, DIDs), or look for them at a mediator's URL.

        Raises :class:`CannotTryError` where a word leads to none.
        """
        invitations: dict[Generation, MediatorInvitation] = {}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(seconds)) as session:
            for word in words:
                found = await _find(word, session)
                if not found:
                    raise CannotTryError(
                        f"{word[:100]}: no invitation found; give a link with oob= or c_i=, a file with one, or a DID"
                    )
                for invitation in found:
                    invitations.setdefault(invitation.generation, invitation)
        return cls(invitations)

    @property
    def endpoint(self) -> str | None:
        """The URL in the v1 invitation, if there is one."""
        invitation = self.invitations.get(V1)
        return None if invitation is None else invitation.endpoint


async def _find(word: str, session: aiohttp.ClientSession) -> list[MediatorInvitation]:
    if not word.startswith(("http://", "https://", "didcomm://", "did:")):
        try:
            word = (await asyncio.to_thread(Path(word).read_text, "utf-8")).strip()
        except (OSError, ValueError):
            raise CannotTryError(f"{word[:100]}: neither a URL, nor a DID, nor a file with one") from None
    if inside := _read(word):
        return inside
    if re.search(r"[?&](?:oob|_oob|c_i|d_m)=", word):
        raise CannotTryError(f"{word[:100]}: no invitation found in it; is the link whole?")
    found: list[MediatorInvitation] = []
    if word.startswith(("http://", "https://")):
        for place in PLACES:
            for accepted in ACCEPTED:
                found += _read(await _get(session, word.rstrip("/") + place, accepted))
            if found:
                break
    return found


async def _get(session: aiohttp.ClientSession, url: str, accepted: str) -> str:
    try:
        async with session.get(url, headers={"Accept": accepted}, allow_redirects=False) as answer:
            if 300 <= answer.status < 400 and "Location" in answer.headers:
                return urljoin(url, answer.headers["Location"])
            return (await read_body(answer, MAX_PAGE)).decode(errors="replace") if answer.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise CannotTryError(f"{url}: {error or type(error).__name__}") from error


def _read(text: str) -> list[MediatorInvitation]:
    """Return the invitations in a link, a DID, a JSON document, or a page with links."""
    found = []
    for each in _candidates(text):
        try:
            found.append(MediatorInvitation.parse(each))
        except ClientError:
            continue
    return found


def _candidates(text: str) -> list[str]:
    if text.startswith("did:") or (urlsplit(text).query and "\n" not in text):
        return [text]
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        return [unescape(link) for link in _LINK.findall(text)]
    if not isinstance(document, dict):
        return []
    if "@type" in document or "type" in document:
        return [f"https://invitation.invalid/?oob={urlsafe_b64encode(orjson.dumps(document)).decode()}"]
    # Other documents name an invitation's link, or a DID, in one of their fields.
    return [value for value in document.values() if isinstance(value, str) and ("oob=" in value or value[:4] == "did:")]
