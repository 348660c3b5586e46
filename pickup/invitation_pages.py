"""Answers the links of an invitation: a page with QR codes to browsers, the invitation itself to wallets."""

import asyncio
import base64
import re
from datetime import UTC, datetime
from html import escape

import orjson
from aiohttp import hdrs, web

from mediator.errors import NoSuchInvitationError
from pickup import qr
from pickup.broker import MediationBroker
from pickup.html_page import FRESH, SCRIPT, TO_BROWSERS, write
from pickup.invitations import (
    PARAMETERS,
    SHORT_ID,
    SHORT_V2,
    InvitationForms,
    InvitationService,
    id_inside,
    id_of_short,
)
from pickup.message import PLAIN
from pickup.rules.records import Invitation

_GONE = "<p>There is no invitation here, or it is no longer open. Ask whoever gave you the link for a new one.</p>"


class InvitationPages:
    """Answers GET of every link. A QR code takes milliseconds: one is drawn at a time, and the last ones are cached."""

    def __init__(
        self, mediation: MediationBroker, invitations: InvitationService, terms_url: str | None = None
    ) -> None:
        """``terms_url`` is the page of the operator's terms, if there are any."""
        self._mediation = mediation
        self._invitations = invitations
        self._terms_url = terms_url
        self._drawing = asyncio.Semaphore(1)

    def add_routes(self, app: web.Application) -> None:
        """Serve ``/i/{id}`` and ``/i/?_oobid={id}``, the short links, ``/invite/{id}`` and ``/invite/{id}.png``."""
        app.router.add_get(rf"/i/{{id:{SHORT_ID}}}", self._short)
        app.router.add_get("/i/", self._short)
        app.router.add_get(r"/invite/{id:[A-Za-z0-9-]{1,64}}.png", self._image)
        app.router.add_get(r"/invite/{id:[A-Za-z0-9-]{1,64}}", self._page)

    async def door(self, request: web.Request) -> web.Response:
        """Answer the long link: the page to a browser, the invitation to others; 404 unless it is one that is open."""
        parameter = next((name for name in PARAMETERS if name in request.query), "oob")
        try:
            invitation = await self._mediation.open_invitation(id_inside(request.query.get(parameter, "")))
        except NoSuchInvitationError:
            return _missing(request)
        if _is_browser(request):
            return await self._shown(invitation)
        return _message(request, self._invitations.written(invitation), parameter)

    async def _short(self, request: web.Request) -> web.Response:
        """Answer a short link: as the long one, but an agent that does not ask for JSON is led to the long one."""
        short = request.match_info.get("id")
        parameter = "_oob" if short is None else "oob"
        try:
            id = id_of_short(request.query.get(SHORT_V2, "") if short is None else short)
            invitation = await self._mediation.open_invitation(id)
        except NoSuchInvitationError:
            return _missing(request)
        if _is_browser(request):
            return await self._shown(invitation)
        forms = self._invitations.written(invitation)
        if _wants_json(request):
            return _message(request, forms, parameter)
        return web.Response(status=302, headers={**FRESH, "Location": forms.url(parameter)})

    async def _page(self, request: web.Request) -> web.Response:
        try:
            return await self._shown(await self._mediation.open_invitation(request.match_info["id"]))
        except NoSuchInvitationError:
            return _gone()

    async def _image(self, request: web.Request) -> web.Response:
        try:
            invitation = await self._mediation.open_invitation(request.match_info["id"])
        except NoSuchInvitationError:
            return _gone()
        image = await self._drawn(self._invitations.written(invitation).v1_short_url)
        return _gone() if image is None else web.Response(body=image, content_type="image/png", headers=TO_BROWSERS)

    async def _shown(self, invitation: Invitation) -> web.Response:
        forms = self._invitations.written(invitation)
        sections = [
            _section(number, name, short, await self._drawn(short), long, await self._drawn(long))
            for number, name, short, long in (
                (1, "DIDComm v1 (Aries)", forms.v1_short_url, forms.v1_url),
                (2, "DIDComm v2", forms.v2_short_url, forms.v2_url),
            )
        ]
        content = (
            "<p>Scan the code that your wallet understands, or open its link in the wallet. "
            "Your wallet will then receive its messages through this service.</p>\n"
            f"<p>{_until(invitation)}{_accepting(self._terms_url)}</p>\n"
            f'<div class="codes">\n{"".join(sections)}</div>\n'
            "<p>Some wallets ask for the mediator's DID. This one is part of the invitation: "
            f'<code id="did">{escape(forms.v2["from"])}</code>\n'
            f"{_copy_button('did', 'the DID of the mediator')}</p>\n"
            "<p>The same with the mediator's WebSocket, for wallets that look for it there before they go live: "
            f'<code id="socket-did">{escape(forms.socket_did)}</code>\n'
            f"{_copy_button('socket-did', 'the DID of the mediator with its WebSocket')}</p>\n"
            f'<p role="status"></p>\n<script>{SCRIPT}</script>'
        )
        return _html(f"Invitation: {invitation.label}", content)

    async def _drawn(self, url: str) -> bytes | None:
        """Return the QR code as PNG; None when the URL is too long for one."""
        async with self._drawing:
            return await asyncio.to_thread(qr.drawn, url)


# Reading requests.


def _is_browser(request: web.Request) -> bool:
    accepted = request.headers.get(hdrs.ACCEPT, "")
    return "text/html" in accepted and not _wants_json(request)


def _wants_json(request: web.Request) -> bool:
    """Whether an agent asks for the invitation itself; old ones say so in the Content-Type of their GET."""
    asked = request.headers.get(hdrs.ACCEPT, "") + request.headers.get(hdrs.CONTENT_TYPE, "")
    return re.search("json|didcomm", asked) is not None


# Writing answers.


def _message(request: web.Request, forms: InvitationForms, parameter: str) -> web.Response:
    """Write the invitation; an agent that accepts plaintexts of DIDComm v2 gets that form from any link."""
    plain = PLAIN in request.headers.get(hdrs.ACCEPT, "")
    message = forms.message("_oob" if plain else parameter)
    content_type = PLAIN if plain else "application/json"
    return web.Response(text=orjson.dumps(message).decode(), content_type=content_type, charset="utf-8", headers=FRESH)


def _section(number: int, name: str, short: str, code: bytes | None, long: str, long_code: bytes | None) -> str:
    """Write one form of the invitation: its short link in front, the long one folded away."""
    return (
        f"<section>\n<h2>{name}</h2>\n"
        f"{_figure('short', code)}\n{_link(f'short{number}', short, f'the short link for {name}')}\n"
        "<details>\n<summary>My wallet does not open short links</summary>\n"
        f"<p>This is the whole invitation.</p>\n"
        f"{_figure('long', long_code)}\n{_link(f'long{number}', long, f'the whole invitation for {name}')}\n"
        "</details>\n</section>\n"
    )


def _figure(size: str, image: bytes | None) -> str:
    if image is None:
        return "<p>This link is too long for a QR code.</p>"
    source = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return f'<img class="{size}" src="{source}" alt="QR code of the link below">'


def _link(id: str, url: str, name: str) -> str:
    return f'<p><a id="{id}" href="{escape(url)}">{escape(url)}</a>\n{_copy_button(id, name)}</p>'


def _copy_button(id: str, name: str) -> str:
    """Write a button that the script shows; ``name`` is what it copies, for screen readers."""
    name = escape(name)
    return (
        f'<button type="button" data-copies="{id}" data-done="Copied {name}." aria-label="Copy {name}" hidden>'
        "Copy</button>"
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


def _accepting(terms_url: str | None) -> str:
    return "" if terms_url is None else f' By connecting you accept the <a href="{escape(terms_url)}">terms</a>.'


def _missing(request: web.Request) -> web.Response:
    """Answer a link that leads nowhere: a page to a browser, the error as JSON to others."""
    if _is_browser(request):
        return _gone()
    raise NoSuchInvitationError


def _gone() -> web.Response:
    return _html("No such invitation", _GONE, status=404)


def _html(title: str, content: str, status: int = 200) -> web.Response:
    text = write(title, f"<h1>{escape(title)}</h1>\n{content}")
    return web.Response(text=text, content_type="text/html", status=status, headers=TO_BROWSERS)
