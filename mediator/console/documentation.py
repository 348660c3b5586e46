"""The documentation of this version as pages of the console: it comes along, also where no way leads out."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING, Final

from aiohttp import web
from markupsafe import Markup

from mediator.console.pages import Page, PageContent, PageRequest
from mediator.console.tables import HOME
from mediator.system.shipped import shipped_folder

if TYPE_CHECKING:
    from markdown_it.token import Token

FOLDER: Final = shipped_folder("docs")
ROUTE: Final = f"{HOME}/docs"
INDEX: Final = "index"
_PICTURES: Final = {".svg": "image/svg+xml", ".png": "image/png"}
_CONTENTS: Final = re.compile(r"^```\{toctree\}\n:caption: (.*)\n(?::.*\n)*\n((?:.+\n)*)```$", re.MULTILINE)


@cache
def names() -> frozenset[str]:
    """Return the pages there are, such as ``howto/backup``."""
    return frozenset(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.md"))


@cache
def contents() -> Mapping[str, Sequence[tuple[str, str]]]:
    """Return the name and the title of each page by the headings of the site, in its order."""
    captions = dict[str, str]()
    for caption, entries in _CONTENTS.findall(_text(INDEX)):
        for name in (name for entry in entries.split() for name in _matching(entry)):
            captions.setdefault(name, caption)
    found = dict[str, list[tuple[str, str]]]()
    for name, caption in captions.items():
        found.setdefault(caption, []).append((name, title(name)))
    return found


def _matching(entry: str) -> Sequence[str]:
    """Return the pages that an entry of the contents means."""
    if entry.endswith("*"):
        return sorted(name for name in names() if name.startswith(entry[:-1]))
    return [entry] if entry in names() else []


def title(name: str) -> str:
    """Return the first heading of a page, as plain text."""
    return _text(name).partition("\n")[0].removeprefix("# ").replace("`", "")


@cache
def read(name: str) -> Markup:
    """Return a page as HTML. Its links to other pages and pictures lead to those of the console."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    tokens = [token for token in parser.parse(_text(name)) if not token.info.startswith("{")]
    slugs = dict[str, int]()
    for number, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", _slug(tokens[number + 1], slugs))
        elif token.type == "inline":
            _rewrite_links(token.children or [], name)
    text = parser.renderer.render(tokens, parser.options, {})
    # What may be wider than a phone scrolls, by keys too.
    text = text.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    return Markup(text.replace("<pre>", '<pre tabindex="0">'))


def _text(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def _slug(heading: "Token", used: dict[str, int]) -> str:
    """Return the anchor that GitHub and the site give a heading."""
    text = "".join(child.content for child in heading.children or [] if child.type in ("text", "code_inline"))
    slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    count = used[slug] = used.get(slug, -1) + 1
    return f"{slug}-{count}" if count else slug


def _rewrite_links(tokens: Sequence["Token"], name: str) -> None:
    """Have links and pictures of a page lead to the console; a link to what does not come along is its text alone."""
    for number, token in enumerate(tokens):
        if token.type == "image":
            token.attrSet("src", _console_address(str(token.attrGet("src")), name))
        elif token.type == "link_open":
            href = _console_address(str(token.attrGet("href")), name)
            if href:
                token.attrSet("href", href)
            else:
                closing = next(each for each in tokens[number:] if each.type == "link_close")
                token.type = closing.type = "text"


def _console_address(target: str, name: str) -> str:
    """Return where a link of a page leads; empty if what it means does not come along."""
    path, _, anchor = target.partition("#")
    if "://" in path or not path:
        return target
    meant = normpath(f"{name}/../{path}")
    if meant.removesuffix(".md") in names():
        return f"{ROUTE}/{meant.removesuffix('.md')}" + (f"#{anchor}" if anchor else "")
    return f"{ROUTE}/{meant}" if meant in pictures() else ""


@cache
def pictures() -> Mapping[str, Path]:
    """Return the files of the pictures by their names, such as ``pictures/overview.svg``."""
    files = (FOLDER / "pictures").iterdir()
    return {path.relative_to(FOLDER).as_posix(): path for path in files if path.suffix in _PICTURES}


async def _show(page_request: PageRequest) -> PageContent:
    name = page_request.request.match_info.get("name", INDEX)
    if name in pictures():
        path = pictures()[name]
        headers = {"Cache-Control": "private, max-age=3600"}
        return web.Response(body=path.read_bytes(), content_type=_PICTURES[path.suffix], headers=headers)
    if name not in names():
        raise web.HTTPNotFound
    # Files are read where the page is rendered, on the console's thread.
    return {"name": name, "read": read, "name_of": title, "contents": contents}


DOCUMENTATION_PAGES: Final = (
    Page("/docs", "Documentation", _show, "Service", template="documentation.html"),
    Page("/docs/{name:.+}", "Documentation", _show, template="documentation.html"),
)
