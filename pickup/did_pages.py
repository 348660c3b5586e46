"""Tells the mediator's own DIDs, and serves its did:web documents, each at the path its DID names."""

from urllib.parse import urlsplit

from aiohttp import web

from pickup.dids.identities import OwnIdentities
from pickup.dids.own_dids import OWN_PATH_TENANT
from pickup.transports import PATH

_FRESH = {"Cache-Control": "max-age=300"}


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
        return web.json_response(document, headers=_FRESH, content_type="application/did+json")

    async def _dids(self, request: web.Request) -> web.Response:
        """Answer with the DIDs for new wallets, on plain HTTP too, where the method did:web is not allowed."""
        identity = self._identities.find_current(request.match_info.get("tenant", OWN_PATH_TENANT))
        if identity is None:
            raise web.HTTPNotFound
        told = {"did": identity.v2_did, "socket_did": identity.socket_did, "web_did": identity.web_did}
        return web.json_response(told, headers=_FRESH)
