"""The client library by itself: what it packs it can open, what it keeps is private, what it reads it checks."""

from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pickup.client import ClientError, MediatorInvitation, ProblemError, Sender, Wallet
from pickup.client.conversation import ClientResources, raise_problem
from pickup.client.handshake import services
from pickup.client.plaintext import base64url, read, write
from pickup.client.wallet import Link
from pickup.rules import names
from pickup.rules.records import Generation

PATIENCE = 60.0
NOTE = {"@type": "https://didcomm.org/basicmessage/1.0/message", "@id": "1", "content": "grüß"}
NOTE_V2 = {"id": "1", "type": "https://didcomm.org/basicmessage/2.0/message", "body": {"content": "grüß"}}


async def opened(wallet: Wallet, envelope: bytes) -> Any:
    tools = ClientResources(wallet)
    try:
        return await tools.envelopes.open(envelope)
    finally:
        await tools.close()


async def test_a_forward_of_v1_is_opened_layer_by_layer():
    holder, inner, outer = Wallet(), Wallet(), Wallet()
    key, near, far = holder.new_key(), inner.new_key(), outer.new_key()
    async with Sender() as sender:
        packed = await sender.pack_v1(key, [near, far], NOTE)
    first = await opened(outer, packed)
    assert first.sender is None
    assert names.canonical(first.plaintext["to"]) == near
    second = await opened(inner, orjson.dumps(first.plaintext["msg"]))
    # Mediators in use understand nothing else.
    assert second.plaintext["to"] == names.base58(names.verkey(key))
    last = await opened(holder, orjson.dumps(second.plaintext["msg"]))
    assert (last.sender, last.recipient) == (sender.key, key)
    assert last.plaintext == NOTE


async def test_a_forward_of_v2_is_opened_layer_by_layer():
    holder, mediator = Wallet(), Wallet()
    did, routing = holder.new_did(), mediator.new_did()
    async with Sender() as sender:
        packed = await sender.pack_v2(did, routing, NOTE_V2)
    first = await opened(mediator, packed)
    assert first.sender is None
    assert first.plaintext["body"] == {"next": did}
    (attached,) = first.plaintext["attachments"]
    last = await opened(holder, orjson.dumps(attached["data"]["json"]))
    assert last.sender == sender.did
    assert last.plaintext["body"] == NOTE_V2["body"]


async def test_a_wallets_file_is_private_and_holds_everything(tmp_path: Path):
    path = tmp_path / "wallet.json"
    wallet = Wallet.load(path)
    key, did = wallet.new_key(), wallet.new_did()
    link = Link(Generation.V2, did, "did:key:z6MkMediator", ("http://127.0.0.1:1/didcomm",), routing=("did:x:y",))
    wallet.links["m"] = link.written()
    wallet.save()
    assert path.stat().st_mode & 0o777 == 0o600
    again = Wallet.load(path)
    assert await again.seed(key) == await wallet.seed(key) is not None
    assert again.kid(f"{did}#key-2") == wallet.kid(f"{did}#key-2") is not None
    assert Link.read(again.links["m"]) == link
    path.chmod(0o640)
    with pytest.raises(ClientError, match="600"):
        Wallet.load(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"seeds": {"a": 1}, "secrets": [], "links": {}}'])
def test_what_is_no_wallet_is_refused(tmp_path: Path, content: str):
    path = tmp_path / "wallet.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ClientError, match="not a wallet"):
        Wallet.load(path)


def url_of(invitation: dict[str, Any], parameter: str) -> str:
    return f"https://mediator.example/didcomm?{parameter}={base64url(orjson.dumps(invitation))}"


def test_invitations_are_read_in_every_form():
    key = Wallet().new_key()
    service = {"id": "#s", "type": "did-communication", "recipientKeys": [key], "serviceEndpoint": "http://x.example"}
    v1 = MediatorInvitation.parse(url_of({"@type": "…/invitation", "@id": "a", "services": [service]}, "oob"))
    assert (v1.generation, v1.id, v1.key, v1.endpoint) == (Generation.V1, "a", key, "http://x.example")
    old = MediatorInvitation.parse(url_of({"@type": "…", "@id": "b", **service}, "c_i"))
    assert (old.id, old.key) == ("b", key)
    v2 = MediatorInvitation.parse(url_of({"type": "…", "id": "c", "from": "did:peer:2.x"}, "_oob"))
    assert (v2.generation, v2.id, v2.did) == (Generation.V2, "c", "did:peer:2.x")
    assert MediatorInvitation.parse("did:web:mediator.example").did == "did:web:mediator.example"


async def test_short_links_are_followed_to_the_invitation():
    raw = {"type": "…", "id": "c", "from": "did:peer:2.x"}
    accepted: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        accepted.append(request.headers["Accept"])
        match request.path:
            case "/json":
                return web.json_response(raw)
            case "/redirect":
                return web.Response(status=302, headers={"Location": url_of(raw, "_oob")})
            # Some mediators lead straight into a wallet's application.
            case "/application":
                return web.Response(status=301, headers={"Location": url_of(raw, "_oob").replace("https", "didcomm")})
            case "/page":
                return web.Response(text="<p>hello</p>")
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_get("/{path}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        for path in ("/json", "/redirect", "/application"):
            found = await MediatorInvitation.load(str(server.make_url(path)), session, PATIENCE)
            assert (found.generation, found.id, found.did) == (Generation.V2, "c", "did:peer:2.x")
        for path, error in (("/page", "expected JSON"), ("/gone", "HTTP 404")):
            with pytest.raises(ClientError, match=error):
                await MediatorInvitation.load(str(server.make_url(path)), session, PATIENCE)
        for text in ("hello", "http://", "http://[", "https://127.0.0.1:1/i/x"):
            with pytest.raises(ClientError):
                await MediatorInvitation.load(text, session, PATIENCE)
    assert set(accepted) == {"application/json"}


@pytest.mark.parametrize(
    "text", ["https://mediator.example/", "https://x.example?oob=%21", "https://x.example?oob=e30", "hello"]
)
def test_what_is_no_invitation_is_refused(text: str):
    with pytest.raises(ClientError):
        MediatorInvitation.parse(text)


@pytest.mark.parametrize(
    ("generation", "type", "body", "code", "text"),
    [
        (Generation.V1, "report-problem/1.0", {"description": {"code": "c", "en": "why"}}, "c", "why"),
        (Generation.V1, "notification/1.0", {"description": "why"}, "", "why"),
        (Generation.V1, "didexchange/1.0", {"problem-code": "c", "explain": "why"}, "c", "why"),
        (Generation.V2, "report-problem/2.0", {"code": "e.p", "comment": "why"}, "e.p", "why"),
        (
            Generation.V2,
            "report-problem/2.0",
            {"code": "e", "comment": "{1}: {2}", "args": [None, "{1}"]},
            "e",
            "?: {1}",
        ),
        (Generation.V2, "report-problem/2.0", {"code": "e", "comment": "{2}", "args": ["a"]}, "e", "?, a"),
    ],
)
def test_problem_reports_are_raised(generation: Generation, type: str, body: dict[str, Any], code: str, text: str):
    report = read(write(generation, f"{type}/problem-report", body), generation)
    with pytest.raises(ProblemError) as raised:
        raise_problem(report)
    assert (raised.value.code, raised.value.text) == (code, text)


def test_services_are_found_by_reference_and_priority():
    key = Wallet().new_key()
    document = {
        "verificationMethod": [{"id": "did:x:y#k", "publicKeyMultibase": key.removeprefix("did:key:")}],
        "service": [
            {"id": "2", "priority": 1, "recipientKeys": ["#k"], "serviceEndpoint": "ws://x.example"},
            {"id": "1", "priority": 0, "recipientKeys": ["#k"], "serviceEndpoint": "http://x.example"},
            {"id": "3", "serviceEndpoint": {"uri": "http://v2.example"}},
        ],
    }
    assert services(document) == (key, ("http://x.example", "ws://x.example"))
    with pytest.raises(ClientError):
        services({"service": []})
