"""What may be changed of tenants while the service runs, and what a service makes of them (A6, S7)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from mediator.errors import BadRequestError, NoSuchTenantError, QuotaExceededError
from mediator.nats import accounts
from mediator.nats.accounts import AccountMap
from mediator.nats.opening import make_account_map
from mediator.settings.settings import Settings
from mediator.tenants import rules
from mediator.tenants.directory import ManagedLogin, TenantDirectory, claims_of, digest_of
from mediator.tenants.records import Tenant, TenantToken, TenantUser, decode, encode
from mediator.tenants.rules import SettingsClaims
from tests.harness.core import make_settings

NKEY = "U" + "A" * 55
CLAIMS = SettingsClaims(names=frozenset({"default", "fixed"}), logins=frozenset({"bob"}), digests=frozenset({"ff"}))
EXTERNAL = replace(CLAIMS, users_wanted=False, accounts=frozenset({"ACME"}))
ANN = TenantUser("ann", "hash-1")
ACME = Tenant("acme", 1, users=(ANN,), tokens=(TenantToken("main", "aa"),), accounts=("A",))
GONE = Tenant("gone", 1, removed_at=2)
KEPT = {"acme": ACME, "gone": GONE}


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("acme", "is there already"),
        ("fixed", "is in the settings: change it there"),
        ("default", "is in the settings"),
        *((name, "expected 1 to 63") for name in ("", "Acme", "a.b", "-a", "x" * 64, "mq9", "sys")),
    ],
)
def test_a_name_that_cannot_be_added(name: str, said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        rules.add(KEPT, CLAIMS, name, 5)


def test_add_find_and_remove() -> None:
    assert rules.add(KEPT, CLAIMS, "gone", 5) == Tenant("gone", 5), "a removed one may come back"
    assert rules.find(KEPT, CLAIMS, "acme") is ACME
    assert rules.remove(ACME, 9) == Tenant("acme", 1, removed_at=9)
    for name in ("gone", "nobody"):
        with pytest.raises(NoSuchTenantError):
            rules.find(KEPT, CLAIMS, name)
    with pytest.raises(BadRequestError, match="in the settings"):
        rules.find(KEPT, CLAIMS, "fixed")
    with pytest.raises(BadRequestError, match=r"^tenant: because$"):
        rules.add(KEPT, replace(CLAIMS, why_none="because"), "new", 5)


def test_reserved_names_are_those_of_the_server() -> None:
    assert {accounts.account_of(name) for name in rules.RESERVED_NAMES} == {"MQ9", "SYS"}
    assert {accounts.SERVICE_USER, accounts.SYSTEM_USER, accounts.ANONYMOUS_USER} == rules.RESERVED_USERS


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    ("user", "said"),
    [
        (TenantUser("ann", "h"), "^user: ann is taken"),
        (TenantUser("bob", "h"), "^user: bob is taken"),
        (TenantUser("mediator", "h"), "is taken"),
        (TenantUser("a~2", "h"), "^user: expected 1 to 64"),
        (TenantUser("cid", nkey="short"), "^nkey: expected a public user key"),
    ],
)
def test_a_user_that_cannot_be_added(user: TenantUser, said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        rules.add_user(KEPT, CLAIMS, Tenant("new", 1), user)


def test_users_tokens_accounts_and_quotas() -> None:
    tenant = rules.add_user(KEPT, CLAIMS, ACME, TenantUser("cid", nkey=NKEY))
    assert rules.remove_user(tenant, "ann").users == (TenantUser("cid", nkey=NKEY),)
    with pytest.raises(BadRequestError, match="has no user cid"):
        rules.remove_user(ACME, "cid")
    with pytest.raises(BadRequestError, match="has an nkey"):
        rules.rotate_user(tenant, "cid", "h", 0, 1)
    with pytest.raises(BadRequestError, match="the external NATS server knows its users"):
        rules.add_user(KEPT, EXTERNAL, ACME, TenantUser("cid", "h"))

    with pytest.raises(BadRequestError, match="has a token main already"):
        rules.add_token(KEPT, CLAIMS, ACME, TenantToken("main", "bb"))
    for taken in ("aa", "ff"):
        with pytest.raises(BadRequestError, match="is another one already"):
            rules.add_token(KEPT, CLAIMS, Tenant("new", 1), TenantToken("t", taken))
    assert rules.remove_token(ACME, "main").tokens == ()
    with pytest.raises(BadRequestError, match="has no token x"):
        rules.remove_token(ACME, "x")

    assert rules.set_accounts(KEPT, EXTERNAL, ACME, ["A", "B"]).accounts == ("A", "B")
    for wrong, claims in ((["ACME"], EXTERNAL), (["a b"], EXTERNAL), (["B"], CLAIMS)):
        with pytest.raises(BadRequestError, match=r"^accounts: "):
            rules.set_accounts(KEPT, claims, ACME, wrong)
    with pytest.raises(BadRequestError, match="A is taken"):
        rules.set_accounts(KEPT, EXTERNAL, Tenant("new", 1), ["A"])

    tenant = rules.set_quotas(ACME, {"rate": 5, "bytes": 0})
    assert rules.set_quotas(tenant, {"rate": None, "sockets": 2}).quotas == {"bytes": 0, "sockets": 2}
    assert rules.set_quotas(ACME, {"rate": "5", "bytes": 7.0}).quotas == {"rate": 5, "bytes": 7}
    for name, value in (("speed", 1), ("rate", -1), ("rate", True), ("rate", "5.5")):
        with pytest.raises(BadRequestError, match=rf"^quotas\.{name}: expected"):
            rules.set_quotas(ACME, {name: value})


def test_a_rotation_keeps_the_former_secret_for_a_while() -> None:
    rotated = rules.rotate_user(ACME, "ann", "hash-2", 150, 100)
    assert rotated.users == (TenantUser("ann", "hash-2", None, 2, "hash-1", 150),)
    with pytest.raises(BadRequestError, match="is being rotated"):
        rules.rotate_user(rotated, "ann", "hash-3", 300, 149)
    assert rules.rotate_user(rotated, "ann", "hash-3", 151, 151).users == (TenantUser("ann", "hash-3", None, 3),)

    rotated = rules.rotate_token(ACME, "main", "bb", 150, 100)
    assert rotated.tokens == (TenantToken("main", "aa", 150), TenantToken("main", "bb"))
    assert rules.rotate_token(rotated, "main", "cc", 200, 200).tokens == (TenantToken("main", "cc"),)


def test_records_are_read_as_they_were_written() -> None:
    tenant = replace(ACME, quotas={"rate": 1}, users=(ANN, TenantUser("cid", nkey=NKEY)), removed_at=None)
    assert decode(encode(tenant)) == tenant
    newer = (
        encode(tenant)
        .replace('"name":"acme"', '"name":"acme","invented":1')
        .replace('"name":"main"', '"name":"main","invented":1')
    )
    assert decode(newer) == tenant
    assert "hash-1" not in repr(tenant)


# What a service makes of them.


def directory(settings: Settings, *tenants: Tenant, now: int = 100, revision: int = 1) -> TenantDirectory:
    made = TenantDirectory(settings, lambda: now)
    made.update(revision, {tenant.name: tenant for tenant in tenants})
    return made


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    fixed: dict[str, Any] = {
        "users": [{"name": "bob", "password": "pw"}],
        "api_tokens": ["x" * 16],
        "quotas": {"rate": 7, "subscriptions": 3},
    }
    return make_settings(data_dir=tmp_path, tenants={"fixed": fixed}, quotas={"tenant_rate": 50})


@pytest.mark.rule("S7")
def test_quotas_differ_from_those_for_all(settings: Settings) -> None:
    made = directory(settings, Tenant("acme", 1, quotas={"rate": 0, "sockets": 2}))
    assert [made.quota(name).rate for name in ("default", "fixed", "acme")] == [50, 7, 0]
    assert [made.quota(name).subscriptions for name in ("default", "fixed", "acme")] == [10_000, 3, 10_000]
    made.enter("acme")
    made.enter("acme")
    with pytest.raises(QuotaExceededError, match="sockets of the tenant, limit 2, in use 2"):
        made.enter("acme")
    made.leave("acme")
    made.enter("acme")


def test_the_settings_win(settings: Settings) -> None:
    double = Tenant("acme", 1, users=(TenantUser("bob", "h"), ANN), tokens=(TenantToken("t", digest_of("x" * 16)),))
    made = directory(settings, Tenant("fixed", 1, users=(TenantUser("eve", "h"),)), double, GONE)
    assert made.names == ["acme", "default", "fixed"]
    assert made.logins() == {"acme": (ManagedLogin("ann", "hash-1", None),)}
    assert made.tenant_of_token(digest_of("x" * 16)) is None
    assert list(made.removed) == ["gone"]


def test_an_older_state_is_not_taken(settings: Settings) -> None:
    changes: list[int] = []
    made = directory(settings, ACME, revision=3)
    made.listen(lambda: changes.append(made.revision))
    made.update(2, {})
    made.update(3, {})
    assert list(made.living) == ["acme"]
    made.update(4, {})
    assert (list(made.living), changes) == ([], [3, 4])


def test_logins_while_a_password_is_rotated(settings: Settings) -> None:
    new = bcrypt.hashpw(b"new", bcrypt.gensalt(4)).decode()
    tenant = replace(ACME, users=(TenantUser("ann", new, None, 3, "old", 200),))
    made = directory(settings, tenant, now=199)
    assert made.logins()["acme"] == (
        ManagedLogin("ann", "old", None),
        ManagedLogin("ann~3", new, None),
        ManagedLogin("ann~2", "old", None),
    )
    assert made.alias("ann", "new") == "ann~3"
    assert made.alias("ann", "old") is None
    assert made.alias("eve", "new") is None
    ended = directory(settings, tenant, now=200)
    assert ended.logins()["acme"] == (ManagedLogin("ann", new, None), ManagedLogin("ann~3", new, None))
    assert ended.alias("ann", "new") is None, "the plain name is valid for it"


def test_a_token_ends(settings: Settings) -> None:
    tenant = replace(ACME, tokens=(TenantToken("main", "aa", 200), TenantToken("main", "bb")))
    for now, old in ((199, "acme"), (200, None)):
        made = directory(settings, tenant, now=now)
        assert (made.tenant_of_token("aa"), made.tenant_of_token("bb")) == (old, "acme")


@pytest.mark.rule("A6")
def test_accounts_follow_the_tenants(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_dir": tmp_path, "nats_url": "nats://host", "nats_accounts": True}
    assert "set tenants.default.accounts" in claims_of(make_settings(**options)).why_none
    settings = make_settings(**options, tenants={"default": {"accounts": ["MAIN"]}})
    assert not claims_of(settings).why_none
    made = directory(settings, revision=0)
    accounts_of = make_account_map(settings, made)

    def tenants(accounts_of: AccountMap) -> list[str | None]:
        found: list[str | None] = []
        for account in ("MAIN", "A", "OTHER"):
            try:
                found.append(accounts_of.tenant_of(account))
            except Exception:
                found.append(None)
        return found

    assert tenants(accounts_of) == ["default", "default", "default"]
    made.update(1, {"acme": ACME})
    assert tenants(accounts_of) == ["default", "acme", None]
    made.update(2, {"acme": rules.remove(ACME, 9)})
    assert tenants(accounts_of) == ["default", None, None], "nobody becomes default by a removal"


def test_without_accounts_there_are_no_tenants(tmp_path: Path) -> None:
    settings = make_settings(data_dir=tmp_path, nats_url="nats://host")
    assert "set nats_accounts" in claims_of(settings).why_none
