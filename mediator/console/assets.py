"""The files that pages load: styles, scripts and libraries, served from memory under names that change with them."""

import hashlib
from pathlib import Path
from typing import Final

from aiohttp import web

FOLDER: Final = Path(__file__).with_name("static")
ROUTE: Final = "/console/static/"
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


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
