"""Shows an invitation in a browser: two QR codes, the links, and how long it is open."""

import asyncio
import base64
import hashlib
from datetime import UTC, datetime
from functools import lru_cache
from html import escape

from aiohttp import web

from mediator.errors import NoSuchInvitationError
from pickup import qr
from pickup.broker import MediationBroker
from pickup.invitations import PARAMETERS, InvitationService, id_inside
from pickup.mediation.records import Invitation

_STYLE = """
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #111;
  background: #fff; }
.codes { display: flex; flex-wrap: wrap; gap: 2rem; }
figure { flex: 1 1 20rem; margin: 0; min-width: 0; }
img { width: 100%; max-width: 26rem; height: auto; image-rendering: pixelated; }
figcaption { font-weight: bold; }
a { color: #0645ad; overflow-wrap: anywhere; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; img-src data:; style-src 'sha256-{_STYLE_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # An invitation may be used up or removed at any moment.
    "Cache-Control": "no-store",
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{content}
</main>
</body>
</html>
"""
_GONE = "<p>There is no invitation here, or it is no longer open. Ask whoever gave you the link for a new one.</p>"


class InvitationPages:
    """Answers browsers. A QR code takes tens of milliseconds: one is drawn at a time, and the last ones are cached."""

    def __init__(self, mediation: MediationBroker, invitations: InvitationService) -> None:
        self._mediation = mediation
        self._invitations = invitations
        self._drawing = asyncio.Semaphore(1)

    def add_routes(self, app: web.Application) -> None:
        """Serve ``/invite/{id}`` and ``/invite/{id}.png``."""
        app.router.add_get(r"/invite/{id:[A-Za-z0-9-]{1,64}}.png", self._image)
        app.router.add_get(r"/invite/{id:[A-Za-z0-9-]{1,64}}", self._page)

    async def door(self, request: web.Request) -> web.Response:
        """Answer a browser that opened the URL of an invitation; 404 unless it is one of ours that is open."""
        encoded = next((request.query[name] for name in PARAMETERS if name in request.query), "")
        try:
            return await self._shown(id_inside(encoded))
        except NoSuchInvitationError:
            return _gone()

    async def _page(self, request: web.Request) -> web.Response:
        try:
            return await self._shown(request.match_info["id"])
        except NoSuchInvitationError:
            return _gone()

    async def _image(self, request: web.Request) -> web.Response:
        try:
            invitation = await self._mediation.open_invitation(request.match_info["id"])
        except NoSuchInvitationError:
            return _gone()
        image = await self._drawn(self._invitations.written(invitation).v1_url)
        return _gone() if image is None else web.Response(body=image, content_type="image/png", headers=_HEADERS)

    async def _shown(self, id: str) -> web.Response:
        invitation = await self._mediation.open_invitation(id)
        written = self._invitations.written(invitation)
        figures = [
            _figure(caption, url, await self._drawn(url))
            for caption, url in (
                ("Wallets and agents with DIDComm v1 (Aries)", written.v1_url),
                ("Wallets and agents with DIDComm v2", written.v2_url),
            )
        ]
        content = (
            "<p>Scan the code that your wallet understands, or open its link in the wallet. "
            "Your wallet will then receive its messages through this service.</p>\n"
            f"<p>{_until(invitation)}</p>\n"
            f'<div class="codes">\n{"".join(figures)}</div>'
        )
        return _html(f"Invitation: {invitation.label}", content)

    async def _drawn(self, url: str) -> bytes | None:
        """Return the QR code as PNG; None when the URL is too long for one."""
        async with self._drawing:
            return await asyncio.to_thread(_image, url)


@lru_cache(maxsize=64)
def _image(url: str) -> bytes | None:
    try:
        return qr.png(url)
    except ValueError:
        return None


def _figure(caption: str, url: str, image: bytes | None) -> str:
    shown = (
        "<p>This link is too long for a QR code.</p>"
        if image is None
        else f'<img src="data:image/png;base64,{base64.b64encode(image).decode()}" alt="QR code of the link below">'
    )
    return (
        f"<figure>\n<figcaption>{escape(caption)}</figcaption>\n{shown}\n"
        f'<p><a href="{escape(url)}">{escape(url)}</a></p>\n</figure>\n'
    )


def _until(invitation: Invitation) -> str:
    parts = []
    if invitation.expire_at is not None:
        moment = datetime.fromtimestamp(invitation.expire_at // 1000, UTC)
        parts.append(
            f'It is open until <time datetime="{moment:%Y-%m-%dT%H:%M:%SZ}">{moment:%d %B %Y, %H:%M} UTC</time>'
        )
    if invitation.max_uses is not None:
        left = invitation.max_uses - invitation.uses
        parts.append("It may be used once" if left == 1 else f"It may be used {left} times")
    return ". ".join(parts or ["It does not expire"]) + "."


def _gone() -> web.Response:
    return _html("No such invitation", _GONE, status=404)


def _html(title: str, content: str, status: int = 200) -> web.Response:
    text = _PAGE.format(title=escape(title), style=_STYLE, content=content)
    return web.Response(text=text, content_type="text/html", status=status, headers=_HEADERS)
