"""The public pages beside DIDComm: invitations, terms, our DIDs, and which other origins may use the door (CORS)."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Collection
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import orjson
import structlog
from aiohttp import hdrs, web

from mediator.errors import NoSuchInvitationError, SetupError
from pickup import qr
from pickup.broker import MediationBroker
from pickup.dids.identities import OwnIdentities
from pickup.dids.own_dids import OWN_PATH_TENANT
from pickup.invitations import (
    PARAMETERS,
    SHORT_V2,
    InvitationForms,
    InvitationService,
    id_inside,
    id_of_short,
)
from pickup.message import PLAIN
from pickup.rules.records import Invitation
from pickup.transports import PATH

_STYLE = """
:root { color-scheme: light dark; --text: #111; --ground: #fff; --link: #0645ad; --line: #bbb; }
@media (prefers-color-scheme: dark) { :root { --text: #eee; --ground: #16181c; --link: #8ab4f8; --line: #555; } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--ground); }
.codes { display: flex; flex-wrap: wrap; gap: 2rem; margin: 2rem 0; }
section { flex: 1 1 20rem; min-width: 0; }
h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
/* Dark on light in either mode: the white margin is part of the image. */
img { display: block; height: auto; max-width: 100%; }
.short { width: 14rem; }
.long { width: 28rem; }
.plain { white-space: pre-wrap; }
/* Whoever reads this on a phone has the wallet there, and cannot scan its own screen. */
.open { display: none; }
.open a { display: block; padding: .7rem; border-radius: .3rem; text-align: center; text-decoration: none;
  color: var(--ground); background: var(--link); }
@media (pointer: coarse) { .open { display: block; } }
pre { overflow-x: auto; }
a, code { overflow-wrap: anywhere; }
a { color: var(--link); }
button { font: inherit; padding: .1rem .6rem; border: 1px solid var(--line); border-radius: .3rem; cursor: pointer;
  color: inherit; background: transparent; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
@media print { button, details { display: none; } .short { width: 4cm; } }
"""
# Without a secure context (https or this machine) browsers have no navigator.clipboard.
SCRIPT = """
const status = document.querySelector("[role=status]");
for (const button of document.querySelectorAll("button")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copies);
    getSelection().selectAllChildren(source);
    let copied = true;
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      copied = document.execCommand("copy");
    }
    status.textContent = copied ? button.dataset.done : "Press Ctrl+C to copy the selected text.";
    button.textContent = copied ? "Copied" : "Copy";
  });
}
"""


def _allowed(text: str) -> str:
    """Return the source expression that lets exactly this text through a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# An invitation may be used up or removed at any moment.
FRESH = {"Cache-Control": "no-store", "Vary": "Accept", "X-Content-Type-Options": "nosniff"}
TO_BROWSERS = {
    **FRESH,
    "Content-Security-Policy": f"default-src 'none'; img-src data:; style-src {_allowed(_STYLE)}; "
    f"script-src {_allowed(SCRIPT)}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
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
{content}
</main>
</body>
</html>
"""


def write_page(title: str, content: str) -> str:
    """Write a page; ``content`` is HTML, ``title`` is text. Of scripts, only :data:`SCRIPT` runs."""
    return _PAGE.format(title=escape(title), style=_STYLE, content=content)


TERMS_PATH = "/terms"
MAX_TERMS_BYTES = 256 * 1024
TERMS_TITLE = "Terms"

log = structlog.get_logger("didcomm.terms")


class TermsPage:
    """Reads the file for each request. Nothing in it is markup but Markdown: HTML is shown as it is written."""

    def __init__(self, file: Path | None) -> None:
        """``file`` is Markdown if its name ends with .md, else plain text; None: there are no terms.

        Raises :class:`SetupError` when it cannot be shown.
        """
        self._file = file
        self._kept: tuple[str, str] | None = None
        if file is not None:
            try:
                self._kept = _read_terms(file)
            except (OSError, ValueError) as error:
                raise SetupError(f"didcomm.terms: {file}: {_problem(error)}") from None

    def add_routes(self, app: web.Application) -> None:
        """Serve the page."""
        app.router.add_get(TERMS_PATH, self._page)

    async def _page(self, request: web.Request) -> web.Response:
        if self._file is None or self._kept is None:
            raise web.HTTPNotFound
        try:
            self._kept = await asyncio.to_thread(_read_terms, self._file)
        except (OSError, ValueError) as error:
            log.warning("didcomm.terms: the terms as they were before are shown", problem=_problem(error))
        page, tag = self._kept
        # Proxies and browsers may keep it, and ask whether it is still current.
        headers = {**TO_BROWSERS, hdrs.CACHE_CONTROL: "no-cache", hdrs.ETAG: f'"{tag}"'}
        if any(known.value in (tag, "*") for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(text=page, content_type="text/html", headers=headers)


def _read_terms(file: Path) -> tuple[str, str]:
    """Return the page and its tag; raises OSError, and ValueError when it is too long or not UTF-8."""
    with file.open("rb") as opened:
        raw = opened.read(MAX_TERMS_BYTES + 1)
    if len(raw) > MAX_TERMS_BYTES:
        raise ValueError(f"expected at most {MAX_TERMS_BYTES} bytes")
    text = raw.decode("utf-8-sig")
    if file.suffix.lower() in (".md", ".markdown"):
        # Needed for no other page.
        from markdown_it import MarkdownIt

        # Of this preset, raw HTML is text, and links have only schemes that run no script.
        content = MarkdownIt("js-default").render(text)
        content = content if "<h1>" in content else f"<h1>{TERMS_TITLE}</h1>\n{content}"
    else:
        content = f'<h1>{TERMS_TITLE}</h1>\n<p class="plain">{escape(text)}</p>'
    page = write_page(TERMS_TITLE, content)
    return page, hashlib.sha256(page.encode()).hexdigest()[:32]


def _problem(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "expected UTF-8"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


_FIVE_MINUTES = {"Cache-Control": "max-age=300"}


class DidPages:
    """Answers resolvers of did:web, and whoever wants to know the mediator's DID; all of it is public."""

    def __init__(self, identities: OwnIdentities, public_url: str) -> None:
        """``public_url`` is the door's; a reverse proxy may strip the front of its path."""
        self._identities = identities
        self._front = urlsplit(public_url).path.removesuffix(PATH)

    def add_routes(self, app: web.Application) -> None:
        """Serve ``did.json`` and ``did`` below the door's path, for the default tenant and for each other."""
        app.router.add_get(f"{PATH}/did.json", self._document)
        app.router.add_get(f"{PATH}/{{tenant}}/did.json", self._document)
        app.router.add_get(f"{PATH}/did", self._dids)
        app.router.add_get(f"{PATH}/{{tenant}}/did", self._dids)

    async def _document(self, request: web.Request) -> web.Response:
        document = self._identities.web_document(self._front + request.path)
        if document is None:
            raise web.HTTPNotFound
        return web.json_response(document, headers=_FIVE_MINUTES, content_type="application/did+json")

    async def _dids(self, request: web.Request) -> web.Response:
        """Answer with the DIDs for new wallets, on plain HTTP too, where the method did:web is not allowed."""
        identity = self._identities.find_current(request.match_info.get("tenant", OWN_PATH_TENANT))
        if identity is None:
            raise web.HTTPNotFound
        told = {"did": identity.v2_did, "socket_did": identity.socket_did, "web_did": identity.web_did}
        return web.json_response(told, headers=_FIVE_MINUTES)


WALLET_SCHEME = "didcomm://invite"
"""What wallets on phones open, with the invitation as in the long link."""
ANY_ORIGIN = "*"
_PUBLIC = (f"{PATH}/", "/i/")
"""What paths of the door begin with, besides :data:`PATH` itself; the registry and the console are elsewhere."""
_PREFLIGHT = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, OPTIONS",
    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: "Content-Type, Accept, X-Request-ID",
    hdrs.ACCESS_CONTROL_MAX_AGE: "86400",
}


class CrossOrigin:
    """Answers preflights, and names the origins whose scripts may read the answers.

    Cookies and logins are never allowed: an envelope carries its own authentication, so a page can do no more with the
    browser of a visitor than with a server of its own.
    """

    def __init__(self, origins: Collection[str]) -> None:
        """``origins`` may hold :data:`ANY`; empty: no page of another origin."""
        self._origins = frozenset(origins)

    def add_routes(self, app: web.Application) -> None:
        """Take in all routes of the door that the application has by now."""
        if not self._origins:
            return
        for resource in app.router.resources():
            if _is_public(resource.canonical):
                cast(web.Resource, resource).add_route(hdrs.METH_OPTIONS, self._preflight)
        app.on_response_prepare.append(self._allow)

    async def _preflight(self, request: web.Request) -> web.Response:
        return web.Response(status=204, headers=_PREFLIGHT if self._allowed(request) else None)

    async def _allow(self, request: web.Request, response: web.StreamResponse) -> None:
        if not _is_public(request.path):
            return
        if ANY_ORIGIN not in self._origins:
            # A cache must not give the answer for one origin to another.
            vary = response.headers.get(hdrs.VARY)
            response.headers[hdrs.VARY] = f"{vary}, Origin" if vary else "Origin"
        allowed = self._allowed(request)
        if allowed:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "Retry-After, X-Request-ID"

    def _allowed(self, request: web.Request) -> str:
        if ANY_ORIGIN in self._origins:
            return ANY_ORIGIN
        origin = request.headers.get(hdrs.ORIGIN, "")
        return origin if origin in self._origins else ""


def _is_public(path: str) -> bool:
    return path == PATH or path.startswith(_PUBLIC)


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
        app.router.add_get("/i/{id}", self._short)
        app.router.add_get("/i/", self._short)
        app.router.add_get(r"/invite/{id:[A-Za-z0-9-]{1,64}}.png", self._image)
        app.router.add_get("/invite/{id}", self._page)

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
            '<p class="open">If nothing opens, copy the link below into your wallet.</p>\n'
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
            return await asyncio.to_thread(qr.cached_png, url)


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
        f'<p class="open"><a href="{escape(f"{WALLET_SCHEME}?{urlsplit(long).query}")}">Open in a wallet here</a></p>\n'
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
    text = write_page(title, f"<h1>{escape(title)}</h1>\n{content}")
    return web.Response(text=text, content_type="text/html", status=status, headers=TO_BROWSERS)
