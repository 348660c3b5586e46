"""Which tenant an HTTP request is: its API token says so, and when none is needed (A6)."""

from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from mediator.config.settings import Settings
from mediator.errors import NotAuthenticatedError, SetupError
from mediator.http.tenants import HttpTenants

ONE, OTHER, BOB = "one-of-ada-000000", "other-of-ada-0000", "the-one-of-bob-00"
TOKENS = {"acme": [ONE, OTHER], "globex": [BOB], "idle": []}
LOCAL = {"Host": "127.0.0.1:8080"}


def of(tenants: HttpTenants, *headers: tuple[str, str], **named: str) -> str:
    return tenants.of(CIMultiDict([*headers, *named.items()]))


@pytest.mark.rule("A6")
def test_a_token_says_the_tenant() -> None:
    tenants = HttpTenants(TOKENS, anonymous=False)
    for token, tenant in ((ONE, "acme"), (OTHER, "acme"), (BOB, "globex")):
        assert of(tenants, Authorization=f"Bearer {token}") == tenant
        assert of(tenants, Authorization=f"bEARER  {token} ", Host="any.example") == tenant


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
@pytest.mark.parametrize("anonymous", [True, False])
def test_an_unknown_token_is_refused_even_if_none_is_needed(value: str, anonymous: bool) -> None:
    tenants = HttpTenants(TOKENS, anonymous=anonymous)
    with pytest.raises(NotAuthenticatedError):
        of(tenants, Authorization=value, **LOCAL)


@pytest.mark.rule("A6")
def test_two_tokens_at_once_are_none() -> None:
    pair = [("Authorization", f"Bearer {ONE}"), ("Authorization", f"Bearer {BOB}")]
    with pytest.raises(NotAuthenticatedError):
        of(HttpTenants(TOKENS, anonymous=False), *pair)


@pytest.mark.rule("A6")
def test_no_other_header_says_a_tenant() -> None:
    tenants = HttpTenants(TOKENS, anonymous=False)
    for name in ("X-Tenant", "Tenant", "X-Forwarded-User", "Cookie", "Proxy-Authorization", "X-Api-Key"):
        with pytest.raises(NotAuthenticatedError):
            of(tenants, (name, "acme"), (name, ONE), **LOCAL)


@pytest.mark.rule("A6")
def test_a_caller_without_a_token_is_default_where_allowed() -> None:
    tenants = HttpTenants({}, anonymous=True)
    for host in ("127.0.0.1:8080", "127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:8080", "[::1]", "127.8.0.1:80"):
        assert of(tenants, Host=host) == "default"
    with pytest.raises(NotAuthenticatedError):
        of(HttpTenants({}, anonymous=False), **LOCAL)


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    "host", ["", "evil.example:8080", "10.0.0.1", "localhost.evil.example", "[::1", "[x]:1", "a b"]
)
def test_a_name_that_leads_to_this_machine_is_not_this_machine(host: str) -> None:
    tenants = HttpTenants({}, anonymous=True)
    with pytest.raises(NotAuthenticatedError):
        of(tenants, Host=host)


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
def test_a_token_is_needed_as_soon_as_there_is(reason: str, tmp_path: Path) -> None:
    assert not Settings.of(data_dir=tmp_path, **REASONS[reason]).http_anonymous


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    "options",
    [{}, {"http": "localhost:0"}, {"http": "[::1]:8080"}, {"tenants": {"default": {}}}, {"nats_url": "nats://h"}],
)
def test_no_token_is_needed_while_nothing_keeps_callers_apart(options: dict[str, Any], tmp_path: Path) -> None:
    assert Settings.of(data_dir=tmp_path, **options).http_anonymous


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
        Settings.load(config)
    assert str(caught.value).startswith(problem)
    assert "hidden" not in str(caught.value)


def test_one_token_belongs_to_one_tenant_and_is_never_shown(tmp_path: Path) -> None:
    tenants = {name: {"users": [{"name": name, "password": "p"}], "api_tokens": [ONE]} for name in ("a", "b")}
    with pytest.raises(SetupError) as caught:
        Settings.load(data_dir=tmp_path, tenants=tenants)
    assert str(caught.value).startswith("tenants.b.api_tokens: a token is already one of tenant a")
    kept = Settings.of(data_dir=tmp_path, tenants={"default": {"api_tokens": [ONE]}})
    assert ONE not in repr(kept) + str(kept.model_dump())
