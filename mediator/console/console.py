"""The console itself: who may see which page, how pages are rendered, forms that run operations, and files of pages."""

import asyncio
import hashlib
import json
import string
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote

from aiohttp import hdrs, web
from jinja2 import BaseLoader, Environment, FileSystemLoader, PrefixLoader, StrictUndefined
from multidict import MultiMapping

from mediator import __version__
from mediator.console.pages import Page, PageContent, PageRequest
from mediator.console.streams import Streams
from mediator.console.tables import FILTERS, HOME, MAX_ROWS, Table
from mediator.errors import BadRequestError, MediatorError, NotAllowedError, SetupError
from mediator.http.app import CODES, extend_time_limit, read_post, wants_html
from mediator.operate.access import HTML_HEADERS, Access, keep_private
from mediator.operate.operations import Actor, Answer, Operation, Operations, Schema

FOLDER: Final = Path(__file__).with_name("static")
ROUTE: Final = "/console/static/"
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_TRUE = frozenset({"on", "true", "1"})
GROUPS: Final = ("Mail", "Agents", "Wallets")
"""The first headings of the navigation; others that parts bring follow, and the last is ``Service``."""
SERVICE: Final = "Service"
GRACE: Final = 5.0
"""Seconds beyond an operation's own limit, for its form and what leads back."""
CHOSEN: Final = "chosen"
"""The field of a form that has the fields of an operation for each selected row."""
_NOTICE: Final = "mediator_notice"
"""The cookie that tells the next page, once, what a form did."""
_NOTICE_SECONDS: Final = 60
_NOTICE_LENGTH: Final = 500


class Assets:
    """The files of the folder ``static``, libraries among them."""

    def __init__(self) -> None:
        found = [path for path in sorted(FOLDER.rglob("*")) if path.suffix in _TYPES]
        self._files = {path.relative_to(FOLDER).as_posix(): (path.read_bytes(), _TYPES[path.suffix]) for path in found}
        self._versions = {name: hashlib.sha256(data).hexdigest()[:16] for name, (data, _) in self._files.items()}

    def url(self, name: str) -> str:
        """Return where a file is."""
        return f"{ROUTE}{name}?v={self._versions.get(name, '')}"

    async def answer(self, request: web.Request) -> web.Response:
        """Answer with a file; a browser never asks for this version of it again."""
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        data, content_type = self._files[name]
        current = request.query.get("v") == self._versions[name]
        headers = {"Cache-Control": "public, max-age=31536000, immutable" if current else "no-cache"}
        return web.Response(body=data, content_type=content_type, charset="utf-8", headers=headers)


def read_form(operation: Operation, form: MultiMapping[str]) -> dict[str, Any]:
    """Return the request; an empty field is absent, unless it is a list, or text that cannot be null.

    Properties of an object are fields of their own, ``quotas.messages``, where an empty one stands for null. Raises
    :class:`BadRequestError`.
    """
    found: dict[str, Any] = {}
    for name, schema in operation.fields.items():
        given = form.getall(name, [])
        types = _types(schema)
        if "properties" in schema:
            parts = {key: (f"{name}.{key}", kind) for key, kind in schema["properties"].items()}
            texts = {key: form[field] for key, (field, _) in parts.items() if field in form}
            if texts:
                found[name] = {
                    key: _read(parts[key][0], text, parts[key][1]) if text else None for key, text in texts.items()
                }
        elif "array" in types:
            if name in form:
                found[name] = [_read(name, value, schema.get("items", {})) for value in given if value]
        elif given and (given[0] or ("string" in types and "null" not in types)):
            found[name] = _read(name, given[0], schema)
    return found


def _types(schema: Schema) -> Sequence[str]:
    types: str | Sequence[str] = schema.get("type", "object")
    return [types] if isinstance(types, str) else types


def _read(name: str, text: str, schema: Schema) -> Any:
    types = _types(schema)
    if "string" in types:
        # Browsers send the lines of a text area as mail has them.
        return text.replace("\r\n", "\n")
    if "boolean" in types:
        return text in _TRUE
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequestError(name, f"expected {' or '.join(types)}") from None


class Console:
    """All pages. Parts add theirs while they open; :meth:`register` then makes the routes."""

    def __init__(self, operations: Operations, access: Access) -> None:
        self.operations = operations
        self.streams = Streams(access.still_allows)
        self._access = access
        self._assets = Assets()
        self._pages: list[tuple[str, Page]] = []
        self._folders: dict[str, BaseLoader] = {}
        self._templates = Environment(
            loader=PrefixLoader(self._folders),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters |= FILTERS
        self._templates.globals |= {"static": self._assets.url, "version": __version__, "home": HOME}
        # Rendering in a thread costs the event loop at most its share of the interpreter, however long a page is.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="console")

    def add_pages(self, name: str, templates: Path, *pages: Page) -> None:
        """Add pages with a folder of templates, whose names begin with ``name/``.

        Raises :class:`SetupError` when another part has the name.
        """
        if name in self._folders:
            raise SetupError(f"two parts bring pages named {name}; uninstall one of them")
        self._folders[name] = FileSystemLoader(templates)
        self._pages += [(name, page) for page in pages]

    def register(self, app: web.Application) -> None:
        """Add the routes of all pages to the application."""
        app.router.add_get("/", self._lead)
        app.router.add_get(HOME + "/", self._lead)
        app.router.add_get(ROUTE + "{name:.+}", self._assets.answer)
        app.router.add_post(HOME + "/do/{operation}", self._act)
        for name, page in (*self._pages, ("console", Page("/{rest:.*}", "", _find_nothing))):
            app.router.add_get(HOME + page.path, self._handler(page, page.template_of(name)))
        app.on_response_prepare.append(keep_private)
        app.on_shutdown.append(self.streams.stop)
        app.on_cleanup.append(self._close)

    async def render(self, template: str, **context: Any) -> str:
        """Render a template on the console's thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._renderer, lambda: self._templates.get_template(template).render(context)
        )

    def navigation(self, actor: Actor) -> Mapping[str, list[Page]]:
        """Return the pages that somebody may see, by heading."""
        listed = [page for _, page in sorted(self._pages, key=_by_origin) if page.group and page.right in actor.rights]
        groups = dict.fromkeys([*GROUPS, *(page.group for page in listed if page.group != SERVICE), SERVICE])
        return {group: found for group in groups if (found := [page for page in listed if page.group == group])}

    # Requests.

    async def _lead(self, request: web.Request) -> web.Response:
        """Lead people from ``/`` to the first page; programs find nothing there."""
        if not wants_html(request):
            raise web.HTTPNotFound
        return web.Response(status=302, headers={hdrs.LOCATION: HOME, hdrs.VARY: hdrs.ACCEPT})

    def _handler(self, page: Page, template: str) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            page_request = await self._page_request(request)
            if page_request is None:
                return self._access.ask_to_sign_in(request)
            try:
                if page.right not in page_request.actor.rights:
                    raise NotAllowedError(page.right)
                shown = await page.show(page_request)
            except (MediatorError, TimeoutError, web.HTTPException) as error:
                return await self._refused(page_request, error)
            if isinstance(shown, web.StreamResponse):
                return shown
            for value in shown.values():
                for table in value if isinstance(value, list) else [value]:
                    if isinstance(table, Table) and table.request.format:
                        return table.file()
            return await self._page(page_request, template, page=page, **shown)

        return answer

    async def _page_request(self, request: web.Request) -> PageRequest | None:
        visitor = await self._access.visitor(request)
        return None if visitor is None else PageRequest(request, *visitor, operations=self.operations)

    async def _page(self, page_request: PageRequest, template: str, status: int = 200, **context: Any) -> web.Response:
        notice = unquote(page_request.request.cookies.get(_NOTICE, ""))[:_NOTICE_LENGTH]
        shown = {
            "page_request": page_request,
            "navigation": self.navigation(page_request.actor),
            "notice": notice,
            "status": status,
        }
        text = await self.render(template, **shown, **context)
        response = web.Response(text=text, status=status, content_type="text/html", headers=HTML_HEADERS)
        if notice:
            response.del_cookie(_NOTICE, path=HOME)
        return response

    async def _refused(self, page_request: PageRequest, error: Exception) -> web.Response:
        status, text = _told(error)
        return await self._page(page_request, "console/refused.html", status, page=None, text=text)

    async def _act(self, request: web.Request) -> web.StreamResponse:
        """Run an operation for a form, and lead back to the page with a notice of what it did."""
        page_request = await self._page_request(request)
        if page_request is None:
            return self._access.ask_to_sign_in(request)
        form, secure = await read_post(request), self._access.secure(request)
        try:
            self._access.check_form(request, form.get("csrf", ""))
            operation = self.operations.get(request.match_info["operation"])
            extend_time_limit(request, operation.within + GRACE)
            if operation.right in page_request.actor.rights:
                fields = read_form(operation, form)
            else:
                # It is refused, and audited with what it names.
                fields = {name: str(form[name]) for name in operation.fields if name in form}
            answer = await _run_for_each(page_request, operation, form, fields)
        except (MediatorError, TimeoutError, web.HTTPException) as error:
            if "back" not in form:
                return await self._refused(page_request, error)
            return _lead_back(_path_of_ours(form["back"]), f"Not done: {_told(error)[1]}.", secure=secure)
        secrets = operation.secrets_of(answer)
        flat = {
            name: value
            for name, value in answer.items()
            if isinstance(value, str | int | float) and name not in secrets
        }
        done = string.Template(str(form.get("done", "") or "Done.")).safe_substitute(flat)
        quoted = {name: quote(str(value), safe="") for name, value in flat.items()}
        then = string.Template(str(form.get("then", ""))).safe_substitute(quoted)
        back = _path_of_ours(then or str(form.get("back", HOME)))
        if secrets:
            # No address, cookie or page of ours ever has a secret again, so the answer itself is the page.
            return await self._page(page_request, "console/once.html", page=None, done=done, secrets=secrets, back=back)
        return _lead_back(back, done, secure=secure)

    async def _close(self, _app: web.Application) -> None:
        self._renderer.shutdown(wait=False, cancel_futures=True)


async def _run_for_each(
    page_request: PageRequest, operation: Operation, form: MultiMapping[str], fields: Mapping[str, Any]
) -> Answer:
    """Run an operation, or run it for each row that was selected where a table says so; see the macro ``selected``.

    What is done for many answers how many, and why the first of the others was not.
    """
    if CHOSEN not in form:
        return await page_request.run(operation.name, **fields)
    chosen = [each for each in form.getall(CHOSEN) if each]
    if not chosen or len(chosen) > MAX_ROWS:
        raise BadRequestError(CHOSEN, "select rows of the table first" if not chosen else f"select at most {MAX_ROWS}")
    done, failed = 0, ""
    end = time.monotonic() + operation.within
    for each in chosen:
        try:
            await page_request.run(operation.name, **{**fields, **dict(parse_qsl(each))})
            done += 1
        except NotAllowedError:
            raise
        except (MediatorError, TimeoutError) as error:
            failed = failed or f" Not done: {_told(error)[1]}."
        if time.monotonic() > end:
            failed = failed or " Time was over: repeat it for the rest."
            break
    return {"count": done, "selected": len(chosen), "failed": failed}


def _by_origin(page: tuple[str, Page]) -> bool:
    """Put pages of the core before those of parts, which come first."""
    return page[0] != "console"


async def _find_nothing(_page_request: PageRequest) -> PageContent:
    raise web.HTTPNotFound


def _told(error: Exception) -> tuple[int, str]:
    """Return the status and the text for an error."""
    if isinstance(error, MediatorError):
        return error.status, str(error)
    status = error.status if isinstance(error, web.HTTPException) else 504
    return status, CODES.get(status, "bad_request").replace("_", " ")


def _path_of_ours(back: str) -> str:
    """Return where a form leads: to no other host, and with no line breaks in a header."""
    return back if back.startswith(HOME) and back.isprintable() and "\\" not in back else HOME


def _lead_back(path: str, notice: str, *, secure: bool) -> web.Response:
    response = web.Response(status=303, headers={hdrs.LOCATION: path})
    response.set_cookie(
        _NOTICE,
        quote(notice[:_NOTICE_LENGTH]),
        path=HOME,
        max_age=_NOTICE_SECONDS,
        httponly=True,
        samesite="Strict",
        secure=secure,
    )
    return response
