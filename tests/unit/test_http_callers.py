"""Who makes an HTTP request: a token says so, and nothing else in it (A6)."""

import os
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from mediator.errors import NotAuthenticatedError, SetupError, TooManyAttemptsError
from mediator.http.callers import (
    LOCAL_TOKEN,
    MAX_FAILURES,
    NOBODY,
    HttpCaller,
    HttpCallers,
    read_local_token,
    says_https,
)
from mediator.parts import installed_settings
from tests.harness.core import make_settings

ONE, OTHER, BOB = "one-of-ada-000000", "other-of-ada-0000", "the-one-of-bob-00"
TOKENS = {"acme": [ONE, OTHER], "globex": [BOB], "idle": []}
SECRET = "the-secret-of-this-machine-000000"
OPERATORS = {"tokens": [{"name": "ada", "token": BOB + BOB, "roles": ["read"]}]}
LOCAL = {"Host": "127.0.0.1:8080"}
PEER = ip_address("192.0.2.1")


def callers(**options: Any) -> HttpCallers:
    return HttpCallers(make_settings(**options), SECRET, TOKENS)


def of(known: HttpCallers, *headers: tuple[str, str], **named: str) -> HttpCaller:
    return known.identify(CIMultiDict([*headers, *named.items()]), PEER)


def local(known: HttpCallers, **headers: str) -> HttpCaller:
    return of(known, Authorization=f"Bearer {SECRET}", **{**LOCAL, **headers})


@pytest.mark.rule("A6")
def test_a_token_says_the_tenant() -> None:
    for token, tenant in ((ONE, "acme"), (OTHER, "acme"), (BOB, "globex")):
        assert of(callers(), Authorization=f"Bearer {token}").tenant == tenant
        assert of(callers(), Authorization=f"bEARER  {token} ", Host="any.example").tenant == tenant


def test_the_token_of_an_operator_says_no_tenant() -> None:
    found = of(callers(operators=OPERATORS), Authorization=f"Bearer {BOB}{BOB}")
    assert found.operator is not None
    assert (found.operator.name, found.tenant, found.local) == ("ada", None, False)


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {ONE[:-1]}",
        f"Bearer {ONE}x",
        f"Bearer {ONE.upper()}",
        f"Basic {ONE}",
        ONE,
        f"Bearer {ONE} {BOB}",
        "Bearer \udcff",
        "Bearer é",
    ],
)
def test_an_unknown_token_is_refused(value: str) -> None:
    with pytest.raises(NotAuthenticatedError):
        of(callers(), Authorization=value, **LOCAL)


@pytest.mark.rule("A6")
def test_two_tokens_at_once_are_none() -> None:
    pair = [("Authorization", f"Bearer {ONE}"), ("Authorization", f"Bearer {BOB}")]
    with pytest.raises(NotAuthenticatedError):
        of(callers(), *pair)


@pytest.mark.rule("A6")
def test_no_other_header_says_a_tenant() -> None:
    for name in ("X-Tenant", "Tenant", "X-Forwarded-User", "Cookie", "Proxy-Authorization", "X-Api-Key"):
        assert of(callers(), (name, "acme"), (name, ONE), **LOCAL) == NOBODY


@pytest.mark.rule("A6")
def test_this_machine_is_default_by_its_secret_alone() -> None:
    assert of(callers(), **LOCAL) == NOBODY
    for host in ("127.0.0.1:8080", "127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:8080", "[::1]", "127.8.0.1:80"):
        found = local(callers(), Host=host)
        assert (found.tenant, found.credential, found.local) == ("default", "", True)
    with pytest.raises(NotAuthenticatedError):
        local(callers(http="0.0.0.0:8080"))
    with pytest.raises(NotAuthenticatedError):
        local(HttpCallers(make_settings(), SECRET, {}, only_configured=lambda: False))


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    "name",
    [
        *("Forwarded", "Via", "X-Forwarded-For", "x-forwarded-host", "X-Forwarded-Proto", "X-Real-IP"),
        *("CF-Connecting-IP", "CF-Ray", "Fly-Client-IP", "X-Original-URL", "X-Original-Forwarded-For", "X-Rewrite-URL"),
        *("X-Envoy-External-Address", "X-Azure-ClientIP", "CloudFront-Viewer-Address", "CDN-Loop", "X-ProxyUser-Ip"),
    ],
)
def test_a_forwarded_request_is_not_this_machine(name: str) -> None:
    with pytest.raises(NotAuthenticatedError):
        local(callers(), **{name: "127.0.0.1"})


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    "host", ["", "evil.example:8080", "10.0.0.1", "localhost.evil.example", "[::1", "[x]:1", "a b"]
)
def test_a_name_that_leads_to_this_machine_is_not_this_machine(host: str) -> None:
    with pytest.raises(NotAuthenticatedError):
        local(callers(), Host=host)


@pytest.mark.rule("A6")
@pytest.mark.parametrize("name", ["Accept", "User-Agent", "Cookie", "Sec-Fetch-Site", "X-CSRF-Token", "X-Request-Id"])
def test_what_clients_send_forwards_nothing(name: str) -> None:
    assert local(callers(), **{name: "x"}).local


@pytest.mark.parametrize(
    ("name", "value", "secure"),
    [
        ("X-Forwarded-Proto", "https", True),
        ("X-Forwarded-Proto", "HTTPS, http", True),
        ("X-Forwarded-Proto", "http, https", False),
        ("Forwarded", "for=192.0.2.1;proto=https", True),
        ("Forwarded", 'Proto="https";by=x, proto=http', True),
        ("Forwarded", "proto=http, proto=https", False),
        ("X-Other", "https", False),
    ],
)
def test_a_proxy_says_whether_clients_speak_tls(name: str, value: str, secure: bool) -> None:
    assert says_https(CIMultiDict({name: value})) is secure


def test_a_long_token_gets_in_during_the_lock() -> None:
    # Short ones do not: who guesses learns nothing of them.
    known = callers(operators=OPERATORS)
    for _ in range(MAX_FAILURES):
        with pytest.raises(NotAuthenticatedError):
            of(known, Authorization="Bearer guess")
    assert of(known, Authorization=f"Bearer {BOB}{BOB}").operator is not None
    assert local(callers()).local
    for guess in (ONE, f"{BOB}{BOB}"[:-1], "x" * 64):
        with pytest.raises(TooManyAttemptsError):
            of(known, Authorization=f"Bearer {guess}")


def test_guesses_are_counted_and_then_even_short_ones_fail() -> None:
    known = callers()
    of(known, Authorization=f"Bearer {OTHER}")
    for _ in range(MAX_FAILURES):
        with pytest.raises(NotAuthenticatedError):
            of(known, Authorization="Bearer guess")
    for guess in ("guess", ONE):
        with pytest.raises(TooManyAttemptsError):
            of(known, Authorization=f"Bearer {guess}")
    assert of(known, Authorization=f"Bearer {OTHER}").tenant == "acme", "it was right from here before"
    headers = CIMultiDict(Authorization=f"Bearer {ONE}")
    assert known.identify(headers, ip_address("192.0.2.2")).tenant == "acme", "another address"


def test_the_secret_is_a_file_of_the_services_user(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    secret = read_local_token(folder)
    file = folder / LOCAL_TOKEN
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_local_token(folder) == secret == file.read_text().strip()
    assert os.listdir(folder) == [LOCAL_TOKEN]
    for spoil in (lambda: file.chmod(0o644), lambda: file.write_text("short\n")):
        spoil()
        with pytest.raises(SetupError, match="remove the file"):
            read_local_token(folder)
        file.chmod(0o600)


USERS = [{"name": "u", "password": "p"}]
REASONS: dict[str, dict[str, Any]] = {
    "an API token": {"tenants": {"default": {"api_tokens": [ONE]}}},
    "a user of NATS": {"tenants": {"default": {"users": USERS}}},
    "a second tenant": {"tenants": {"acme": {"users": USERS}}},
    "accounts of NATS": {"nats_url": "nats://h:4222", "nats_accounts": True},
    "an address that others reach": {"http": "0.0.0.0:8080"},
    "a name that may be public": {"http": "mediator.example:8080"},
    "a proxy in front": {"didcomm": {"public_url": "https://mediator.example.org"}},
}


@pytest.mark.rule("A6")
@pytest.mark.parametrize("reason", REASONS)
def test_the_secret_counts_no_more_as_soon_as_there_is(reason: str, tmp_path: Path) -> None:
    assert not make_settings(data_dir=tmp_path, **REASONS[reason]).http_local


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    "options",
    [{}, {"http": "localhost:0"}, {"http": "[::1]:8080"}, {"tenants": {"default": {}}}, {"nats_url": "nats://h"}],
)
def test_the_secret_counts_while_nothing_keeps_callers_apart(options: dict[str, Any], tmp_path: Path) -> None:
    assert make_settings(data_dir=tmp_path, **options).http_local


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ('["hidden-short"]', "tenants.a.api_tokens.0: expected 16 to 256 printable characters without spaces"),
        (f'["{"hidden" * 50}"]', "tenants.a.api_tokens.0: expected 16 to 256 "),
        ('["hidden with spaces inside"]', "tenants.a.api_tokens.0: expected 16 to 256 "),
        ("[5]", "tenants.a.api_tokens.0: expected text"),
        ('"hidden-hidden-hidden"', "tenants.a.api_tokens: expected a list"),
        (
            '["hidden-hidden-hidden", "hidden-hidden-hidden"]',
            "tenants.a.api_tokens: a token is already one of tenant a",
        ),
    ],
)
def test_a_token_that_cannot_be_is_named_and_not_shown(tokens: str, problem: str, tmp_path: Path) -> None:
    config = tmp_path / "mediator.toml"
    config.write_text(f'[tenants.a]\nusers = [{{name = "u", password = "p"}}]\napi_tokens = {tokens}\n')
    with pytest.raises(SetupError) as caught:
        installed_settings().load(config)
    assert str(caught.value).startswith(problem)
    assert "hidden" not in str(caught.value)


def test_one_token_belongs_to_one_tenant_and_is_never_shown(tmp_path: Path) -> None:
    tenants = {name: {"users": [{"name": name, "password": "p"}], "api_tokens": [ONE]} for name in ("a", "b")}
    with pytest.raises(SetupError) as caught:
        installed_settings().load(data_dir=tmp_path, tenants=tenants)
    assert str(caught.value).startswith("tenants.b.api_tokens: a token is already one of tenant a")
    kept = make_settings(data_dir=tmp_path, tenants={"default": {"api_tokens": [ONE]}})
    assert ONE not in repr(kept) + str(kept.model_dump())
