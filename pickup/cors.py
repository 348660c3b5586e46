"""Lets web pages of other origins use the public paths of the door (CORS, https://fetch.spec.whatwg.org)."""

from collections.abc import Collection
from typing import cast

from aiohttp import hdrs, web

from pickup.transports import PATH

ANY = "*"
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
        if ANY not in self._origins:
            # A cache must not give the answer for one origin to another.
            vary = response.headers.get(hdrs.VARY)
            response.headers[hdrs.VARY] = f"{vary}, Origin" if vary else "Origin"
        allowed = self._allowed(request)
        if allowed:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "Retry-After, X-Request-ID"

    def _allowed(self, request: web.Request) -> str:
        if ANY in self._origins:
            return ANY
        origin = request.headers.get(hdrs.ORIGIN, "")
        return origin if origin in self._origins else ""


def _is_public(path: str) -> bool:
    return path == PATH or path.startswith(_PUBLIC)
