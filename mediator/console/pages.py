"""What a page of the console is, and the request for one: for the parts that bring pages of their own.

A part adds its pages while it opens, with a folder of Jinja2 templates in its own package::

    host.console.add_pages("echo", Path(__file__).parent / "templates", Page("/echoes", "Echoes", show_echoes, "Mail"))

``show_echoes(page_request)`` returns what its template, ``echo/echoes.html``, shows::

    {% extends "console/base.html" %}
    {% block content %}…{% endblock %}

It asks for everything through operations, as whoever is signed in: ``await page_request.run("echo-list", limit=100)``.
What changes something is a form of ``{{ act(…) }}`` (``console/macros.html``), which runs an operation. Records are
shown by ``page_request.table(…)`` and ``{{ table(…) }}``, which sorts, filters, pages and offers them as files.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mediator.console.tables import MAX_ROWS, Table, TableRequest
from mediator.errors import BadRequestError
from mediator.operate.operations import Actor, Answer, Operations, Right
from mediator.operate.records import Column

PageContent = Mapping[str, Any] | web.StreamResponse
"""What a page's template shows, or a response of another kind."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for a page by somebody who may see it."""

    request: web.Request
    actor: Actor
    csrf: str
    """What a form sends back, to prove that it is one of ours."""
    operations: Operations

    async def run(self, operation: str, /, **fields: Any) -> Answer:
        """Run an operation as whoever is signed in; raises :class:`MediatorError` as it does."""
        return await self.operations.run(self.actor, operation, fields)

    def may(self, right: str) -> bool:
        """Return whether the visitor has a right; templates leave out what it could not do."""
        return Right(right) in self.actor.rights

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter of the path or of the query."""
        return self.request.match_info.get(name) or self.request.query.get(name, default).strip()

    def number(self, name: str, default: int, lowest: int, highest: int) -> int:
        """Return a whole number of the query; :class:`BadRequestError` when it is none, or out of bounds."""
        text = self.text(name)
        if not text:
            return default
        if not text.isascii() or not text.isdigit() or len(text) > 15 or not lowest <= int(text) <= highest:
            raise BadRequestError(name, f"expected {lowest} to {highest}")
        return int(text)

    def table_request(
        self, name: str, orders: Mapping[str, str] | None = None, max_rows: int = MAX_ROWS
    ) -> TableRequest:
        """Return what is asked of a table; ``orders``: those that its operation knows, by ``sort``."""
        return TableRequest(name, self.request.rel_url.raw_path, self.request.query, orders or {}, max_rows)

    def table(
        self,
        request: TableRequest | str,
        caption: str,
        columns: Sequence[Column],
        rows: Sequence[Answer],
        *,
        empty: str = "None.",
        total: int | None = None,
        older: Mapping[str, Any] | None = None,
    ) -> Table:
        """Return a table for the macro ``table``; ``request`` is its name where ``rows`` are all there are.

        ``total``: how many there are where ``rows`` are those of the request's window. ``older``: the page's parameters
        that go on behind ``rows``, None in place of a value at the end.
        """
        asked = self.table_request(request) if isinstance(request, str) else request
        return Table.of(asked, caption, columns, rows, self.actor.rights, empty=empty, total=total, older=older)


Handler = Callable[[PageRequest], Awaitable[PageContent]]


@dataclass(frozen=True, slots=True)
class Page:
    """A page, answered to GET."""

    path: str
    """Below ``/console``, with parameters in braces as in aiohttp's routes."""
    title: str
    show: Handler
    group: str = ""
    """The heading under which it stands in the navigation; none: other pages link to it."""
    template: str = ""
    """A file of the part's folder; by default the last word of the path, ``echoes.html`` for ``/echoes``."""
    right: Right = Right.READ
    """Without it, the page is refused and not in the navigation."""
    guide: str = "howto/console"
    """The page of the documentation that tells more, below ``docs``."""

    def template_of(self, name: str) -> str:
        """Return the template's name among those of all parts, for the part of this name."""
        return f"{name}/{self.template or self.path.rpartition('/')[2] + '.html'}"
