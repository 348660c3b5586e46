"""Invitations: every form, as links, short links, QR codes and pages, and how long they are open."""

import base64
import hashlib
import math
import re
import struct
import zlib
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import orjson
import pytest
import zxingcpp
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from mediator.errors import BadRequestError, NoSuchInvitationError
from mediator.http.app import build_app
from mediator.http.health import Health
from pickup import qr
from pickup.dids.own_dids import invitation_key
from pickup.invitations import InvitationForms, id_inside, id_of_short, short_id
from pickup.pages import InvitationPages
from pickup.rules import connecting as module
from pickup.rules.names import canonical, verkey
from pickup.rules.records import Invitation
from tests.harness.handshaking import PUBLIC_URL, START, Setup, setup

DAY = 24 * 3600 * 1000
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"}
"""What browsers send with the address that somebody opened."""


async def list_all(door: Setup, tenant: str, limit: int = 100) -> list[Invitation]:
    return await door.context.mediation.list_invitations(tenant, limit)


@pytest.fixture
async def door() -> AsyncIterator[Setup]:
    async with setup("default", "acme") as made:
        yield made


@pytest.fixture
async def browser(door: Setup) -> AsyncIterator[TestClient[Any, Any]]:
    pages = InvitationPages(door.context.mediation, door.invitations)
    app = build_app(Health(), CollectorRegistry())
    pages.add_routes(app)
    app.router.add_get("/didcomm", pages.door)
    async with TestClient(TestServer(app)) as client:
        yield client


def inside(url: str) -> tuple[str, dict[str, Any]]:
    """Return the one parameter of an URL, and the JSON it carries."""
    parts = urlsplit(url)
    assert f"{parts.scheme}://{parts.netloc}{parts.path}" == PUBLIC_URL
    [(name, [value])] = parse_qs(parts.query, strict_parsing=True).items()
    assert re.fullmatch(r"[A-Za-z0-9_-]+", value)
    return name, orjson.loads(base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)))


def scanned(png: bytes) -> str:
    """Return what a scanner reads in a PNG of one bit a pixel."""
    [found] = zxingcpp.read_barcodes(pixels(png), formats=zxingcpp.BarcodeFormat.QRCode)
    return str(found.text)


def pixels(png: bytes) -> Any:
    """Return the grey values of a PNG of one bit a pixel, an array of height by width."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert (depth, kind) == (1, 0)
    at, packed = 8, b""
    while at < len(png):
        size, name = struct.unpack(">I4s", png[at : at + 8])
        packed += png[at + 8 : at + 8 + size] if name == b"IDAT" else b""
        at += 12 + size
    data = zlib.decompress(packed)
    stride = (width + 7) // 8 + 1
    grey, above = bytearray(), bytes(stride - 1)
    for y in range(height):
        how, line = data[y * stride], data[y * stride + 1 : (y + 1) * stride]
        assert how in (0, 2), "neither as it is nor as a difference to the line above"
        above = line if how == 0 else bytes((a + b) & 255 for a, b in zip(line, above, strict=True))
        grey += bytes(255 * int(bit) for bit in "".join(f"{byte:08b}" for byte in above)[:width])
    return np.frombuffer(bytes(grey), np.uint8).reshape(height, width)


def photographed(png: bytes, across: int) -> Any:
    """Return what a phone's camera sees of a code: this many pixels wide, turned, blurred, noisy and in dim light."""
    image, turn = pixels(png).astype(float), math.radians(12)
    size, margin = image.shape[0], across * 1.5
    # Four samples across for each pixel of the camera.
    y, x = (np.mgrid[0 : int(margin) * 4, 0 : int(margin) * 4] / 4 - margin / 2) / across
    row = np.clip((0.5 - x * math.sin(turn) + y * math.cos(turn)) * size, 0, size - 1).astype(int)
    column = np.clip((0.5 + x * math.cos(turn) + y * math.sin(turn)) * size, 0, size - 1).astype(int)
    seen = image[row, column].reshape(int(margin), 4, int(margin), 4).mean(axis=(1, 3))
    for axis in (0, 1):
        seen = (np.roll(seen, 1, axis) + 2 * seen + np.roll(seen, -1, axis)) / 4
    seen = 60 + seen * 140 / 255 + np.random.default_rng(1).normal(0, 12, seen.shape)
    return np.clip(seen, 0, 255).astype(np.uint8)


def drawn(text: str) -> str:
    """Return what a scanner reads on a terminal."""
    rows: list[bytes] = []
    for line in text.splitlines():
        upper = bytes(255 if cell in "█▀" else 0 for cell in line)
        lower = bytes(255 if cell in "█▄" else 0 for cell in line)
        rows += [upper, lower]
    rows = [row for row in rows if row]
    wide = [bytes(value for value in row for _ in range(4)) for row in rows for _ in range(4)]
    [found] = zxingcpp.read_barcodes(
        memoryview(b"".join(wide)).cast("B", shape=[len(wide), len(wide[0])]), formats=zxingcpp.BarcodeFormat.QRCode
    )
    return str(found.text)


# Forms.


async def test_out_of_band_1_1_has_one_service_and_all_handshakes(door: Setup) -> None:
    made = await door.invitations.make("default", label="Ours")
    written = door.invitations.written(made)
    name, message = inside(written.v1_url)
    assert (name, message) == ("oob", written.v1)
    assert message["@type"] == "https://didcomm.org/out-of-band/1.1/invitation"
    assert (message["@id"], message["label"], message["goal_code"]) == (made.id, "Ours", "request-mediate")
    assert message["handshake_protocols"] == [
        "https://didcomm.org/didexchange/1.1",
        "https://didcomm.org/didexchange/1.0",
        "https://didcomm.org/connections/1.0",
    ]
    assert "didcomm/aip2;env=rfc19" in message["accept"]
    [service] = message["services"]
    assert (service["type"], service["serviceEndpoint"]) == ("did-communication", PUBLIC_URL)
    assert service["routingKeys"] == []
    [key] = service["recipientKeys"]
    did, _, fragment = key.partition("#")
    assert did == f"did:key:{fragment}"
    assert canonical(key) == made.key


async def test_out_of_band_2_0_comes_from_the_tenants_did(door: Setup) -> None:
    made = await door.invitations.make("acme")
    written = door.invitations.written(made)
    name, message = inside(written.v2_url)
    assert (name, message) == ("_oob", written.v2)
    assert message["type"] == "https://didcomm.org/out-of-band/2.0/invitation"
    assert message["id"] == made.id
    # It has the tenant's keys, and the invitation's for authentication.
    for did in (message["from"], written.socket_did):
        assert door.context.identities.known_as(did) == door.context.identities.current("acme") != door.identity
        assert await door.context.identities.tenant_of(f"{did}#key-1") == "acme"
        assert invitation_key(did) == made.key
    assert message["body"]["goal_code"] == "request-mediate"
    assert message["body"]["accept"] == ["didcomm/v2"]


async def test_connections_1_0_names_the_same_key_in_base58(door: Setup) -> None:
    made = await door.invitations.make("default")
    written = door.invitations.written(made)
    name, message = inside(written.old_url)
    assert (name, message) == ("c_i", written.old)
    assert message["@type"] == "https://didcomm.org/connections/1.0/invitation"
    assert (message["@id"], message["label"], message["serviceEndpoint"]) == (made.id, "Mediator", PUBLIC_URL)
    [key] = message["recipientKeys"]
    assert not key.startswith("did:")
    assert canonical(key) == made.key


async def test_the_id_is_found_in_every_form(door: Setup) -> None:
    made = await door.invitations.make("default")
    written: InvitationForms = door.invitations.written(made)
    for url in (written.v1_url, written.v2_url, written.old_url):
        assert id_inside(urlsplit(url).query.partition("=")[2]) == made.id


# Keys and lives.


async def test_every_invitation_has_its_own_sealed_key(door: Setup) -> None:
    first, second = [await door.invitations.make("default") for _ in range(2)]
    assert first.key != second.key
    assert first.id != second.id
    seed = await door.context.identities.seed(first.key)
    assert seed is not None
    assert seed not in first.sealed
    sealed = await door.context.envelopes.seal_v1(b'{"a": 1}', [first.key], second.key)
    opened = await door.context.envelopes.open(sealed)
    assert (opened.plaintext, opened.recipient, opened.sender) == ({"a": 1}, first.key, second.key)
    assert await door.context.identities.tenant_of(first.key) == "default"
    assert len(verkey(first.key)) == 32


async def test_an_invitation_closes_with_its_time_or_uses(door: Setup) -> None:
    forever = await door.invitations.make("default")
    brief = await door.invitations.make("default", ttl=1000)
    assert (forever.expire_at, brief.expire_at) == (None, START + 1000)
    assert await door.context.mediation.open_invitation(brief.id) == brief
    door.clock.now += 1000
    with pytest.raises(NoSuchInvitationError):
        await door.context.mediation.open_invitation(brief.id)
    door.clock.now += 1000 * DAY
    assert await door.context.mediation.open_invitation(forever.id) == forever


async def test_invitations_are_listed_by_tenant_and_removed(door: Setup) -> None:
    first = await door.invitations.make("default")
    door.clock.now += 1
    second = await door.invitations.make("default")
    other = await door.invitations.make("acme")
    assert await list_all(door, "default") == [second, first]
    assert await list_all(door, "default", 1) == [second]
    with pytest.raises(NoSuchInvitationError):
        await door.context.mediation.remove_invitation("default", other.id)
    await door.context.mediation.remove_invitation("default", first.id)
    with pytest.raises(NoSuchInvitationError):
        await door.context.mediation.remove_invitation("default", first.id)
    assert await list_all(door, "default") == [second]
    assert await list_all(door, "acme") == [other]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"label": ""}, "label"),
        ({"label": "x" * 129}, "label"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": 101 * 365 * DAY}, "ttl"),
        ({"uses": 0}, "uses"),
    ],
)
async def test_what_cannot_be_is_refused_and_names_the_field(door: Setup, options: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        await door.invitations.make("default", **options)
    assert caught.value.field == named
    assert await list_all(door, "default") == []


async def test_closed_invitations_make_room_and_open_ones_do_not(door: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_INVITATIONS", 3)
    await door.invitations.make("default", ttl=1000)
    kept = [await door.invitations.make("default") for _ in range(2)]
    with pytest.raises(BadRequestError, match="at most 3"):
        await door.invitations.make("default")
    door.clock.now += 1000
    newest = await door.invitations.make("default")
    assert {one.id for one in await list_all(door, "default")} == {newest.id, *(one.id for one in kept)}


# QR codes.


async def test_a_scanner_reads_the_links_on_image_and_terminal(door: Setup) -> None:
    written = door.invitations.written(await door.invitations.make("default", label="Ä" * 128))
    for url in (written.v1_url, written.v2_url, written.v1_short_url, written.v2_short_url):
        assert scanned(qr.png(url)) == url
    for url in (written.v1_short_url, written.v2_short_url):
        assert drawn(qr.terminal(url)) == url


@pytest.mark.parametrize("host", ["https://m.example", "https://mediator.department.university.example.org/agents"])
def test_a_phone_reads_the_short_link_on_three_centimetres(host: str) -> None:
    for path in ("/i/", "/i/?_oobid="):
        url = f"{host}{path}tBD7OGFoTLS2KKGUvqmjxg"
        png = qr.png(url)
        # A terminal shows one module a column.
        modules = len(qr.terminal(url).splitlines()[0])
        assert 30 / modules >= 0.65, "millimetres a module, the white margin counted"
        # 3 cm are as many pixels of a 1080p camera from about 17 cm away.
        [found] = zxingcpp.read_barcodes(photographed(png, 140), formats=zxingcpp.BarcodeFormat.QRCode)
        assert found.text == url


def test_a_terminal_of_80_columns_shows_long_short_links() -> None:
    fits = "https://" + "x" * 300 + "/i/tBD7OGFoTLS2KKGUvqmjxg"
    shown = qr.terminal(fits)
    assert max(map(len, shown.splitlines())) <= 80
    assert drawn(shown) == fits


def test_what_is_too_long_for_a_code_is_a_value_error() -> None:
    for make, length in ((qr.png, 3000), (qr.terminal, 600)):
        with pytest.raises(ValueError, match=r"fit|Data too large|too large"):
            make("x" * length)


# Short links.


def test_a_short_id_stands_for_one_invitation_for_ever() -> None:
    assert short_id("b410fb38-6168-4cb4-b628-a194bea9a3c6") == "tBD7OGFoTLS2KKGUvqmjxg"
    assert id_of_short("tBD7OGFoTLS2KKGUvqmjxg") == "b410fb38-6168-4cb4-b628-a194bea9a3c6"
    for wrong in ("", "tBD7OGFoTLS2KKGUvqmjx", "tBD7OGFoTLS2KKGUvqmjxgg", "tBD7OGFoTLS2KKGUvqmj+/", "é" * 22):
        with pytest.raises(NoSuchInvitationError):
            id_of_short(wrong)


def path_of(url: str) -> str:
    return url.removeprefix(PUBLIC_URL.removesuffix("/didcomm"))


async def test_agents_that_ask_for_json_get_the_invitation(door: Setup, browser: TestClient[Any, Any]) -> None:
    _, written = await invited(door)
    plain = "application/didcomm-plain+json"
    for url, headers, message, content_type in (
        (written.v1_short_url, {"Accept": "application/json"}, written.v1, "application/json"),
        (written.v1_short_url, {"Content-Type": "application/json"}, written.v1, "application/json"),
        (written.v1_short_url, {"Accept": "application/json, text/plain, */*"}, written.v1, "application/json"),
        (written.v2_short_url, {"Accept": "application/json"}, written.v2, "application/json"),
        (written.v2_short_url, {"Accept": plain}, written.v2, plain),
        (written.v1_short_url, {"Accept": plain}, written.v2, plain),
    ):
        async with browser.get(path_of(url), headers=headers, allow_redirects=False) as answer:
            assert (answer.status, answer.content_type, answer.charset) == (200, content_type, "utf-8")
            assert orjson.loads(await answer.read()) == message
            assert (answer.headers["Cache-Control"], answer.headers["Vary"]) == ("no-store", "Accept")


async def test_other_agents_are_led_to_the_whole_invitation(door: Setup, browser: TestClient[Any, Any]) -> None:
    _, written = await invited(door)
    for short, long, message in (
        (written.v1_short_url, written.v1_url, written.v1),
        (written.v2_short_url, written.v2_url, written.v2),
    ):
        async with browser.get(path_of(short), allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (302, long)
        # Some read the URL at which they arrive, others what is there.
        async with browser.get(path_of(long)) as answer:
            assert (answer.status, await answer.json()) == (200, message)
    async with browser.get(path_of(written.old_url)) as answer:
        assert (answer.status, await answer.json()) == (200, written.old)


async def test_a_short_link_is_the_page_in_a_browser(door: Setup, browser: TestClient[Any, Any]) -> None:
    _, written = await invited(door, label="Ours")
    for url in (written.v1_short_url, written.v2_short_url):
        page = await shown(browser, path_of(url))
        assert "Ours" in page.text
        assert page.links == links(written)


@pytest.mark.rule("D12")
async def test_a_closed_short_link_leads_nowhere(door: Setup, browser: TestClient[Any, Any]) -> None:
    _, written = await invited(door, ttl=1000)
    door.clock.now += 1000
    for url in (written.v1_short_url, written.v2_short_url, written.v1_url):
        await shown(browser, path_of(url), status=404)
        for headers in ({"Accept": "application/json"}, {}):
            async with browser.get(path_of(url), headers=headers, allow_redirects=False) as answer:
                assert (answer.status, (await answer.json())["code"]) == (404, "invitation_not_found")


# Pages.


class Page(HTMLParser):
    """What stands on a page: links, images, text, and anything that would be fetched or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.images: list[dict[str, str]] = []
        self.fetched: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = {name: value or "" for name, value in attrs}
        self.tags.append((tag, held))
        if tag == "a":
            self.links.append(held["href"])
        elif tag == "img":
            self.images.append(held)
        elif "src" in held or tag in {"link", "iframe", "object", "embed"}:
            self.fetched.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


async def shown(browser: TestClient[Any, Any], path: str, status: int = 200) -> Page:
    async with browser.get(path, headers=BROWSER) as answer:
        assert answer.status == status
        assert answer.content_type == "text/html"
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        return Page(await answer.text())


async def invited(door: Setup, **options: Any) -> tuple[Invitation, InvitationForms]:
    made = await door.invitations.make("default", **options)
    return made, door.invitations.written(made)


def links(written: InvitationForms) -> list[str]:
    """Return the links on a page, in order: of each form the one that opens a wallet on the phone, and two to scan."""
    forms = ((written.v1_short_url, written.v1_url), (written.v2_short_url, written.v2_url))
    return [link for short, long in forms for link in (f"didcomm://invite?{urlsplit(long).query}", short, long)]


async def test_the_page_shows_codes_links_label_and_expiry(door: Setup, browser: TestClient[Any, Any]) -> None:
    made, written = await invited(door, label="Our <b>mediator</b> & more", ttl=DAY, uses=5)
    page = await shown(browser, urlsplit(written.page_url).path)
    assert "Our <b>mediator</b> & more" in page.text
    assert "b" not in [tag for tag, _ in page.tags]
    assert page.links == links(written)
    codes = [base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) for image in page.images]
    assert [scanned(code) for code in codes] == [link for link in page.links if link.startswith("http")]
    assert all(image["alt"] for image in page.images)
    assert page.fetched == []
    assert written.v2["from"] in page.text
    assert ("html", {"lang": "en"}) in page.tags
    [moment] = [held["datetime"] for tag, held in page.tags if tag == "time"]
    assert moment == "2026-01-02T00:00:00Z"
    assert "5 times" in page.text
    assert made.expire_at == START + DAY


async def test_the_page_is_whole_under_its_own_policy(door: Setup, browser: TestClient[Any, Any]) -> None:
    """Style and script are let through by their hashes: a change of one without the other leaves the page bare."""
    made, _ = await invited(door, label="</script><script>alert(1)</script>")
    async with browser.get(f"/invite/{made.id}") as answer:
        text = await answer.text()
        for tag in ("style", "script"):
            [content] = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in answer.headers["Content-Security-Policy"]
        assert "style=" not in text
        assert re.search(r"\son\w+=", text) is None
        assert "It does not expire" in text


async def test_the_page_leads_to_the_terms(door: Setup) -> None:
    made = await door.invitations.make("default")
    app = build_app(Health(), CollectorRegistry())
    InvitationPages(door.context.mediation, door.invitations, "https://m.example/terms").add_routes(app)
    async with TestClient(TestServer(app)) as client:
        text = await (await client.get(f"/invite/{made.id}")).text()
    assert 'By connecting you accept the <a href="https://m.example/terms">terms</a>.' in text


async def test_the_image_is_the_code_of_the_link(door: Setup, browser: TestClient[Any, Any]) -> None:
    made, written = await invited(door)
    async with browser.get(f"/invite/{made.id}.png") as answer:
        assert (answer.status, answer.content_type) == (200, "image/png")
        assert scanned(await answer.read()) == written.v1_short_url


async def test_the_link_itself_shows_the_page_in_a_browser(door: Setup, browser: TestClient[Any, Any]) -> None:
    _, written = await invited(door, label="Ours")
    for url in (written.v1_url, written.v2_url, written.old_url):
        page = await shown(browser, f"{urlsplit(url).path}?{urlsplit(url).query}")
        assert "Ours" in page.text
        assert page.links == links(written)


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "path",
    [
        "/invite/nobody",
        "/invite/no%20body%22",
        "/i/too-short",
        "/i/AAAAAAAAAAAAAAAAAAAAAA%3C",
        "/invite/nobody.png",
        "/i/",
        "/i/AAAAAAAAAAAAAAAAAAAAAA",
        "/i/?_oobid=<script>alert(1)</script>",
        "/i/?_oobid=AAAAAAAAAAAAAAAAAAAAAA",
        "/didcomm",
        "/didcomm?oob=",
        "/didcomm?oob=%%%",
        "/didcomm?oob=eyJAaWQiOiAiPHNjcmlwdD4ifQ",
        "/didcomm?_oob=W10",
        "/didcomm?_oob=eyJpZCI6IDd9",
        "/didcomm?oob=" + "A" * 8000,
        "/didcomm?oob=<script>alert(1)</script>",
    ],
)
async def test_a_foreign_invitation_is_404_and_not_reflected(browser: TestClient[Any, Any], path: str) -> None:
    page = await shown(browser, path, status=404)
    assert "script" not in page.text
    assert page.links == page.images == page.fetched == []


async def test_a_modified_invitation_link_shows_the_real_one(door: Setup, browser: TestClient[Any, Any]) -> None:
    made, written = await invited(door, label="Ours")
    forged = {**written.v1, "label": "Theirs", "services": ["did:example:theirs"]}
    encoded = base64.urlsafe_b64encode(orjson.dumps(forged)).decode()
    page = await shown(browser, f"/didcomm?oob={encoded}")
    assert "Theirs" not in page.text
    assert page.links == links(written)
    assert made.label == "Ours"


async def test_a_closed_invitation_is_shown_to_nobody(door: Setup, browser: TestClient[Any, Any]) -> None:
    made, written = await invited(door, ttl=1000)
    door.clock.now += 1000
    await shown(browser, f"/invite/{made.id}", status=404)
    await shown(browser, f"/didcomm?{urlsplit(written.v1_url).query}", status=404)
