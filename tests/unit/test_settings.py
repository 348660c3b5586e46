"""Options: which source wins, what is said about each wrong value, and that the documentation is up to date."""

import os
from pathlib import Path
from typing import Any

import pytest

from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.mailboxes.bounds import Quota
from mediator.mailboxes.lanes import Lane
from mediator.parts import installed_settings
from mediator.settings.settings import Settings
from mediator.settings.sources import options

NKEY = "U" + "A" * 55
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.upper().startswith("MEDIATOR_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mediator.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(config: Path | None = None, **flags: object) -> list[str]:
    with pytest.raises(SetupError) as caught:
        installed_settings().load(config, **flags)
    return str(caught.value).split("\n")


def test_defaults_need_no_source(tmp_path: Path) -> None:
    settings = installed_settings().load()
    assert settings.data_dir == tmp_path / "mediator-data"
    assert settings.nats == Endpoint("127.0.0.1", 4222)
    assert settings.http == Endpoint("127.0.0.1", 8080)
    assert settings.max_message_bytes == 10 * 1024 * 1024
    assert settings.anonymous
    assert settings.log_format == "json"  # standard error is captured here, no terminal


def test_each_source_wins_over_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toml(tmp_path, "max_pending = 1\nmax_waiting = 1\narchive_limit = 1\n")
    monkeypatch.setenv("MEDIATOR_MAX_PENDING", "2")
    monkeypatch.setenv("MEDIATOR_MAX_WAITING", "2")
    settings = installed_settings().load(config, max_pending=3, max_waiting=None)
    assert (settings.max_pending, settings.max_waiting, settings.archive_limit) == (3, 2, 1)
    assert settings.drain_seconds == 10


def test_tables_are_merged_and_lists_taken_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toml(
        tmp_path,
        "[quotas]\nmailbox_rate = 1\ntenant_rate = 1\nmailbox_bytes = 1\n"
        '[tenants.acme]\nusers = [{name = "a", password = "p"}, {name = "b", password = "p"}]\n',
    )
    monkeypatch.setenv("MEDIATOR_QUOTAS__TENANT_RATE", "2")
    monkeypatch.setenv("MEDIATOR_QUOTAS__MAILBOX_BYTES", "2")
    monkeypatch.setenv("MEDIATOR_TENANTS__ACME__USERS", f'[{{"name": "c", "nkey": "{NKEY}"}}]')
    settings = installed_settings().load(config, quotas={"mailbox_bytes": 3})
    quotas = settings.quotas
    assert (quotas.mailbox_rate, quotas.tenant_rate, quotas.mailbox_bytes, quotas.tenant_bytes) == (1, 2, 3, 0)
    assert [user.name for user in settings.tenants["acme"].users] == ["c"]


def test_an_empty_variable_counts_as_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIATOR_DATABASE_URL", "")
    monkeypatch.setenv("MEDIATOR_CONFIG", "")
    assert installed_settings().load().database_url is None


def test_variables_of_other_programs_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kubernetes sets these for a service named mediator.
    monkeypatch.setenv("MEDIATOR_PORT", "tcp://10.0.0.1:4222")
    monkeypatch.setenv("MEDIATOR_SERVICE_HOST", "10.0.0.1")
    installed_settings().load()


def test_environment_names_the_file_and_a_flag_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.toml"
    other.write_text("max_pending = 7\n")
    monkeypatch.setenv("MEDIATOR_CONFIG", str(other))
    assert installed_settings().load().max_pending == 7
    assert installed_settings().load(toml(tmp_path, "max_pending = 8\n")).max_pending == 8


POSTED = 'to_url = "https://a.example", secret = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"'
WRONG = [
    ("nats", '"4222"', "expected HOST:PORT, got '4222'"),
    ("nats", "4222", "expected HOST:PORT, got '4222'"),
    ("nats", '"::1:4222"', "expected HOST:PORT, an IPv6 address in brackets, got '::1:4222'"),
    ("http", '"localhost:65536"', "expected a port from 0 to 65535 after the colon, got 'localhost:65536'"),
    ("http", '":8080"', "expected a host before the colon, 0.0.0.0 for every interface, got ':8080'"),
    (
        "nats_url",
        '"http://user:hidden@host"',
        "expected nats://HOST:PORT (or tls://, ws://, wss://), several joined by commas",
    ),
    (
        "nats_url",
        '"nats://one:4222,two"',
        "expected nats://HOST:PORT (or tls://, ws://, wss://), several joined by commas",
    ),
    ("database_url", '"mysql://root:hidden@h/d"', "expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
    ("database_url", '"postgresql://u:hidden@h:port/d"', "expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
    ("database_url", '"postgresql://u:hidden@h:1,i:port/d"', "expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE"),
    ("database_url", '{password = "hidden"}', "expected text"),
    ("nats_accounts", '"perhaps"', "expected true or false, got 'perhaps'"),
    ("allow_anonymous", "[]", "expected true or false"),
    ("log_level", '"loud"', "expected debug, info, warning or error, got 'loud'"),
    ("log_format", '"xml"', "expected console or json, got 'xml'"),
    ("default_mailbox_ttl", "-1", "expected at least 0, got '-1'"),
    ("default_mailbox_ttl", "3153600001", "expected at most 3153600000, got '3153600001'"),
    ("default_ack_wait_ms", "999", "expected 0, or 1000 to 43200000 milliseconds, got '999'"),
    ("default_ack_wait_ms", "43200001", "expected 0, or 1000 to 43200000 milliseconds, got '43200001'"),
    ("claim_ms", "-1", "expected at least 0, got '-1'"),
    ("claim_ms", "43200001", "expected at most 43200000, got '43200001'"),
    ("max_message_bytes", "1023", "expected at least 1024, got '1023'"),
    ("max_message_bytes", "49283073", "expected at most 49283072, got '49283073'"),
    ("max_message_bytes", '"10 MiB"', "expected a whole number, got '10 MiB'"),
    ("archive_limit", "0", "expected at least 1, got '0'"),
    ("archive_limit", "1.5", "expected a whole number, got '1.5'"),
    ("max_pending", "true", "expected a whole number, got 'True'"),
    ("max_pending", "0", "expected at least 1, got '0'"),
    ("max_waiting", "1000001", "expected at most 1000000, got '1000001'"),
    ("drain_seconds", "-0.5", "expected at least 0, got '-0.5'"),
    ("drain_seconds", "601", "expected at most 600, got '601'"),
    ("drain_seconds", "nan", "expected a number, got 'nan'"),
    ("drain_seconds", '"soon"', "expected a number, got 'soon'"),
    ("backup_dir", "7", "expected text, got '7'"),
    ("data_dir", "7", "expected text, got '7'"),
    ("data_dir", '"~nobody-of-that-name/x"', "expected a directory, the user after ~ is not known here"),
    ("instance", '"a b"', "expected text that matches ^[A-Za-z0-9._-]{1,64}$, got 'a b'"),
    ("quotas", "3", "expected a table of options, got '3'"),
    ("quotas.mailbox_rate", "-1", "expected at least 0, got '-1'"),
    ("store", "1", "expected a table of options, got '1'"),
    ("store.sync", '"never"', "expected always or interval, got 'never'"),
    ("store.sync_interval", "0", "expected at least 0.01, got '0'"),
    ("journal.segment_mb", "0", "expected at least 1, got '0'"),
    ("journal.total_mb", "127", "expected at least twice journal.segment_mb"),
    ("journal.enabled", '"sometimes"', "expected true or false, got 'sometimes'"),
    ("cleanup.interval_seconds", "0", "expected at least 1, got '0'"),
    ("http_trusted_proxies", '["proxy"]', ".0: expected a network such as 10.1.0.0/16, or an IP address"),
    ("http_forwarded_header", '"Via"', "expected X-Forwarded-For or Forwarded"),
    ("didcomm", "1", "expected a table of options, got '1'"),
    ("didcomm.public_url", '"ftp://x"', "expected http://HOST[:PORT] or https://HOST[:PORT], with a path or without"),
    ("didcomm.public_url", '"https://u:hidden@x"', "expected http://HOST[:PORT] or https://HOST[:PORT]"),
    ("didcomm.public_url", '"https://x?a=b"', "expected http://HOST[:PORT] or https://HOST[:PORT]"),
    ("didcomm.public_url", '"https://x:port"', "expected http://HOST[:PORT] or https://HOST[:PORT]"),
    ("didcomm.label", '""', "expected at least 1 characters"),
    ("didcomm.policy", '"closed"', "expected open, invitation or allow"),
    ("didcomm.allow", '["nobody"]', ".0: expected a DID, a did:key or a base58 key"),
    ("didcomm.allow", '["did:web:example.org"]', "expected only with didcomm.policy allow"),
    ("nats_max_subscriptions", "9", "expected at least 10"),
    ("http_max_connections", "15", "expected at least 16"),
    ("control_key", '"hidden"', "expected 32 bytes in base64"),
    ("didcomm.key", '"hidden"', "expected 32 bytes in base64"),
    ("didcomm.max_connections", "-1", "expected at least 0, got '-1'"),
    ("didcomm.max_keys", "0", "expected at least 1, got '0'"),
    ("didcomm.max_messages", "-1", "expected at least 0, got '-1'"),
    ("didcomm.max_mb", "-1", "expected at least 0, got '-1'"),
    ("didcomm.keep_days", "0", "expected at least 1, got '0'"),
    ("didcomm.idle_days", "-1", "expected at least 0, got '-1'"),
    ("didcomm.max_sockets", "0", "expected at least 1, got '0'"),
    ("didcomm.rate", "0", "expected at least 1, got '0'"),
    ("didcomm.terms", "1", "expected"),
    ("didcomm.address_rate", "-1", "expected at least 0, got '-1'"),
    ("didcomm.connection_rate", "-1", "expected at least 0, got '-1'"),
    ("didcomm.burst_seconds", "0", "expected at least 1, got '0'"),
    ("didcomm.live_lease_seconds", "-1", "expected at least 0, got '-1'"),
    ("didcomm.outbound_networks", '["home"]', ".0: expected a network such as 10.1.0.0/16, or an IP address"),
    ("didcomm.push_webhook", '"mailto:x"', "expected http://HOST[:PORT] or https://HOST[:PORT]"),
    ("metrics_per_tenant", "-1", "expected at least 0, got '-1'"),
    ("metrics_mailboxes", "101", "expected at most 100, got '101'"),
    ("lag_minutes", "-1", "expected at least 0, got '-1'"),
    ("otel", "1", "expected a table of options, got '1'"),
    ("otel.endpoint", '"localhost:4318"', "expected http://HOST:PORT or https://HOST:PORT"),
    ("otel.endpoint", '"http://ann:secret@localhost:4318"', "expected http://HOST:PORT or https://HOST:PORT"),
    ("otel.endpoint", '"http://localhost:x"', "expected http://HOST:PORT or https://HOST:PORT"),
    ("otel.sample_ratio", "2", "expected at most 1, got '2'"),
    ("gateway", "1", "expected a table of options, got '1'"),
    ("gateway.listen", '"x"', "expected HOST:PORT"),
    ("gateway.direct", '"x:y"', "expected a port from 0 to 65535 after the colon"),
    ("mq9", "1", "expected a table of options, got '1'"),
    ("mq9.latest", '"newest"', "expected new or last, got 'newest'"),
    ("editions", "1", "expected a table of options, got '1'"),
    ("editions.urgent_ttl", "-1", "expected at least 0, got '-1'"),
    ("editions.normal_ttl", "-1", "expected at least 0, got '-1'"),
    ("editions.notify_ttl", "-1", "expected at least 0, got '-1'"),
    ("push", "1", "expected a table of options, got '1'"),
    ("push.keep_days", "0", "expected at least 1, got '0'"),
    ("push.max_subscriptions", "0", "expected at least 1, got '0'"),
    ("push.tenant_subscriptions", "0", "expected at least 1, got '0'"),
    ("gateway.tls_cert", "1", "expected"),
    ("nats_creds", "1", "expected"),
    ("nats_nkey", "1", "expected"),
    ("nats_ca", "1", "expected"),
    ("nats_cert", "1", "expected"),
    ("nats_key", "1", "expected"),
    ("gateway.tls_key", "1", "expected"),
    ("gateway.tls_client_ca", "1", "expected"),
    ("gateway.max_connections", "0", "expected at least 1, got '0'"),
    ("gateway.max_subscriptions", "0", "expected at least 1, got '0'"),
    ("registry", "1", "expected a table of options, got '1'"),
    ("registry.model", '""', "expected at least 1 characters"),
    ("registry.models", '["a", "b", "c", "d", "e"]', "expected at most 4 models, got 5"),
    ("registry.models", '["a", "a=2"]', "expected different models"),
    ("registry.models", '["a", "b=0"]', "expected different models"),
    ("registry.default_ttl", "-1", "expected at least 0, got '-1'"),
    ("registry.grace_seconds", "-1", "expected at least 0, got '-1'"),
    ("registry.keep_days", "4000", "expected at most 3650, got '4000'"),
    ("registry.max_agents", "-1", "expected at least 0, got '-1'"),
    ("registry.outbound_networks", '["home"]', ".0: expected a network such as 10.1.0.0/16, or an IP address"),
    ("pipeline", "1", "expected a table of options, got '1'"),
    ("pipeline.every", "-1", "expected at least 0, got '-1'"),
    ("pipeline.max_minutes", "0", "expected at least 1, got '0'"),
    ("pipeline.archive_key_file", "7", "expected text, got '7'"),
    ("operators", "1", "expected a table of options, got '1'"),
    ("operators.tokens", '["hidden"]', ".0: expected a table of options"),
    (
        "operators.tokens",
        '[{name = "a", token = "hidden"}]',
        ".0.token: expected 16 to 256 printable characters without spaces",
    ),
    ("operators.public_url", '"https://a.example/b"', "expected https://HOST, perhaps with a port, and no path"),
    ("operators.audit_days", "0", "expected at least 1, got '0'"),
    ("oidc", "1", "expected a table of options, got '1'"),
    ("oidc.issuer", '"login.example.com"', "expected https://HOST, perhaps with a port and a path"),
    ("oidc.client_id", "1", "expected text"),
    ("oidc.client_secret", "1", "expected text"),
    ("oidc.scopes", '["a b"]', r".0: expected text that matches ^[!#-\[\]-~]{1,64}$"),
    ("oidc.claim", '""', "expected at least 1 characters"),
    ("oidc.roles", '{boss = ["a"]}', ".boss: expected read, operate, read-payload or admin"),
    ("copies", "{}", "expected a list"),
    ("copies", '[{to_address = "audit"}]', ".0.name: expected a value, there is none"),
    ("copies", '[{name = "A", to_address = "audit"}]', ".0.name: expected 1 to 63 of a-z"),
    ("copies", '[{name = "a", to_address = "Audit"}]', ".0.to_address: expected lowercase"),
    ("copies", '[{name = "a", to_address = "b", address = "*"}]', ".0.address: expected an address, the beginning"),
    ("copies", '[{name = "a", to_address = "b", doors = ["smtp"]}]', ".0.doors.0: expected nats, didcomm, broadcast"),
    ("copies", '[{name = "a", to_address = "b", to_subject = "a.*"}]', ".0.to_subject: expected a subject without"),
    (
        "copies",
        '[{name = "a", to_address = "b", to_subject = "c"}]',
        "rule a has to_subject: expected forwarding.nats_url",
    ),
    ("copies", '[{name = "a", to_address = "b", to_url = "hidden"}]', ".0.to_url: expected https://HOST/PATH"),
    (
        "copies",
        '[{name = "a", to_address = "b", to_url = "https://c", secret = "hidden"}]',
        ".0.secret: expected whsec_ and 24 to 64",
    ),
    (
        "copies",
        f'[{{name = "a", to_address = "b", {POSTED}}}, {{name = "c", to_address = "b", {POSTED}}}]',
        "rule c forwards from a mailbox from which another rule forwards",
    ),
    ("forwarding.networks", '["home"]', ".0: expected a network such as 10.1.0.0/16, or an IP address"),
    ("forwarding", "1", "expected a table of options, got '1'"),
    ("forwarding.nats_url", '"nats"', "expected nats://HOST:PORT"),
    ("forwarding.nats_ca", "1", "expected"),
    ("forwarding.nats_creds", '"a.creds"', "expected only with forwarding.nats_url"),
    ("copies", '[{name = "a", to_address = "b", tenant = "x"}]', "rule a is of tenant x, which is not in the"),
    (
        "copies",
        '[{name = "a", to_address = "b"}, {name = "a", to_address = "c"}]',
        "two rules of tenant default are called a",
    ),
    ("tenants", "[]", "expected a table of options"),
    ("tenants.Acme", "{}", "expected text that matches ^[a-z0-9][a-z0-9_-]{0,62}$"),
    ("tenants.a.accounts", '["A.B"]', r".0: expected text that matches ^[^\s.*>]{1,128}$"),
    ("tenants.a.users", '"hidden"', "expected a list"),
    ("tenants.a.users", '[{password = "hidden"}]', ".0.name: expected a value, there is none"),
    ("tenants.a.users", '[{name = "x"}]', ".0: expected either password or nkey"),
    (
        "tenants.a.users",
        f'[{{name = "x", password = "hidden", nkey = "{NKEY}"}}]',
        ".0: expected either password or nkey",
    ),
    ("tenants.a.users", '[{name = "x", nkey = "SUhidden"}]', ".0.nkey: expected text that matches ^U[A-Z2-7]{55}$"),
    ("tenants.a.users", '[{name = "x y", password = "hidden"}]', ".0.name: expected text that matches ^[!-~]{1,64}$"),
    ("tenants.a.users", '[{name = "x", password = ""}]', ".0.password: expected at least 1 characters"),
]


@pytest.mark.parametrize(("option", "value", "expected"), WRONG)
def test_wrong_value_is_reported_with_source_and_expectation(
    tmp_path: Path, option: str, value: str, expected: str
) -> None:
    config = toml(tmp_path, f"{option} = {value}\n")
    [line, *more] = problems(config)
    assert not more
    separator = "" if expected.startswith(".") else ": "
    shown = line.partition(f" (from {config})")
    assert shown[1], line
    assert shown[0].startswith(f"{option}{separator}{expected}")
    assert "hidden" not in line


def test_every_option_has_a_wrong_value_tested() -> None:
    tested = {option for option, _, _ in WRONG}
    for path, field in options(Settings):
        if field.annotation is bool or path[0] in {"quotas", "journal", "cleanup"}:
            continue  # one of each kind stands for all
        assert ".".join(path) in tested, path


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("max_pendin = 1\n", "max_pendin: unknown option, did you mean max_pending?"),
        (
            "[quotas]\nmailbox_mesages = 1\n",
            "quotas.mailbox_mesages: unknown option, did you mean quotas.mailbox_messages?",
        ),
        ("[zzz]\nx = 1\n", "zzz: unknown option"),
        ("[tenants.a]\nuser = []\n", "tenants.a.user: unknown option"),
    ],
)
def test_an_unknown_key_in_the_file_is_an_error(tmp_path: Path, text: str, line: str) -> None:
    config = toml(tmp_path, text)
    assert problems(config) == [f"{line} (from {config})"]


def test_all_problems_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toml(tmp_path, "max_pending = 0\nmax_waiting = 5\n")
    monkeypatch.setenv("MEDIATOR_MAX_WAITING", "x")
    monkeypatch.setenv("MEDIATOR_QUOTAS__TENANT_RATE", "y")
    monkeypatch.setenv("MEDIATOR_QUOTAS__BOGUS", "1")
    monkeypatch.setenv("MEDIATOR_JOURNAL", "{")
    assert problems(config, http="nowhere") == [
        "journal: expected JSON (from MEDIATOR_JOURNAL)",
        "http: expected HOST:PORT, got 'nowhere' (from the command line)",
        "quotas.tenant_rate: expected a whole number, got 'y' (from MEDIATOR_QUOTAS__TENANT_RATE)",
        "quotas.bogus: unknown option (from MEDIATOR_QUOTAS__BOGUS)",
        f"max_pending: expected at least 1, got '0' (from {config})",
        "max_waiting: expected a whole number, got 'x' (from MEDIATOR_MAX_WAITING)",
    ]


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    assert problems(absent) == [f"config: cannot read {absent}: No such file or directory"]
    assert problems(tmp_path) == [f"config: cannot read {tmp_path}: Is a directory"]
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"x = '\xff'")
    assert problems(binary) == [f"config: {binary} is not UTF-8, byte 5"]
    broken = toml(tmp_path, 'max_pending = 1\npassword = "hidden\n')
    assert problems(broken) == [f"config: {broken} is not TOML, at line 2, column 19"]


USERS = {"users": [{"name": "u", "password": "p"}]}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"nats": "0.0.0.0:4222"},
            "nats: 0.0.0.0:4222 can be reached from other machines and no tenant has users; "
            "give tenants users, listen on 127.0.0.1, or set allow_anonymous",
        ),
        (
            {"gateway": {"direct": "0.0.0.0:4223"}},
            "gateway.direct: 0.0.0.0:4223 can be reached from other machines and no tenant has users; "
            "give tenants users, listen on 127.0.0.1, or set allow_anonymous",
        ),
        (
            {"gateway": {"enabled": False, "listen": "127.0.0.1:1"}},
            "gateway.listen: expected only with nats_url; nats says where it is",
        ),
        (
            {"gateway": {"listen": "127.0.0.1:1"}},
            "gateway.listen: expected only with nats_url; nats says where it is",
        ),
        (
            {"gateway": {"direct": "127.0.0.1:1", "enabled": False}},
            "gateway.direct: expected only with gateway.enabled; without it nats is the NATS server's own port",
        ),
        (
            {"gateway": {"direct": "127.0.0.1:1"}, "nats_url": "nats://h"},
            "gateway.direct: expected only without nats_url",
        ),
        (
            {"gateway": {"listen": "127.0.0.1:1"}, "nats_url": "wss://h"},
            "gateway.listen: expected only with nats:// or tls:// in nats_url",
        ),
        ({"gateway": {"tls_key": "key.pem"}}, "gateway: expected tls_cert and tls_key together"),
        ({"gateway": {"tls_client_ca": "ca.pem"}}, "gateway: expected tls_client_ca only with tls_cert"),
        ({"nats_cert": "cert.pem"}, "nats_cert: expected only with nats_url; the managed server knows the service"),
        (
            {"nats_url": "nats://a", "nats_nkey": "a.nk", "nats_creds": "a.creds"},
            "nats_nkey: nats_creds has another login; give one of them",
        ),
        ({"nats_url": "nats://a:b@c", "nats_nkey": "a.nk"}, "nats_nkey: nats_url has another login; give one of them"),
        ({"nats_url": "nats://a", "nats_key": "key.pem"}, "nats_key: expected nats_cert and nats_key together"),
        (
            {"nats_accounts": True},
            "nats_accounts: expected only with nats_url; the managed server always keeps tenants in accounts",
        ),
        (
            {"nats_url": "nats://h", "allow_anonymous": True},
            "allow_anonymous: expected only without nats_url; the external server decides who may connect",
        ),
        (
            {"allow_anonymous": True, "tenants": {"a": USERS}},
            "allow_anonymous: expected only while default is the only tenant",
        ),
        ({"tenants": {"a": {}}}, "tenants: no tenant has users, nobody could connect"),
        (
            {"tenants": {"a": {"accounts": ["A"]}}, "nats_url": "nats://h"},
            "tenants: with nats_url and without nats_accounts every caller is tenant default; set nats_accounts",
        ),
        (
            {"tenants": {"default": {"accounts": ["A"]}}},
            "tenants.default.accounts: expected only with nats_url and nats_accounts",
        ),
        (
            {"tenants": {"default": USERS}, "nats_url": "nats://h"},
            "tenants.default.users: expected only without nats_url; the external server knows its users",
        ),
        ({"tenants": {"a": USERS, "b": USERS}}, "tenants.b.users: u is already one of tenant a"),
        (
            {
                "nats_url": "nats://h",
                "nats_accounts": True,
                "tenants": {"a": {"accounts": ["A"]}, "b": {"accounts": ["A"]}},
            },
            "tenants.b.accounts: A is already one of tenant a",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(flags: dict[str, Any], line: str) -> None:
    assert f"{line} (from the command line)" in problems(**flags)


@pytest.mark.parametrize(
    ("flags", "anonymous"),
    [
        ({}, True),
        ({"nats": "localhost:0"}, True),
        ({"nats": "[::1]:4222"}, True),
        ({"nats": "0.0.0.0:4222", "allow_anonymous": True}, True),
        ({"nats": "0.0.0.0:4222", "tenants": {"a": USERS}}, False),
        ({"tenants": {"default": USERS}}, False),
        ({"tenants": {"default": USERS}, "allow_anonymous": True}, True),
    ],
)
def test_who_may_connect_without_credentials(flags: dict[str, Any], anonymous: bool) -> None:
    assert installed_settings().load(**flags).anonymous is anonymous


@pytest.mark.parametrize("hosts", ["h", "h:1", "h:1,i:2", "h,i", "[::1]:1,h:2", ""])
def test_a_database_has_several_hosts(hosts: str) -> None:
    url = f"postgresql://u:a,b@{hosts}/d?target_session_attrs=read-write"
    assert installed_settings().load(database_url=url).store_url == url


def test_secrets_are_not_shown() -> None:
    settings = installed_settings().load(
        database_url="postgresql://u:hidden@h/d", tenants={"a": {"users": [{"name": "u", "password": "hidden"}]}}
    )
    assert "hidden" not in f"{settings!r} {settings}"
    assert settings.database_url.get_secret_value() == "postgresql://u:hidden@h/d"


def test_instance_follows_the_data_directory(tmp_path: Path) -> None:
    one, again, two = (installed_settings().load(data_dir=tmp_path / name).instance for name in ("one", "one", "two"))
    assert one == again != two


def test_the_domain_gets_its_bounds_in_milliseconds() -> None:
    settings = installed_settings().load(
        default_mailbox_ttl=2,
        default_ack_wait_ms=3000,
        claim_ms=7,
        max_message_bytes=4096,
        archive_limit=5,
        quotas={
            "mailbox_messages": 1,
            "mailbox_bytes": 2,
            "mailbox_rate": 3,
            "tenant_messages": 4,
            "tenant_bytes": 5,
            "tenant_rate": 6,
        },
    )
    bounds = settings.bounds
    assert (bounds.default_ttl, bounds.default_ack_wait, bounds.max_message, bounds.archive_limit) == (
        2000,
        3000,
        4096,
        5,
    )
    assert bounds.claim == 7
    assert (bounds.mailbox, bounds.tenant) == (Quota(1, 2, 3), Quota(4, 5, 6))


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:4222", "127.0.0.1", 4222, True),
        ("127.9.9.9:1", "127.9.9.9", 1, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:65535", "::1", 65535, True),
        ("[0:0:0:0:0:0:0:1]:1", "::1", 1, True),
        ("[::]:4222", "::", 4222, False),
        ("0.0.0.0:4222", "0.0.0.0", 4222, False),
        ("nats_1.example.org:4222", "nats_1.example.org", 4222, False),
    ],
)
def test_endpoints_are_read_and_shown(text: str, host: str, port: int, loopback: bool) -> None:
    endpoint = Endpoint.parse(text)
    assert (endpoint.host, endpoint.port, endpoint.loopback) == (host, port, loopback)
    assert Endpoint.parse(str(endpoint)) == endpoint


NO_ENDPOINT = [
    "",
    ":",
    "host",
    "host:",
    "host:-1",
    "host:+1",
    "host: 1",
    "host:1x",
    "host:٣",
    "host:65536",
    "host:100000",
    ":1",
    "::1",
    "[::1]",
    "[::1:1",
    "[]:1",
    "[host]:1",
    "[127.0.0.1]:1",
    "300.1.1.1:1",
    "1.2.3:1",
    "a b:1",
    "-a:1",
    "*:1",
    "a:1:2",
    "http://host:1",
    "a\n:1",
    "host:1\n",
]


@pytest.mark.parametrize("text", NO_ENDPOINT)
def test_malformed_endpoint_says_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected "):
        Endpoint.parse(text)


@pytest.mark.rule("E4")
def test_suggested_lives_are_by_lane_and_off() -> None:
    assert installed_settings().load().editions.inbox_ttls == {}
    chosen = installed_settings().load(editions={"urgent_ttl": 86_400, "notify_ttl": 1}).editions.inbox_ttls
    assert chosen == {Lane.URGENT: 86_400_000, Lane.LOW: 1000}


def test_every_option_is_documented_with_its_variable() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    for path, field in options(Settings):
        assert field.description, path
        heading = (
            f"## {path[0]}"
            if path[0]
            in {"quotas", "journal", "cleanup", "didcomm", "mq9", "editions", "gateway", "push", "registry", "pipeline"}
            | {"operators", "oidc", "otel", "store", "forwarding"}
            and len(path) == 1
            else None
        )
        assert (heading or f"### {'.'.join(path)}") + "\n" in page
        if heading is None:
            assert "`MEDIATOR_" + "__".join(path).upper() + "`" in page


def test_a_token_belongs_to_one_operator_or_tenant(tmp_path: Path) -> None:
    token = "hidden-hidden-hidden"
    operators = f'[operators]\ntokens = [{{name = "ada", token = "{token}"}}, {{name = "eve", token = "{token}"}}]\n'
    [line] = problems(toml(tmp_path, operators))
    assert line.startswith("operators.tokens: the token of eve is already one of a tenant or of another operator")
    one = f'[operators]\ntokens = [{{name = "ada", token = "{token}"}}]\n'
    config = toml(tmp_path, f'{one}[tenants.default]\napi_tokens = ["{token}"]\n')
    assert any("the token of ada" in line for line in problems(config))
    assert not any("hidden" in line for line in problems(config))


@pytest.mark.parametrize("missing", ["client_id", "roles", "scopes"])
def test_a_provider_needs_its_options(tmp_path: Path, missing: str) -> None:
    options = {"client_id": '"x"', "roles": '{read = ["a"]}', "scopes": '["openid"]'}
    options[missing] = {"client_id": '""', "roles": "{}", "scopes": "[]"}[missing]
    lines = [f"{name} = {value}" for name, value in options.items()]
    [line] = problems(toml(tmp_path, '[oidc]\nissuer = "https://login.example.com"\n' + "\n".join(lines)))
    assert line.startswith(f"oidc.{missing}: expected")
