"""The text of the nats-server configuration: shape, quoting, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import SetupError, TenantRefusedError
from mediator.nats.accounts import (
    AccountUser,
    Passwords,
    ServerLimits,
    TenantAccount,
    account_of,
    allows_anonymous,
    check_exposure,
    quote,
    render_config,
    snippet,
    tenant_of,
)

NKEY = "U" + "A" * 55


def render(*tenants, **options):
    return render_config(
        tenants, **{"host": "127.0.0.1", "port": 4222, "max_payload": 1024, "limits": ServerLimits(), **options}
    )


def rendered(*tenants):
    return render(*tenants, passwords=Passwords("service-pw", "system-pw", "anonymous-pw"))


def account(text, name):
    """The lines of one account, without those around it."""
    found = re.search(rf'^  "{re.escape(name)}": {{(.*?)^  }}$', text, re.DOTALL | re.MULTILINE)
    assert found, f"no account {name}"
    return found[1]


def test_the_service_exports_requests_by_account():
    lines = account(rendered(TenantAccount("default")), "MQ9")
    assert '{ service: "mq9.*.$mq9.AI.>", account_token_position: 2 }' in lines
    assert "{ stream:" not in lines, "pushes do not cross nats-server"
    assert '{user: "mediator", password: "service-pw"}' in lines


@pytest.mark.rule("A6")
def test_a_tenant_imports_its_own_subjects_only():
    text = rendered(TenantAccount("default"), TenantAccount("acme-2", (AccountUser("a", "pw"),)))
    lines = account(text, "ACME-2")
    assert '{ service: {account: "MQ9", subject: "mq9.ACME-2.$mq9.AI.>"}, to: "$mq9.AI.>", share: true }' in lines
    assert "DEFAULT" not in lines
    assert "ACME-2" not in account(text, "DEFAULT")


def test_jetstream_is_off_and_the_listener_is_as_asked():
    text = render(TenantAccount("default"), passwords=Passwords(), host="::1", port=4333, max_payload=77)
    for line in ("jetstream: false", 'host: "::1"', "port: 4333", "max_payload: 77", 'system_account: "SYS"'):
        assert line in text.splitlines()


def test_a_login_without_permissions_inherits_the_denies():
    lines = account(rendered(TenantAccount("acme", (AccountUser("a", "pw"), AccountUser("b", nkey=NKEY)))), "ACME")
    assert (
        'default_permissions: { subscribe: { deny: ["$mq9.AI.>"] }, publish: { deny: ["$mq9.PUSH.>", "$SYS.>"] } }'
        in lines
    )
    assert '{user: "a", password: "pw"}' in lines
    assert f'{{nkey: "{NKEY}"}}' in lines


def test_permissions_of_a_login_keep_the_denies():
    users = (AccountUser("a", "pw", publish=("$mq9.AI.>",)), AccountUser("b", "pw", subscribe=("_INBOX.>", "x")))
    lines = account(rendered(TenantAccount("acme", users)), "ACME").splitlines()
    first, second = (line for line in lines if "permissions: { publish" in line)
    allowed = '"$mq9.AI.>", "$mq9.AI.PUSH.OPEN"'
    denied = 'deny: ["$mq9.PUSH.>", "$SYS.>"]'
    assert f'publish: {{ allow: [{allowed}], {denied} }}, subscribe: {{ deny: ["$mq9.AI.>"] }}' in first
    assert f'publish: {{ {denied} }}, subscribe: {{ allow: ["_INBOX.>", "x"], deny: ["$mq9.AI.>"] }}' in second


def test_an_empty_list_of_subjects_allows_nothing():
    nothing = 'publish: { deny: [">"] }, subscribe: { deny: [">"] }'
    assert nothing in rendered(TenantAccount("acme", (AccountUser("a", "pw", publish=(), subscribe=()),)))


@pytest.mark.rule("E6")
def test_permission_for_stored_mail_holds_at_the_gateway():
    mail = "$mq9.AI.MAILBOX.MSG.a.*"
    limited = rendered(TenantAccount("acme", (AccountUser("a", "pw", publish=("x",), subscribe=(mail, "y")),)))
    assert 'publish: { allow: ["x", "$mq9.AI.PUSH.OPEN"]' in limited
    assert f'subscribe: {{ allow: ["{mail}", "y", "$mq9.PUSH.*.{mail}"]' in limited
    unlimited = rendered(TenantAccount("acme", (AccountUser("a", "pw", publish=()),)))
    assert 'publish: { allow: ["$mq9.AI.PUSH.OPEN"]' in unlimited
    without = rendered(TenantAccount("acme", (AccountUser("a", "pw", publish=("x",), subscribe=("y",)),)))
    assert "PUSH.OPEN" not in without
    assert "$mq9.PUSH.*" not in without


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    ("tenants", "anonymous"),
    [
        ((TenantAccount("default"),), True),
        ((TenantAccount("default"), TenantAccount("acme", (AccountUser("a", "pw"),))), True),
        ((TenantAccount("default", (AccountUser("a", "pw"),)),), False),
        ((TenantAccount("acme"),), False),
        ((), False),
    ],
)
def test_only_a_default_tenant_without_users_is_anonymous(tenants, anonymous):
    assert allows_anonymous(tenants) is anonymous
    assert ('no_auth_user: "anon"' in rendered(*tenants)) is anonymous
    assert ('user: "anon"' in rendered(*tenants)) is anonymous


def test_passwords_are_new_every_time_and_not_in_any_repr():
    one, two = Passwords(), Passwords()
    assert len({one.service, one.system, one.anonymous, two.service, two.system, two.anonymous}) == 6
    assert one.service not in repr(one)
    assert "hush" not in repr(TenantAccount("acme", (AccountUser("a", "hush"),)))


@pytest.mark.parametrize("name", ["", "-a", "A", "a.b", "a b", "a" * 65, "ä", "a\n", "a*", "$g"])
def test_tenant_names_that_are_refused(name):
    with pytest.raises(SetupError, match="tenant"):
        TenantAccount(name)


@pytest.mark.parametrize("name", ["mq9", "sys"])
def test_the_services_own_accounts_are_no_tenants(name):
    with pytest.raises(SetupError, match=f"tenant {name}"):
        TenantAccount(name)


@pytest.mark.rule("A6")
@given(st.from_regex(r"[a-z0-9][a-z0-9_-]{0,62}", fullmatch=True))
def test_account_and_tenant_lead_to_each_other(name):
    assert tenant_of(account_of(name)) == name


@pytest.mark.rule("A6")
@pytest.mark.parametrize("account", ["Acme", "acme", "", "-A", "A.B", "$G", "A" * 65, "İ"])
def test_an_account_that_no_tenant_leads_to_is_refused(account):
    with pytest.raises(TenantRefusedError):
        tenant_of(account)


def test_collisions_are_refused():
    with pytest.raises(SetupError, match="tenant a is configured twice"):
        rendered(TenantAccount("a"), TenantAccount("a"))
    with pytest.raises(SetupError, match="NATS user x"):
        rendered(TenantAccount("a", (AccountUser("x", "1"),)), TenantAccount("b", (AccountUser("x", "2"),)))
    with pytest.raises(SetupError, match=NKEY):
        rendered(TenantAccount("a", (AccountUser("x", nkey=NKEY), AccountUser("y", nkey=NKEY))))
    for reserved in ("mediator", "sys", "anon"):
        with pytest.raises(SetupError, match=f"NATS user {reserved}"):
            rendered(TenantAccount("a", (AccountUser(reserved, "1"),)))
    with pytest.raises(SetupError, match="configured twice"):
        snippet([TenantAccount("a"), TenantAccount("a")])


def test_a_user_has_one_credential_and_a_real_key():
    for wrong in ({}, {"password": "p", "nkey": NKEY}, {"nkey": "S" + "A" * 55}, {"nkey": NKEY + "\n"}):
        with pytest.raises(SetupError, match="NATS user a"):
            AccountUser("a", **wrong)


@pytest.mark.parametrize("bad", ["", "a\nb", "a\x00", "a\x7f", "a\x85b", "a\u2028b", "a\tb", "\ud800", "x" * 1025])
def test_unsafe_text_in_the_configuration_is_refused(bad):
    for make in (
        lambda: AccountUser(bad, "pw"),
        lambda: AccountUser("a", bad),
        lambda: AccountUser("a", "pw", publish=(bad,)),
        lambda: AccountUser("a", "pw", subscribe=(bad,)),
    ):
        with pytest.raises(SetupError) as caught:
            make()
        assert not bad or bad not in str(caught.value)


@given(st.text(min_size=1, max_size=50))
def test_quoted_text_is_one_string_and_reads_back(text):
    try:
        quoted = quote(text, "it")
    except SetupError:
        assert not text.isprintable()
        return
    body = quoted[1:-1]
    assert re.fullmatch(r'(?:[^"\\]|\\["\\])*', body)
    assert re.sub(r'\\(["\\])', r"\1", body) == text


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
    + [(host, False) for host in ("::", "10.0.0.1", "", "example.org", "localhost.example.org")],
)
def test_a_listener_off_loopback_needs_logins_or_a_word(host, inside):
    check_exposure(host, [TenantAccount("default")], allow_anonymous=True)
    check_exposure(host, [TenantAccount("default", (AccountUser("a", "pw"),))], allow_anonymous=False)
    if inside:
        check_exposure(host, [TenantAccount("default")], allow_anonymous=False)
    else:
        with pytest.raises(SetupError, match="give the default tenant users"):
            check_exposure(host, [TenantAccount("default")], allow_anonymous=False)


def test_the_snippet_has_the_accounts_without_logins():
    text = snippet([TenantAccount("acme", (AccountUser("alice", "hush"),))])
    assert "alice" not in text
    assert "hush" not in text
    assert "password: $MQ9_PASSWORD" in text
    managed = rendered(TenantAccount("acme", (AccountUser("alice", "hush"),)))
    tail = account(managed, "ACME").split("default_permissions")[1]
    assert account(text, "ACME").endswith(tail)
    exports = account(managed, "MQ9").split("exports")[1]
    assert account(text, "MQ9").endswith(exports)
