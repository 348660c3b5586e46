"""did:web against a real TLS server: where documents are, what is taken for one, and how seldom is asked."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import ip_network

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import UnresolvedDidError
from mediator.http.guard import Guard
from pickup.dids.resolver import KEPT_SECONDS, MAX_AT_ONCE, MAX_BYTES, MISSED_SECONDS, DidWebResolver, url_of
from tests.harness.certificates import Certificate, issue

PATIENCE = 10.0
HOST = "localhost"


class Host:
    """A web server with documents, and a resolver that trusts it."""

    def __init__(self, port: int, tls: ssl.SSLContext) -> None:
        self.now = 1000.0
        self.did = f"did:web:{HOST}%3A{port}"
        self.asked: list[str] = []
        self.documents: dict[str, object] = {}
        self.before: Callable[[], Awaitable[None]] | None = None
        self.guard = Guard([ip_network("127.0.0.1/32"), ip_network("::1/128")], tls=tls)
        self.dids = DidWebResolver(self.guard, clock=lambda: self.now)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.before is not None:
            await self.before()
        document = self.documents.get(request.path)
        if document is None:
            raise web.HTTPNotFound
        return web.Response(body=document) if isinstance(document, bytes) else web.json_response(document)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return issue(tmp_path_factory.mktemp("tls"), HOST)


@pytest.fixture
async def host(certificate: Certificate) -> AsyncIterator[Host]:
    listening = socket.create_server(("127.0.0.1", 0))
    one = Host(listening.getsockname()[1], ssl.create_default_context(cafile=certificate.authority))
    app = web.Application()
    app.router.add_get("/{path:.*}", one.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate.cert, certificate.key)
    await web.SockSite(runner, listening, ssl_context=tls).start()
    yield one
    await one.guard.close()
    await runner.cleanup()


@pytest.mark.parametrize(
    ("did", "url"),
    [
        ("did:web:example.com", "https://example.com/.well-known/did.json"),
        ("did:web:w3c-ccg.github.io", "https://w3c-ccg.github.io/.well-known/did.json"),
        ("did:web:w3c-ccg.github.io:user:alice", "https://w3c-ccg.github.io/user/alice/did.json"),
        ("did:web:example.com%3A3000:user:alice", "https://example.com:3000/user/alice/did.json"),
        ("did:web:example.com%3a8443", "https://example.com:8443/.well-known/did.json"),
        ("did:web:localhost%3A8080", "https://localhost:8080/.well-known/did.json"),
        ("did:web:example.com:a%40b", "https://example.com/a@b/did.json"),
    ],
)
def test_where_documents_are(did: str, url: str) -> None:
    assert url_of(did) == url


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "did",
    [
        "did:web:",
        "did:web::a",
        "did:web:127.0.0.1",
        "did:web:2130706433",
        "did:web:example.com%2Fpath",
        "did:web:example.com%3A",
        "did:web:example.com%3Aport",
        "did:web:example.com%3A80%3A90",
        "did:web:example.com:",
        "did:web:example.com:a::b",
        "did:web:example.com:..:b",
        "did:web:example.com:%2e%2e:b",
        "did:web:example.com:a%2Fb",
        "did:web:example.com:a%3Fb",
        "did:web:example.com:a%23b",
        "did:web:example.com:a%0d%0ab",
        "did:web:user@example.com",
        "did:web:user%40example.com",
        "did:web:[%3A%3A1]",
        "did:web:-example.com",
        "did:web:exämple.com",
        "did:webs:example.com",
        "did:web:" + "a" * 300 + ".com",
    ],
)
def test_what_is_no_did_web(did: str) -> None:
    with pytest.raises(UnresolvedDidError):
        url_of(did)


@pytest.mark.rule("D12")
@given(st.text("abcA01.-:%3@/?#[]é\n", max_size=40))
def test_any_did_web_leads_to_one_tls_host_or_nowhere(rest: str) -> None:
    try:
        url = url_of(f"did:web:{rest}")
    except UnresolvedDidError:
        return
    host, _, path = url.removeprefix("https://").partition("/")
    assert url.startswith("https://")
    assert path.endswith("/did.json")
    assert not set("@[]?#\n") & set(host)


async def test_a_document_is_fetched_once_in_five_minutes(host: Host) -> None:
    host.documents["/.well-known/did.json"] = {"id": host.did}
    first = await host.dids.resolve(host.did)
    host.now += KEPT_SECONDS - 1
    assert await host.dids.resolve(host.did) is first
    assert len(host.asked) == 1
    host.now += 1
    assert (await host.dids.resolve(host.did)).did == host.did
    assert len(host.asked) == 2


async def test_a_document_below_a_path(host: Host) -> None:
    did = f"{host.did}:user:alice"
    host.documents["/user/alice/did.json"] = {"id": did, "service": []}
    assert (await host.dids.resolve(did)).did == did
    assert host.asked == ["/user/alice/did.json"]


@pytest.mark.rule("D12")
async def test_what_is_no_document_of_that_did_is_none(host: Host) -> None:
    for at, document in enumerate(
        [
            {"id": "did:web:somebody.else"},
            {"id": f"{host.did}#fragment"},
            {},
            [],
            b"",
            b"<html>",
            b"\xff\xfe",
            b"[" * 5000,
            b'{"id": "' + b"x" * MAX_BYTES + b'"}',
        ]
    ):
        host.documents[f"/{at}/did.json"] = document
        with pytest.raises(UnresolvedDidError):
            await host.dids.resolve(f"{host.did}:{at}")


async def test_what_is_not_there_is_not_asked_for_again_for_a_while(host: Host) -> None:
    for _ in range(3):
        with pytest.raises(UnresolvedDidError):
            await host.dids.resolve(host.did)
    assert len(host.asked) == 1
    host.now += MISSED_SECONDS
    host.documents["/.well-known/did.json"] = {"id": host.did}
    assert (await host.dids.resolve(host.did)).did == host.did


async def test_many_who_ask_at_once_share_one_fetch(host: Host) -> None:
    host.documents["/.well-known/did.json"] = {"id": host.did}
    found = await asyncio.gather(*(host.dids.resolve(host.did) for _ in range(50)))
    assert {id(document) for document in found} == {id(found[0])}
    assert len(host.asked) == 1


async def test_whoever_gives_up_does_not_end_the_fetch_of_others(host: Host) -> None:
    async def hold() -> None:
        begun.set()
        await go_on.wait()

    begun, go_on = asyncio.Event(), asyncio.Event()
    host.before = hold
    host.documents["/.well-known/did.json"] = {"id": host.did}
    impatient = asyncio.create_task(host.dids.resolve(host.did))
    patient = asyncio.create_task(host.dids.resolve(host.did))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    go_on.set()
    assert (await asyncio.wait_for(patient, PATIENCE)).did == host.did


async def test_only_so_many_are_fetched_at_once(host: Host) -> None:
    async def count() -> None:
        nonlocal beside, most
        beside += 1
        most = max(most, beside)
        # Lets the other fetches come as far as they get.
        for _ in range(200):
            await asyncio.sleep(0)
        beside -= 1

    beside = most = 0
    host.before = count
    wanted = [f"{host.did}:{n}" for n in range(3 * MAX_AT_ONCE)]
    for n, did in enumerate(wanted):
        host.documents[f"/{n}/did.json"] = {"id": did}
    found = await asyncio.gather(*map(host.dids.resolve, wanted))
    assert [document.did for document in found] == wanted
    assert 1 < most <= MAX_AT_ONCE


async def test_a_host_that_nobody_vouches_for_is_not_believed(host: Host) -> None:
    host.documents["/.well-known/did.json"] = {"id": host.did}
    guard = Guard([ip_network("127.0.0.1/32"), ip_network("::1/128")])
    try:
        with pytest.raises(UnresolvedDidError):
            await DidWebResolver(guard).resolve(host.did)
    finally:
        await guard.close()
    assert host.asked == []


@pytest.mark.rule("D10")
async def test_a_did_does_not_lead_inside(host: Host) -> None:
    host.documents["/.well-known/did.json"] = {"id": host.did}
    guard = Guard()
    try:
        with pytest.raises(UnresolvedDidError):
            await DidWebResolver(guard).resolve(host.did)
    finally:
        await guard.close()
    assert host.asked == []
