"""Cards that are registered by URL, from real servers: what is asked for, what is taken, what is not reached."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mediator.errors import UnreachableError
from registry.cards.card import MAX_CARD, read_card
from registry.cards.sources import fetch_card, with_mailbox
from tests.integration.test_guard import PATIENCE, Names, guarding, serving

CARD = b'{ "name": "B\\u00e4cker",\n "url": "https://baker.example" }'
NEW = "/.well-known/agent-card.json"
OLD = "/.well-known/agent.json"


def pages(answers: dict[str, bytes | int]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A server with pages by path: a body or a status."""

    async def answer(request: web.Request) -> web.StreamResponse:
        page = answers.get(request.path, 404)
        return web.Response(body=page) if isinstance(page, bytes) else web.Response(status=page, text="no card")

    return answer


@pytest.mark.parametrize(
    ("there", "asked_for", "requests"),
    [
        (NEW, "", [NEW]),
        (NEW, "/", [NEW]),
        (OLD, "", [NEW, OLD]),
        (f"/baker{NEW}", "/baker/", [f"/baker{NEW}"]),
        (f"/baker{NEW}", "/baker", [f"/baker{NEW}"]),
        (f"/baker{OLD}", "/baker#top", [f"/baker{NEW}", f"/baker{OLD}"]),
        ("/agents/7", "/agents/7", [f"/agents/7{NEW}", f"/agents/7{OLD}", "/agents/7"]),
        ("/baker.json", "/baker.json", ["/baker.json"]),
        (NEW, NEW, [NEW]),
        (OLD, OLD, [OLD]),
        ("/cards", "/cards?agent=baker", ["/cards"]),
    ],
)
async def test_a_card_is_looked_for_where_agents_publish_it(there: str, asked_for: str, requests: list[str]) -> None:
    async with serving(pages({there: CARD})) as server, guarding() as guard:
        data = await fetch_card(guard, server.url + asked_for, PATIENCE)
        assert data == CARD
        assert server.asked == [f"GET {path}" for path in requests]
        assert read_card(with_mailbox(data, "mq9://broker/baker")).name == "Bäcker"


async def test_of_several_failures_the_first_is_reported() -> None:
    async with serving(pages({NEW: 503})) as server, guarding() as guard:
        with pytest.raises(UnreachableError, match=r"\Aurl: expected status 200, got 503\Z"):
            await fetch_card(guard, server.url, PATIENCE)
        assert server.asked == [f"GET {NEW}", f"GET {OLD}"]


@pytest.mark.parametrize("page", [b"<!doctype html><title>Welcome</title>", b"[]", b"", b"[" * 5000, b'{"a": NaN}'])
async def test_a_page_that_is_no_card_is_not_taken_for_one(page: bytes) -> None:
    async with serving(pages({NEW: page, OLD: CARD})) as server, guarding() as guard:
        assert await fetch_card(guard, server.url, PATIENCE) == CARD
        with pytest.raises(UnreachableError, match=r"\Aurl: card: expected "):
            await fetch_card(guard, server.url + NEW, PATIENCE)


async def test_a_too_large_card_is_not_read_to_its_end() -> None:
    start, end = b'{"x": "', b'"}'
    card = start + b"x" * (MAX_CARD - len(start) - len(end)) + end
    async with serving(pages({"/a.json": card, "/b.json": card + b" "})) as server, guarding() as guard:
        assert await fetch_card(guard, f"{server.url}/a.json", PATIENCE) == card
        with pytest.raises(UnreachableError, match=rf"\Aurl: expected a body of at most {MAX_CARD} bytes\Z"):
            await fetch_card(guard, f"{server.url}/b.json", PATIENCE)


async def test_a_silent_server_is_given_up_and_not_tried_again() -> None:
    connections = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, guarding() as guard:
        with pytest.raises(UnreachableError, match=r"\Aurl: no answer within 0\.2 seconds\Z"):
            await asyncio.wait_for(fetch_card(guard, f"http://127.0.0.1:{port}", 0.2), PATIENCE)
    assert connections == 1


async def test_all_places_together_take_no_longer_than_is_allowed() -> None:
    async def slow_to_end(request: web.Request) -> web.StreamResponse:
        if request.path.endswith(NEW):
            return web.Response(status=404)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        await asyncio.Event().wait()
        return response

    async with serving(slow_to_end) as server, guarding() as guard:
        with pytest.raises(UnreachableError):
            await asyncio.wait_for(fetch_card(guard, f"{server.url}/baker", 0.2), PATIENCE)
        assert "GET /baker" not in server.asked


@given(st.text(max_size=40) | st.text("htps:/@[]#?.%a0-\\ \x00é", max_size=40).map(lambda rest: f"http://{rest}"))
@example("")
@example("file:///etc/hostname")
@example("//baker.example")
@example("http://")
@example("http://[]@")
@example("http://a:99999999/")
@example("http://user:secret@baker.example/")
@example("http://baker.example/" + "a" * 3000)
@example("http://baker.example/\ud800")
@settings(max_examples=100, deadline=None)
def test_no_url_leads_anywhere_else(url: str) -> None:
    async def fetch() -> None:
        async with guarding((), Names(["127.0.0.1"])) as guard:
            with pytest.raises(UnreachableError) as raised:
                await fetch_card(guard, url, PATIENCE)
            assert str(raised.value).startswith("url: ")

    asyncio.run(fetch())
