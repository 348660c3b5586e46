"""The doors of the registry: the verbs AGENT.* over NATS, and JSON under /agents over HTTP (G1-G8, A6)."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import orjson
from aiohttp import hdrs, web
from yarl import URL

from mediator import request_context
from mediator.errors import BadRequestError, NoSuchAgentError, NotAuthenticatedError
from mediator.fields import Fields, parse_body, printable
from mediator.host import Host
from mediator.http.callers import HttpCallers
from mediator.http.guard import Guard
from registry.api import codec
from registry.api.openapi import document
from registry.cards.card import agent_address, find_mailbox, parse_card, read_card
from registry.cards.sources import fetch_card, with_mailbox
from registry.directory import Directory
from registry.records import MemoryPolicy
from registry.requests import AgentReference, DiscoverRequest
from registry.search.feedback import WeakSigns

PATH = "/agents"
BUDGET = 1024 * 1024
"""Bytes of cards and reports on one page, which stay in memory while a slow caller reads them."""
MAX_SEARCHES = 8
"""Concurrent searches of each door: each holds a page, which may be a reply of the maximum size."""
FETCH_SECONDS = 8.0
"""To fetch a card that is registered by its URL; the HTTP request as a whole has little more time."""
MAX_URL = 2048
MAX_ORDER = 4096
"""Bytes of a body that has only the URL of a card."""
_MAILBOX = f"{PATH}/{{mailbox}}"
# Answers are only for those who have the token, and may change at any time.
_PRIVATE = {"Cache-Control": "private, no-cache"}
_VIEWS = ("card", "record")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RegistryApi:
    """The HTTP handlers."""

    def __init__(self, directory: Directory, callers: HttpCallers, guard: Guard) -> None:
        """``guard`` is used to fetch cards that are registered by URL."""
        self._directory = directory
        self._callers = callers
        self._guard = guard
        self._searches = asyncio.Semaphore(MAX_SEARCHES)
        self._openapi = orjson.dumps(document())

    def add_routes(self, app: web.Application) -> None:
        """Add the routes of the API and of its OpenAPI document."""
        router = app.router
        router.add_get(PATH, self._find)
        router.add_post(PATH, self._register)
        router.add_options(PATH, _options("GET, HEAD, OPTIONS, POST"))
        router.add_get(_MAILBOX, self._show)
        router.add_delete(_MAILBOX, self._unregister)
        router.add_options(_MAILBOX, _options("DELETE, GET, HEAD, OPTIONS"))
        router.add_post(f"{_MAILBOX}/report", self._report)
        router.add_options(f"{_MAILBOX}/report", _options("OPTIONS, POST"))
        router.add_post(f"{_MAILBOX}/feedback", self._feedback)
        router.add_options(f"{_MAILBOX}/feedback", _options("OPTIONS, POST"))
        router.add_get("/openapi.json", self._describe)

    async def _register(self, request: web.Request) -> web.Response:
        tenant, credential = self._caller(request)
        data = await _body(request)
        done = await self._directory.register(tenant, await self._card(data), credential)
        location = {"Location": f"{PATH}/{quote(done.agent.address, safe=':')}"} if done.created else {}
        return _json(codec.encode_registration(done), 201 if done.created else 200, location)

    async def _card(self, data: bytes) -> bytes:
        """Return the card to register: the body, or the card at the URL in it."""
        if b'"url"' not in data or len(data) > MAX_ORDER:
            return data
        order = parse_card(data)
        # Cards may have a url too, but they have other fields besides.
        if not set(order) <= {"url", "mailbox"}:
            return data
        url = Fields(order).text("url", MAX_URL)
        if url is None:
            raise BadRequestError("url", "expected the URL of a card")
        address = find_mailbox(order)
        card = await fetch_card(self._guard, url, FETCH_SECONDS)
        return card if address is None else with_mailbox(card, address)

    async def _find(self, request: web.Request) -> web.Response:
        tenant = self._tenant(request)
        query = codec.parse_query(request.query)
        async with self._searches:
            page = await self._directory.searcher.discover(tenant, query, BUDGET)
        return _json(codec.encode_page(page, query), headers=_next(query, page.next))

    async def _show(self, request: web.Request) -> web.Response:
        tenant, address = self._tenant(request), _address(request)
        view = Fields(request.query).choice("view", _VIEWS)
        agent, state = await self._directory.get(tenant, address)
        if view == "record":
            warnings = read_card(agent.card).warnings
            record = {"card": orjson.Fragment(agent.card), **codec.encode_history(agent), "warnings": warnings}
            return _json({**record, **codec.encode_state(agent, state)})
        response = web.Response(body=agent.card, content_type="application/json", headers=_PRIVATE)
        response.etag = tag = hashlib.sha256(agent.card).hexdigest()[:32]
        if any(known.value in (tag, "*") for known in request.if_none_match or ()):
            response.body = None
            response.set_status(304)
        return response

    async def _unregister(self, request: web.Request) -> web.Response:
        tenant = self._tenant(request)
        await self._directory.unregister(tenant, AgentReference(address=_address(request)))
        return web.Response(status=204)

    async def _report(self, request: web.Request) -> web.Response:
        tenant, address = self._tenant(request), _address(request)
        data = await _body(request)
        fields = codec.parse_status(data)
        if find_mailbox(fields.values) not in (None, address):
            raise BadRequestError("mailbox", f"expected {address} as in the path")
        agent = await self._directory.report(tenant, AgentReference(address=address), data if fields.values else b"{}")
        return _json({"mailbox": address, "last_seen": agent.seen_at // 1000})

    async def _feedback(self, request: web.Request) -> web.Response:
        (tenant, credential), address = self._caller(request), _address(request)
        said = codec.parse_feedback(parse_body(await _body(request)), address)
        counted = await self._directory.feedback(tenant, said, credential)
        return _json({"mailbox": address, "counted": counted})

    async def _describe(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._openapi, content_type="application/json")

    def _tenant(self, request: web.Request) -> str:
        return self._caller(request)[0]

    def _caller(self, request: web.Request) -> tuple[str, str]:
        """Return the tenant of a request, and the credential by which it votes; "" has the secret of this machine."""
        caller = self._callers.identify_request(request)
        if caller.tenant is None:
            raise NotAuthenticatedError
        return caller.tenant, caller.credential


def _address(request: web.Request) -> str:
    return agent_address(request.match_info["mailbox"])


async def _body(request: web.Request) -> bytes:
    """Return the body; it must be JSON, which pages of other sites cannot make a browser send without a preflight."""
    if request.content_type != "application/json" and not request.content_type.endswith("+json"):
        raise BadRequestError("content-type", f'expected application/json, got "{printable(request.content_type)}"')
    return await request.read()


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(body),
        status=status,
        content_type="application/json",
        headers={**_PRIVATE, **(headers or {})},
    )


def _next(query: DiscoverRequest, cursor: str | None) -> dict[str, str]:
    """Return the Link header to the next page, if there is one."""
    if cursor is None:
        return {}
    options = {"with_scores": query.with_scores, "with_state": query.with_state, "explain": query.explain}
    next_page = {
        "cursor": cursor,
        "limit": str(query.limit),
        **{name: "true" for name, value in options.items() if value},
    }
    return {hdrs.LINK: f'<{URL.build(path=PATH, query=next_page)}>; rel="next"'}


def _options(methods: str) -> Handler:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=204, headers={hdrs.ALLOW: methods})

    return answer


ReplyBudget = Callable[[], int]
"""Returns how many bytes a reply may have now; raises :class:`mediator.errors.BusyError` while too many are pending."""


def add_verbs(host: Host, directory: Directory, policy: MemoryPolicy, signs: WeakSigns) -> None:
    """Have the NATS door answer the verbs; ``signs`` learns of searches where the policy says so."""
    searches = asyncio.Semaphore(MAX_SEARCHES)

    async def register(tenant: str, data: bytes, _budget: ReplyBudget) -> bytes:
        done = await directory.register(tenant, data, request_context.caller.get())
        return orjson.dumps({"error": "", "mailbox": done.agent.address, **codec.encode_remarks(done.card)})

    async def unregister(tenant: str, data: bytes, _budget: ReplyBudget) -> bytes:
        reference = codec.parse_reference(parse_body(data))
        try:
            agent = await directory.unregister(tenant, reference)
        except NoSuchAgentError:
            return orjson.dumps({"error": "", "mailbox": reference.address or "", "removed": False})
        return orjson.dumps({"error": "", "mailbox": agent.address, "removed": True})

    async def report(tenant: str, data: bytes, _budget: ReplyBudget) -> bytes:
        reference = codec.parse_reference(codec.parse_status(data))
        agent = await directory.report(tenant, reference, data)
        return orjson.dumps({"error": "", "mailbox": agent.address})

    async def discover(tenant: str, data: bytes, budget: ReplyBudget) -> bytes:
        query = codec.parse_discover(parse_body(data))
        async with searches:
            page = await directory.searcher.discover(tenant, query, budget())
        if page.query_id and tenant in policy.signs:
            addresses = [agent.address for agent in page.agents]
            signs.record_search(
                tenant, request_context.connection.get(), page.query_id, request_context.caller.get(), addresses
            )
        return orjson.dumps({"error": "", **codec.encode_page(page, query)})

    async def feedback(tenant: str, data: bytes, _budget: ReplyBudget) -> bytes:
        said = codec.parse_feedback(parse_body(data))
        counted = await directory.feedback(tenant, said, request_context.caller.get())
        return orjson.dumps({"error": "", "mailbox": said.address, "counted": counted})

    if policy.signs:
        host.add_send_listener(signs.record_send)
    host.add_verb("AGENT.REGISTER", "REGISTER", register)
    host.add_verb("AGENT.UNREGISTER", "UNREGISTER", unregister)
    host.add_verb("AGENT.REPORT", "REPORT", report)
    host.add_verb("AGENT.FEEDBACK", "FEEDBACK", feedback)
    host.add_verb("AGENT.DISCOVER", "DISCOVER", discover, {"agents": []})
