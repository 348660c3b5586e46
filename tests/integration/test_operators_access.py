"""Operators' access over HTTP: tokens, sessions, OpenID Connect, and requests that other sites make browsers send."""

import asyncio
import base64
import re
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from aiohttp import ClientResponse, ClientSession, CookieJar, web
from aiohttp.test_utils import TestServer
from joserfc.jwk import RSAKey
from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.errors import UnavailableError
from mediator.http.app import build_app
from mediator.http.callers import MAX_FAILURES, WINDOW, FailedAttempts, HttpCallers, tokens_of
from mediator.http.health import Health
from mediator.mailboxes.mailbox import MailboxKey
from mediator.operate.access import CSRF_HEADER, SESSION_SECONDS, SIGN_IN, Access, CookieSealer, EndedSessions
from mediator.operate.operations import Actor, Audit, Operation, OperationRequest, Operations, Right
from mediator.operate.sign_in import BEGIN, SIGN_OUT, SignIn
from mediator.store.base import Store, Transaction
from mediator.store.sqlite import SqliteStore
from tests.harness.app import PATIENCE, app
from tests.harness.core import make_settings
from tests.harness.external import nats_server
from tests.harness.oidc_provider import CLIENT, SECRET, OidcProvider, oidc_provider
from tests.harness.postgres import Server
from tests.harness.stores import closed_at_end, ram_path, ram_store

READER, ADMIN = "token-of-the-reader", "token-of-the-admin"
TOKENS = [
    {"name": "monitor", "token": READER, "roles": ["read"]},
    {"name": "ada", "token": ADMIN, "roles": ["admin"]},
]
KEY = b"k" * 32
LOCAL = "the-secret-of-this-machine-000000"
BEHIND_PROVIDER = {
    "oidc": {
        "issuer": "https://login.example.com",
        "client_id": CLIENT,
        "client_secret": SECRET,
        "roles": {"admin": ["admins"]},
    }
}
LINK = {"token": LOCAL, "next": "/console/x"}


class Site:
    """A service with two routes: anybody's name, and an act that needs the right to operate."""

    def __init__(self, session: ClientSession, server: TestServer, ended: EndedSessions) -> None:
        self.session = session
        self.server = server
        self.ended = ended

    def url(self, path: str) -> str:
        return str(self.server.make_url(path))

    @property
    def origin(self) -> str:
        return self.url("").rstrip("/")

    async def get(self, path: str = "/who", **options: Any) -> ClientResponse:
        return await self.session.get(self.url(path), allow_redirects=False, **options)

    async def post(self, path: str = "/act", **options: Any) -> ClientResponse:
        return await self.session.post(self.url(path), allow_redirects=False, **options)

    async def who(self, **options: Any) -> str:
        return await (await self.get(**options)).text()

    async def sign_in(self, token: str = ADMIN, path: str = "/console/x") -> ClientResponse:
        return await self.post(SIGN_IN, data={"token": token, "next": path}, headers={"Origin": self.origin})

    async def csrf(self) -> str:
        return await (await self.get("/csrf")).text()


@asynccontextmanager
async def site(
    tmp_path: Path,
    key: bytes = KEY,
    session: ClientSession | None = None,
    audit: Audit | None = None,
    store: Store | None = None,
    **options: Any,
) -> AsyncIterator[Site]:
    settings = make_settings(data_dir=tmp_path, **options)
    callers = HttpCallers(settings, LOCAL, tokens_of(settings, settings.tenants))
    broker = Broker(ram_store() if store is None else store, settings.bounds)
    ended = EndedSessions(broker)
    await ended.open()
    access = Access(settings, CookieSealer(key), callers, ended)
    made = build_app(Health(), CollectorRegistry())

    async def who(request: web.Request) -> web.Response:
        actor = access.require(request, Right.READ)
        return web.Response(text=f"{actor.name} by {actor.via}: {' '.join(sorted(actor.rights))}")

    async def act(request: web.Request) -> web.Response:
        access.require(request, Right.OPERATE)
        return web.Response(text="done")

    async def csrf(request: web.Request) -> web.Response:
        visitor = await access.visitor(request)
        return web.Response(text="" if visitor is None else visitor[1])

    async def form(request: web.Request) -> web.Response:
        access.check_form(request, str((await request.post()).get("csrf", "")))
        return web.Response(text="done")

    made.router.add_get("/who", who)
    made.router.add_post("/act", act)
    made.router.add_get("/csrf", csrf)
    made.router.add_post("/form", form)
    operations = Operations(audit)
    SignIn(access, settings, 0, operations).add_routes(made)
    try:
        async with TestServer(made) as server:
            if session is not None:
                yield Site(session, server, ended)
                return
            async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as own:
                yield Site(own, server, ended)
    finally:
        await ended.close()
        await broker.close()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path, operators={"tokens": TOKENS}) as made:
        yield made


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Site]:
    """One that no operator is configured for."""
    async with site(tmp_path) as made:
        yield made


# Tokens.


async def test_a_token_names_its_operator(guarded: Site) -> None:
    assert await guarded.who(headers=bearer(READER)) == "monitor by token: read"
    assert await guarded.who(headers=bearer(ADMIN)) == "ada by token: admin operate read read-payload"


@pytest.mark.parametrize("given", [{}, bearer("wrong"), {"Authorization": f"Basic {ADMIN}"}, bearer(ADMIN + "\xff")])
async def test_without_a_known_token_nobody_is_let_in(guarded: Site, given: dict[str, str]) -> None:
    answer = await guarded.get(headers=given)
    assert (answer.status, (await answer.json())["code"]) == (401, "not_signed_in")


async def test_a_token_may_do_what_its_roles_say(guarded: Site) -> None:
    refused = await guarded.post(headers=bearer(READER))
    assert (refused.status, (await refused.json())["error"]) == (403, "this needs the right operate")
    assert (await guarded.post(headers=bearer(ADMIN))).status == 200


async def test_wrong_tokens_are_counted_over_every_way_in(guarded: Site) -> None:
    assert (await guarded.get(headers=bearer(READER))).status == 200
    for _ in range(MAX_FAILURES):
        assert (await guarded.get(headers=bearer("guess"))).status == 401
    refused = await guarded.get(headers=bearer("guess"))
    assert (refused.status, (await refused.json())["code"]) == (429, "too_many_attempts")
    assert (await guarded.sign_in()).status == 429
    assert (await guarded.get(headers=bearer(ADMIN))).status == 429, "a guess that is right"
    assert (await guarded.get(headers=bearer(READER))).status == 200, "it was right from here before"


async def test_a_stranger_behind_a_proxy_locks_nobody_out(tmp_path: Path) -> None:
    options = {"operators": {"tokens": TOKENS}, "http_trusted_proxies": ["127.0.0.1"]}
    async with site(tmp_path, **options) as made:
        for _ in range(MAX_FAILURES):
            wrong = await made.get(headers={**bearer("guess"), "X-Forwarded-For": "127.0.0.1, 192.0.2.7"})
            assert wrong.status == 401
        stranger, friend = {"X-Forwarded-For": "192.0.2.7"}, {"X-Forwarded-For": "192.0.2.7, 192.0.2.8"}
        assert (await made.get(headers={**bearer(ADMIN), **stranger})).status == 429
        form = {"data": {"token": ADMIN}, "headers": {"Origin": made.origin}}
        assert (await made.post(SIGN_IN, **{**form, "headers": {**form["headers"], **stranger}})).status == 429
        assert (await made.post(SIGN_IN, **{**form, "headers": {**form["headers"], **friend}})).status == 303


def test_failures_are_forgotten_after_a_while() -> None:
    now = [0.0]
    attempts = FailedAttempts(lambda: now[0])
    for _ in range(MAX_FAILURES):
        attempts.fail(ip_address("2001:db8::1"))
    assert attempts.wait(ip_address("2001:db8::ffff")) == WINDOW + 1
    assert attempts.wait(ip_address("2001:db8:0:1::1")) == 0
    now[0] = WINDOW
    assert attempts.wait(ip_address("2001:db8::1")) == 0


# This machine.


async def test_this_machine_is_let_in_by_its_secret_alone(alone: Site) -> None:
    assert (await alone.get()).status == 401
    assert (await alone.post()).status == 401
    assert await alone.who(headers=bearer(LOCAL)) == "local by local: operate read"
    assert (await alone.post(headers=bearer(LOCAL))).status == 200


async def test_the_link_of_this_machine_begins_a_session(alone: Site) -> None:
    entered = await alone.get(SIGN_IN, params=LINK)
    assert (entered.status, entered.headers["Location"]) == (303, "/console/x")
    assert LOCAL not in str(entered.headers)
    assert await alone.who() == "local by local: operate read"
    assert (await alone.get(headers={"X-Real-IP": "127.0.0.1"})).status == 401
    assert (await alone.get(headers={"Host": "mail.example.com"})).status == 401


async def test_no_token_of_an_operator_works_in_a_link(guarded: Site) -> None:
    for token in (ADMIN, LOCAL, "x"):
        assert (await guarded.get(SIGN_IN, params={"token": token})).status == 403
    assert (await guarded.get()).status == 401


@pytest.mark.parametrize(
    "given", [{"Host": "mail.example.com"}, {"X-Forwarded-For": "192.0.2.1"}, {"Via": "1.1 proxy"}]
)
async def test_a_page_under_another_name_is_not_this_machine(alone: Site, given: dict[str, str]) -> None:
    assert (await alone.get(headers={**bearer(LOCAL), **given})).status == 401
    assert (await alone.get(SIGN_IN, params=LINK, headers=given)).status == 403


@pytest.mark.parametrize(
    "options",
    [
        {"http": "0.0.0.0:8080"},
        {"tenants": {"default": {"users": [{"name": "a", "password": "b"}]}}},
        {"operators": {"public_url": "https://mail.example.com"}},
        {"operators": {"tokens": TOKENS}},
    ],
)
async def test_the_secret_lets_nobody_in_elsewhere(tmp_path: Path, options: dict[str, Any]) -> None:
    async with site(tmp_path, **options) as made:
        assert (await made.get(headers=bearer(LOCAL))).status == 401
        assert (await made.get(SIGN_IN, params=LINK)).status == 403


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
async def test_other_sites_do_not_act_for_this_machine(alone: Site, given: dict[str, str], status: int) -> None:
    await alone.get(SIGN_IN, params=LINK)
    csrf = await alone.csrf()
    assert (await alone.post(headers={CSRF_HEADER: csrf, **given})).status == status
    assert (await alone.post(headers=given)).status == 403
    assert (await alone.post("/form", data={"csrf": csrf}, headers=given)).status == status
    assert (await alone.post("/form", data={}, headers=given)).status == 403


# Sessions.


async def test_a_session_begins_with_a_token_and_ends_at_sign_out(guarded: Site) -> None:
    page = await guarded.get(SIGN_IN, params={"next": "/console/x"})
    assert 'value="/console/x"' in await page.text()
    entered = await guarded.sign_in()
    assert (entered.status, entered.headers["Location"]) == (303, "/console/x")
    cookie = entered.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert ADMIN not in cookie
    assert await guarded.who() == "ada by session: admin operate read read-payload"
    assert (await guarded.post(SIGN_OUT, data={"csrf": "x"}, headers={"Origin": guarded.origin})).status == 403
    left = await guarded.post(SIGN_OUT, data={"csrf": await guarded.csrf()}, headers={"Origin": guarded.origin})
    assert (left.status, left.headers["Location"]) == (303, SIGN_IN)
    assert (await guarded.get()).status == 401
    copy = {"Cookie": cookie.partition(";")[0]}
    assert (await guarded.get(headers=copy)).status == 401, "a copy of the cookie"


async def sign_out(made: Site) -> ClientResponse:
    return await made.post(SIGN_OUT, data={"csrf": await made.csrf()}, headers={"Origin": made.origin})


def copied(made: Site) -> dict[str, str]:
    """Return the cookie as whoever stole it would send it."""
    (cookie,) = made.session.cookie_jar
    return {"Cookie": f"{cookie.key}={cookie.value}"}


async def test_a_copied_cookie_stays_out_after_a_restart(tmp_path: Path) -> None:
    async with app(tmp_path) as service, ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser:
        async with browser.get(service.service.console_link) as page:
            found = re.search(r'name="csrf" value="([^"]+)"', await page.text())
        assert found is not None
        (cookie,) = browser.cookie_jar
        copy = f"{cookie.key}={cookie.value}"
        assert (await service.call("GET", "/api/v1/overview", token="", Cookie=copy)).status == 200
        origin = str(page.url.origin())
        async with browser.post(f"{origin}{SIGN_OUT}", data={"csrf": found[1]}, headers={"Origin": origin}) as left:
            assert left.url.path == SIGN_IN
        assert (await service.call("GET", "/api/v1/overview", token="", Cookie=copy)).status == 401
    async with app(tmp_path) as service:
        assert (await service.call("GET", "/api/v1/overview", token="", Cookie=copy)).status == 401
        assert (await service.call("GET", "/api/v1/overview")).status == 200


@pytest.mark.postgres
@pytest.mark.parametrize("together", [True, False], ids=["one nats-server", "each its own"])
async def test_a_sign_out_holds_at_all_instances(tmp_path: Path, postgres: Server, together: bool) -> None:
    options = {"control_key": base64.b64encode(KEY).decode(), "operators": {"tokens": TOKENS}}
    async with AsyncExitStack() as stack:
        options["database_url"] = stack.enter_context(postgres.database(migrated=True))
        if together:
            port, _ = await stack.enter_async_context(nats_server(tmp_path, ""))
            options["nats_url"] = f"nats://127.0.0.1:{port}"
        one, two = [
            await stack.enter_async_context(app(tmp_path / name, instance=name, **options)) for name in ("one", "two")
        ]
        browser = await stack.enter_async_context(ClientSession(cookie_jar=CookieJar(unsafe=True)))
        origin = f"http://127.0.0.1:{one.service.http_port}"
        async with browser.post(f"{origin}{SIGN_IN}", data={"token": ADMIN}, headers={"Origin": origin}) as page:
            found = re.search(r'name="csrf" value="([^"]+)"', await page.text())
        assert found is not None
        (cookie,) = browser.cookie_jar
        copy = f"{cookie.key}={cookie.value}"
        live = await stack.enter_async_context(
            browser.get(f"http://127.0.0.1:{two.service.http_port}/console/live", headers={"Cookie": copy})
        )
        assert live.status == 200
        async with browser.post(f"{origin}{SIGN_OUT}", data={"csrf": found[1]}, headers={"Origin": origin}):
            pass
        assert (await one.call("GET", "/api/v1/overview", token="", Cookie=copy)).status == 401
        async with asyncio.timeout(PATIENCE):
            await live.content.read()
        assert (await two.call("GET", "/api/v1/overview", token="", Cookie=copy)).status == 401


async def test_a_session_of_the_provider_ends_at_sign_out(tmp_path: Path) -> None:
    store = ram_store()
    async with oidc_provider() as provider:
        roles = {"admin": ["admins"]}
        oidc = {"issuer": provider.issuer, "client_id": CLIENT, "client_secret": SECRET, "roles": roles}
        async with site(tmp_path, store=store, oidc=oidc) as made:
            await through(made)
            copy = copied(made)
            assert (await made.get(headers=copy)).status == 200
            assert (await sign_out(made)).status == 303
            assert (await made.get(headers=copy)).status == 401
        async with site(tmp_path, store=store, oidc=oidc) as restarted:
            assert (await restarted.get(headers=copy)).status == 401
            assert (await through(restarted)).status == 303
            assert (await restarted.get()).status == 200


async def test_who_was_removed_signs_out_for_good(tmp_path: Path) -> None:
    store = ram_store()
    async with site(tmp_path, store=store, operators={"tokens": TOKENS}) as made:
        await made.sign_in()
        copy = copied(made)
    async with site(tmp_path, store=store, operators={"tokens": TOKENS[:1]}) as removed:
        headers = {**copy, "Origin": removed.origin}
        assert (await removed.post(SIGN_OUT, data={}, headers=headers)).status == 303
    async with site(tmp_path, store=store, operators={"tokens": TOKENS}) as back:
        assert (await back.get(headers=copy)).status == 401


class Failing(SqliteStore):
    """A store that takes nothing while it is told so."""

    fails = False

    @contextmanager
    def transaction(self, places: Sequence[MailboxKey] = ()) -> Iterator[Transaction]:
        with super().transaction(places) as tx:
            yield tx
            if self.fails:
                raise UnavailableError("told to fail")


async def test_a_sign_out_that_is_not_stored_says_so(tmp_path: Path) -> None:
    store = closed_at_end(Failing(ram_path()))
    async with site(tmp_path, store=store, operators={"tokens": TOKENS}) as made:
        await made.sign_in()
        copy = copied(made)
        store.fails = True
        answer = await sign_out(made)
        assert (answer.status, "you are signed out here" in await answer.text()) == (503, True)
        assert (len(made.session.cookie_jar), (await made.get(headers=copy)).status) == (0, 401)
        store.fails = False
        await made.ended.poll()
    async with site(tmp_path, store=store, operators={"tokens": TOKENS}) as restarted:
        assert (await restarted.get(headers=copy)).status == 401


async def test_a_wrong_token_begins_no_session(guarded: Site) -> None:
    refused = await guarded.sign_in("guess")
    assert refused.status == 403
    assert "no operator has this token" in await refused.text()
    assert (await guarded.get()).status == 401


async def test_away_from_this_machine_cookies_need_tls(guarded: Site) -> None:
    headers = {"Host": "mail.example.com", "Origin": "https://mail.example.com"}
    entered = await guarded.post(SIGN_IN, data={"token": ADMIN}, headers=headers)
    assert entered.headers["Set-Cookie"].startswith("__Host-mediator=")
    assert "Secure" in entered.headers["Set-Cookie"]


@pytest.mark.parametrize("says", [{"X-Forwarded-Proto": "https"}, {"Forwarded": "for=192.0.2.1;proto=https"}])
async def test_behind_a_tls_proxy_cookies_need_tls(guarded: Site, says: dict[str, str]) -> None:
    # One that writes this machine's name into Host.
    entered = await guarded.post(SIGN_IN, data={"token": ADMIN}, headers=says)
    cookie = entered.headers["Set-Cookie"]
    assert (cookie.startswith("__Host-mediator="), "Secure" in cookie) == (True, True)
    copy = {"Cookie": cookie.partition(";")[0]}
    assert [(await guarded.get(headers=given)).status for given in ({**copy, **says}, copy)] == [200, 401]


@pytest.mark.parametrize(
    "path", ["https://evil.example", "//evil.example", "/console\\x", "/console/\r\nX: y", "/else"]
)
async def test_sign_in_leads_nowhere_else(guarded: Site, path: str) -> None:
    assert (await guarded.sign_in(path=path)).headers["Location"] == "/console"


async def test_a_session_changes_things_by_our_pages_alone(guarded: Site) -> None:
    await guarded.sign_in()
    csrf, ours = await guarded.csrf(), {"Origin": guarded.origin}
    for headers in (
        {},
        ours,
        {CSRF_HEADER: csrf},
        {**ours, CSRF_HEADER: "x"},
        {CSRF_HEADER: csrf, "Origin": "https://evil.example"},
        {CSRF_HEADER: csrf, "Origin": "null"},
        {CSRF_HEADER: csrf, **ours, "Sec-Fetch-Site": "cross-site"},
    ):
        answer = await guarded.post(headers=headers)
        assert (answer.status, (await answer.json())["code"]) == (403, "forged_request")
    assert (await guarded.post(headers={**ours, CSRF_HEADER: csrf})).status == 200
    assert (await guarded.post(headers={CSRF_HEADER: csrf, "Sec-Fetch-Site": "same-origin"})).status == 200


@pytest.mark.parametrize("path", [SIGN_IN, SIGN_OUT])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-www-form-urlencoded", b"token=\xff"),
        ("application/x-www-form-urlencoded", b"token=%ff"),
        ("application/x-www-form-urlencoded; charset=none", b"token=\xff"),
        ("multipart/form-data", b"token=x"),
        ("multipart/form-data; boundary=a", b"--a\r\nContent-Disposition: form-data\r\n\r\nx\r\n--a--\r\n"),
    ],
)
async def test_a_form_of_no_browser_is_refused(guarded: Site, path: str, kind: str, body: bytes) -> None:
    answer = await guarded.post(path, data=body, headers={"Content-Type": kind, "Origin": guarded.origin})
    assert (answer.status, (await answer.json())["error"].split(":")[0]) == (400, "body")


@pytest.mark.parametrize("path", [SIGN_IN, SIGN_OUT])
async def test_a_body_that_does_not_unpack_is_refused(guarded: Site, path: str) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Encoding": "deflate"}
    answer = await guarded.post(path, data=b"no deflate", headers={**headers, "Origin": guarded.origin})
    assert answer.status == 400


async def test_another_site_signs_nobody_in(guarded: Site) -> None:
    answer = await guarded.post(SIGN_IN, data={"token": ADMIN}, headers={"Origin": "https://evil.example"})
    assert answer.status == 403


async def test_instances_share_sessions_and_a_removed_token_ends_them(guarded: Site, tmp_path: Path) -> None:
    await guarded.sign_in()
    changed = [{"name": "ada", "token": ADMIN, "roles": ["read"]}]
    for options, key, expected in (
        ({"tokens": TOKENS}, KEY, "ada by session: admin operate read read-payload"),
        ({"tokens": changed}, KEY, "ada by session: read"),
        ({"tokens": TOKENS[:1]}, KEY, None),
        ({"tokens": TOKENS}, b"x" * 32, None),
    ):
        async with site(tmp_path, key, guarded.session, operators=options) as other:
            answer = await other.get()
            assert answer.status == (200 if expected else 401)
            assert expected is None or await answer.text() == expected


def test_a_session_lasts_twelve_hours() -> None:
    now = [1_000_000.0]
    sealer = CookieSealer(KEY, lambda: now[0])
    cookie = sealer.seal_session(name="ada", token="x")
    now[0] += SESSION_SECONDS
    assert sealer.open_session(cookie) is not None
    now[0] += 1
    assert sealer.open_session(cookie) is None
    assert sealer.open_session("x" + cookie[1:]) is None
    assert sealer.open_session(sealer.seal({"state": "x"})) is None


async def test_sign_ins_and_outs_are_audited(tmp_path: Path) -> None:
    kept: list[tuple[str, str, str, str]] = []

    async def audit(actor: Actor, operation: Operation, _request: OperationRequest, result: str) -> None:
        kept.append((operation.name, actor.name, actor.via, result))

    async with site(tmp_path, audit=audit, operators={"tokens": TOKENS}) as made:
        await made.sign_in("guess")
        await made.sign_in()
        await made.post(SIGN_OUT, data={"csrf": await made.csrf()}, headers={"Origin": made.origin})
    assert kept == [
        ("sign-in", "nobody", "sign-in", "sign_in_failed"),
        ("sign-in", "ada", "token", "ok"),
        ("sign-out", "ada", "session", "ok"),
    ]


# OpenID Connect.


async def test_a_reader_of_the_database_makes_no_session(tmp_path: Path) -> None:
    async with app(tmp_path, **BEHIND_PROVIDER) as service:
        opened = sqlite3.connect(tmp_path / "mediator.db")
        (key,) = opened.execute("SELECT key FROM control_key").fetchone()
        opened.close()
        sealer = CookieSealer(key)
        for secret in ((), ("",), (SECRET,)):
            provider = sealer.fingerprint("provider", "https://login.example.com", CLIENT, *secret)
            cookie = sealer.seal_session(name="eve", provider=provider, claims=("admins",))
            answer = await service.call("GET", "/api/v1/overview", token="", Cookie=f"mediator={cookie}")
            assert answer.status == 401


@pytest.mark.parametrize("slashes", [("", "/"), ("/", "/"), ("/", ""), ("", "")], ids=repr)
async def test_an_issuer_may_end_in_a_slash(tmp_path: Path, slashes: tuple[str, str]) -> None:
    # In the settings, and in what the provider says.
    async with with_provider(tmp_path, slash=slashes[0]) as (made, provider):
        provider.slash = slashes[1]
        assert (await through(made)).status == 303
        assert await made.who() == f"ada (7 at {provider.issuer}{slashes[1]}) by oidc: admin operate read read-payload"


@pytest.mark.parametrize(
    ("methods", "decodes"),
    [((), True), ((), False), (("client_secret_basic",), True), (("client_secret_post",), True)],
)
async def test_a_secret_of_any_letters_works(tmp_path: Path, methods: tuple[str, ...], decodes: bool) -> None:
    async with with_provider(tmp_path) as (made, provider):
        provider.methods, provider.decodes = methods, decodes
        assert (await through(made)).status == 303


@asynccontextmanager
async def with_provider(tmp_path: Path, slash: str = "", **more: Any) -> AsyncIterator[tuple[Site, OidcProvider]]:
    roles = {"admin": ["admins"], "read": ["staff"]}
    async with oidc_provider() as provider:
        oidc = {"issuer": provider.issuer + slash, "client_id": CLIENT, "client_secret": SECRET, "roles": roles, **more}
        async with site(tmp_path, oidc=oidc) as made:
            yield made, provider


async def through(made: Site) -> ClientResponse:
    """Follow the browser's way to the provider and back."""
    begun = await made.get(BEGIN, params={"next": "/console/x"})
    back = await made.session.get(begun.headers["Location"], allow_redirects=False)
    return await made.session.get(back.headers["Location"], allow_redirects=False)


async def test_the_provider_says_who_somebody_is(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (made, provider):
        assert (await made.get()).status == 401
        entered = await through(made)
        assert (entered.status, entered.headers["Location"]) == (303, "/console/x")
        assert await made.who() == f"ada (7 at {provider.issuer}) by oidc: admin operate read read-payload"
        assert provider.asked[0]["redirect_uri"] == f"{made.origin}/console/sign-in/callback"
        assert provider.asked[0]["scope"] == "openid profile email"


async def test_a_claim_may_lie_deeper(tmp_path: Path) -> None:
    async with with_provider(tmp_path, claim="realm.roles") as (made, provider):
        provider.claims = {"sub": "7", "realm": {"roles": "staff"}}
        await through(made)
        assert await made.who() == f"7 (7 at {provider.issuer}) by oidc: read"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"aud": "another"}, "ID token is not valid"),
        ({"iss": "https://evil.example"}, "ID token is not valid"),
        ({"exp": 1}, "ID token is not valid"),
        ({"nonce": "x"}, "ID token is not valid"),
        ({"groups": ["nobody"]}, "ada has no role here"),
    ],
)
async def test_what_the_provider_says_wrong_is_refused(tmp_path: Path, wrong: dict[str, Any], why: str) -> None:
    async with with_provider(tmp_path) as (made, provider):
        provider.wrong = wrong
        refused = await through(made)
        assert refused.status == 403
        assert why in await refused.text()
        assert (await made.get()).status == 401


async def test_only_the_keys_of_the_provider_sign(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (made, provider):
        provider.signed_with = RSAKey.generate_key(2048, {"kid": "one"})
        assert "ID token is not valid" in await (await through(made)).text()


async def test_a_code_of_somebody_else_is_refused(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (made, provider):
        begun = await made.get(BEGIN)
        asked = parse_qs(urlsplit(begun.headers["Location"]).query)
        back = await made.session.get(begun.headers["Location"], allow_redirects=False)
        callback = urlsplit(back.headers["Location"])
        forged = await made.get(callback.path, params={"code": parse_qs(callback.query)["code"][0], "state": "x"})
        assert "began in another browser" in await forged.text()
        again = await made.get(BEGIN)
        state = parse_qs(urlsplit(again.headers["Location"]).query)["state"]
        assert state != asked["state"]
        # The code belongs to the verifier of another request.
        mixed = await made.get(callback.path, params={"code": next(iter(provider.codes)), "state": state[0]})
        assert "the provider refused the code" in await mixed.text()


async def test_a_provider_that_is_away_is_said(tmp_path: Path) -> None:
    oidc = {"issuer": "http://127.0.0.1:1", "client_id": CLIENT, "roles": {"admin": ["x"]}}
    async with site(tmp_path, oidc=oidc) as made:
        answer = await made.get(BEGIN)
        assert answer.status == 502
        assert "did not answer correctly" in await answer.text()
