"""Serves the mediator's own did:web documents, each at the path its DID names."""

from urllib.parse import urlsplit

from aiohttp import web

from pickup.dids.identities import OwnIdentities
from pickup.transports import PATH

_FRESH = {"Cache-Control": "max-age=300", "Access-Control-Allow-Origin": "*"}


class DidPages:
    """Answers resolvers of did:web."""

    def __init__(self, identities: OwnIdentities, public_url: str) -> None:
        """``public_url`` is the door's; a reverse proxy may strip the front of its path."""
        self._identities = identities
        self._front = urlsplit(public_url).path.removesuffix(PATH)

    def add_routes(self, app: web.Application) -> None:
        """Serve ``did.json`` below the door's path, for the default tenant and for each other."""
        app.router.add_get(f"{PATH}/did.json", self._document)
        app.router.add_get(f"{PATH}/{{tenant}}/did.json", self._document)

    async def _document(self, request: web.Request) -> web.Response:
        document = self._identities.web_document(self._front + request.path)
        if document is None:
            raise web.HTTPNotFound
        return web.json_response(document, headers=_FRESH, content_type="application/did+json")
