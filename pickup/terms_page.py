"""Shows the operator's terms at ``/terms``: a text or Markdown file, which may change while the service runs."""

import asyncio
import hashlib
from html import escape
from pathlib import Path

import structlog
from aiohttp import hdrs, web
from markdown_it import MarkdownIt

from mediator.errors import SetupError
from pickup.html_page import TO_BROWSERS, write

PATH = "/terms"
MAX_BYTES = 256 * 1024
TITLE = "Terms"

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
                self._kept = _read(file)
            except (OSError, ValueError) as error:
                raise SetupError(f"didcomm.terms: {file}: {_problem(error)}") from None

    def add_routes(self, app: web.Application) -> None:
        """Serve the page."""
        app.router.add_get(PATH, self._page)

    async def _page(self, request: web.Request) -> web.Response:
        if self._file is None or self._kept is None:
            raise web.HTTPNotFound
        try:
            self._kept = await asyncio.to_thread(_read, self._file)
        except (OSError, ValueError) as error:
            log.warning("didcomm.terms: the terms as they were before are shown", problem=_problem(error))
        page, tag = self._kept
        # Proxies and browsers may keep it, and ask whether it is still current.
        headers = {**TO_BROWSERS, hdrs.CACHE_CONTROL: "no-cache", hdrs.ETAG: f'"{tag}"'}
        if any(known.value in (tag, "*") for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(text=page, content_type="text/html", headers=headers)


def _read(file: Path) -> tuple[str, str]:
    """Return the page and its tag; raises OSError, and ValueError when it is too long or not UTF-8."""
    with file.open("rb") as opened:
        raw = opened.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes")
    text = raw.decode("utf-8-sig")
    if file.suffix.lower() in (".md", ".markdown"):
        # Of this preset, raw HTML is text, and links have only schemes that run no script.
        content = MarkdownIt("js-default").render(text)
        content = content if "<h1>" in content else f"<h1>{TITLE}</h1>\n{content}"
    else:
        content = f'<h1>{TITLE}</h1>\n<p class="plain">{escape(text)}</p>'
    page = write(TITLE, content)
    return page, hashlib.sha256(page.encode()).hexdigest()[:32]


def _problem(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "expected UTF-8"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
