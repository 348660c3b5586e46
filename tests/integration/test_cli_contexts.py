"""Contexts: servers that the command line remembers, and the logins by which it reaches them."""

import json
import stat
import subprocess
from collections.abc import Iterator

import pytest

from tests.harness.certificates import issue
from tests.harness.nkeys import Key, credentials
from tests.harness.service import Service
from tests.integration.test_cli import Mediator, alone, environment, external, program, serving

__all__ = ["alone", "external"]

SETTINGS = """
[gateway]
tls_cert = "{folder}/cert.pem"
tls_key = "{folder}/key.pem"
[registry]
enabled = false
[tenants.acme]
users = [{{ name = "ann", password = "right" }}, {{ name = "bea", nkey = "{nkey}" }}]
[tenants.beta]
users = [{{ name = "bob", password = "other" }}]
"""
BEA = Key("user")


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    """A service of two tenants, whose clients log in and encrypt."""
    folder = tmp_path_factory.mktemp("service")
    issue(folder)
    (folder / "m.toml").write_text(SETTINGS.format(folder=folder, nkey=BEA.public))
    (folder / "bea.nk").write_text(BEA.seed + "\n")
    for running in serving(folder, config=folder / "m.toml"):
        running.nats_url = running.nats_url.replace("nats:", "tls:")
        running.folder = folder
        yield running


@pytest.fixture
def mediator(alone, service) -> Mediator:
    """Run a command where three contexts are known, and none is selected."""
    tls = ("--server", service.nats_url, "--tls-ca", service.folder / "authority.pem")
    for name, *login in (
        ("ann", "--user", "ann", "--password", "right"),
        ("bea", "--nkey", service.folder / "bea.nk"),
        ("bob", "--user", "bob", "--password", "other"),
    ):
        assert alone("context", "add", name, *tls, *login).code == 0
    return alone


def test_a_context_gives_server_login_and_authority(mediator):
    assert mediator("mailbox", "create", "of.ann", "--context", "ann").code == 0
    # The same tenant's, by the nkey of another user; and not the other tenant's.
    assert mediator("send", "of.ann", "x", "--context", "bea").out == "sent, msg_id 0\n"
    assert mediator("send", "of.ann", "x", "--context", "bob").err == "mediator: mailbox of.ann does not exist\n"


def test_the_selected_context_is_used_unless_something_is_named(mediator, service, tmp_path, monkeypatch):
    assert mediator("context", "select", "ann").out == "selected ann\n"
    assert mediator("mailbox", "create", "of.selected").code == 0
    assert "no service runs on " in mediator("send", "of.selected", "x", "--data-dir", "none").err
    assert "does not exist" in mediator("send", "of.selected", "x", "--context", "bob").err
    assert "--tls-ca names a file" in mediator("send", "of.selected", "x", "--server", service.nats_url).err
    monkeypatch.setenv("MEDIATOR_CONTEXT", "bob")
    assert "does not exist" in mediator("send", "of.selected", "x").err
    monkeypatch.delenv("MEDIATOR_CONTEXT")
    mediator("context", "select")
    monkeypatch.setattr("mediator.cli.client.DEFAULT_SERVER", "nats://127.0.0.1:1")
    assert "cannot connect to nats://127.0.0.1:1: " in mediator("send", "of.selected", "x").err


def test_options_win_over_a_context(mediator, service, monkeypatch):
    assert mediator("mailbox", "create", "of.options", "--context", "bob").code == 0
    login = ("--user", "bob", "--password", "other")
    assert mediator("send", "of.options", "x", "--context", "bea", *login).out == "sent, msg_id 0\n"
    refused = mediator("send", "of.options", "x", "--context", "bob", "--user", "ann")
    assert "user or password is wrong" in refused.err
    # No login goes to another server than its own.
    result = mediator("send", "of.options", "x", "--context", "bob", "--server", "nats://127.0.0.1:1")
    assert (result.code, "give either --context or --server" in result.err) == (1, True)
    # What is named on the command line wins over the environment.
    monkeypatch.setenv("MEDIATOR_NATS_SERVER", "nats://127.0.0.1:1")
    monkeypatch.setenv("MEDIATOR_NATS_TOKEN", "secret")
    assert mediator("send", "of.options", "x", "--context", "bob").out == "sent, msg_id 1\n"


def test_a_context_is_a_file_for_its_owner_alone(mediator, service, tmp_path):
    folder = tmp_path / "config" / "mediator"
    mediator("context", "select", "ann")
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert json.loads((folder / "contexts" / "ann.json").read_text()) == {
        "server": service.nats_url,
        "user": "ann",
        "password": "right",
        "tls_ca": str(service.folder / "authority.pem"),
    }
    # It may be handed on: a path is a context, too.
    (tmp_path / "handed.json").write_bytes((folder / "contexts" / "ann.json").read_bytes())
    assert mediator("mailbox", "create", "of.file", "--context", "./handed.json").code == 0


def test_no_command_shows_a_secret(mediator, service):
    mediator("context", "add", "url", "--server", "nats://me:hidden@host")
    mediator("context", "add", "token", "--server", "nats://host", "--token", "hidden")
    mediator("context", "select", "ann")
    shown = mediator("context", "show", "--json")
    assert shown.json == {
        "error": "",
        "name": "ann",
        "selected": True,
        "server": service.nats_url,
        "user": "ann",
        "login": "user",
        "tls_ca": str(service.folder / "authority.pem"),
        "file": shown.json["file"],
    }
    listed = mediator("context", "list", "--json")
    logins = {one["name"]: one["login"] for one in listed.json["contexts"]}
    assert logins == {"ann": "user", "bea": "nkey", "bob": "user", "token": "token", "url": "url"}
    rows = [line.split()[:3] for line in mediator("context", "list").out.splitlines()]
    assert ["*", "ann", service.nats_url] in rows
    printed = [shown.out, listed.out, mediator("context", "list").out, mediator("context", "show", "url").out]
    assert not any(secret in text for secret in ("right", "hidden") for text in printed)


def test_a_removed_context_is_selected_no_more(mediator):
    mediator("context", "select", "bob")
    assert mediator("context", "remove", "bob").out == "removed bob\n"
    assert mediator("context", "show").err.startswith("mediator: no context is selected")
    assert mediator("context", "show", "bob").err.startswith("mediator: there is no context bob; known: ann, bea; ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ann",), "context ann exists; remove it first"),
        (("../x",), "expected a context's name of letters"),
        (("new", "--password", "x"), "user: expected the name that the password belongs to"),
        (("new", "--user", "a", "--token", "t"), "token: there is another login, user; give one of"),
        (("new", "--nkey", "not.there"), "not.there: No such file or directory"),
        (("new", "--nkey", "m.txt"), "m.txt does not hold the seed of a user's nkey"),
        (("new", "--creds", "m.txt"), "m.txt is no credentials file, it has no line BEGIN NATS USER JWT"),
        (("new", "--tls-ca", "m.txt"), "tls_ca: cannot use "),
        (("new", "--tls-cert", "m.txt"), "tls_cert: cannot use "),
        (("new", "--tls-key", "m.txt"), "tls_cert: expected the certificate that tls_key belongs to"),
    ],
)
def test_what_cannot_be_used_is_not_remembered(mediator, tmp_path, arguments, said):
    (tmp_path / "m.txt").write_text("words\n")
    result = mediator("context", "add", *arguments, "--server", "nats://host")
    assert result.code in (1, 2)
    assert said in result.err
    assert result.err.count("\n") == 1
    assert mediator("context", "show", "new").code == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("[]", "expected an object whose values are text"),
        ('{"server": 1}', "expected an object whose values are text"),
        ('{"user": "a"}', "server is missing"),
        ('{"server": "nats://host", "pasword": "secret"}', "unknown pasword, expected server, creds"),
    ],
)
def test_a_damaged_context_is_one_line(alone, tmp_path, text, said):
    (tmp_path / "one.json").write_text(text)
    result = alone("send", "a", "x", "--context", "./one.json")
    assert (result.code, said in result.err, "secret" in result.err, result.err.count("\n")) == (1, True, False, 1)


@pytest.mark.parametrize(
    ("login", "said"),
    [
        (("--user", "a", "--password", "b"), "user or password is wrong"),
        (("--token", "b"), "the token is wrong"),
        (("--nkey", "a.nk"), "it does not know this nkey"),
        ((), "it asks for a login"),
    ],
)
def test_each_kind_of_login_is_refused_by_its_name(alone, external, tmp_path, monkeypatch, login, said):
    # A machine under load is no reason to call it something else.
    monkeypatch.setattr("mediator.client.connection.CONNECT_SECONDS", 60.0)
    port = external("authorization { token: right }")
    (tmp_path / "a.nk").write_text(Key("user").seed)
    result = alone("send", "a", "x", "--server", f"nats://127.0.0.1:{port}", *login)
    assert result.code == 1
    assert said in result.err
    if not login:
        result = alone("send", "a", "x", "--server", f"nats://127.0.0.1:{port}", "--token", "right")
        assert "no mediator answers" in result.err


@pytest.mark.parametrize("words", ["context show b", "context select b", "send a x --context b"])
def test_shells_complete_the_names_of_contexts(mediator, tmp_path, words):
    asked = {
        "COMP_WORDS": f"mediator {words}",
        "COMP_CWORD": str(len(words.split())),
        "_MEDIATOR_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        program(), env=environment(XDG_CONFIG_HOME=str(tmp_path / "config"), **asked), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["bea", "bob"]


UNLIMITED = {"limits": {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}}
USER = {"pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}


def test_service_and_commands_log_in_with_credentials(alone, external, tmp_path):
    operator, system, account, stranger = Key("operator"), Key("account"), Key("account"), Key("account")
    port = external(
        f"operator: {operator.vouch(operator, 'op')}\nsystem_account: {system.public}\nresolver: MEMORY\n"
        f"resolver_preload {{ {system.public}: {operator.vouch(system, 'sys', **UNLIMITED)}\n"
        f"{account.public}: {operator.vouch(account, 'acme', **UNLIMITED)} }}"
    )
    for name, signer in (("service", account), ("ann", account), ("mallory", stranger)):
        user = Key("user")
        (tmp_path / f"{name}.creds").write_text(credentials(signer.vouch(user, name, **USER), user))
    url = f"nats://127.0.0.1:{port}"
    (tmp_path / "m.toml").write_text(f'nats_creds = "{tmp_path}/service.creds"\n[registry]\nenabled = false\n')
    for _ in serving(tmp_path / "service", nats_url=url, config=tmp_path / "m.toml"):
        assert alone("context", "add", "ann", "--server", url, "--creds", "ann.creds").code == 0
        assert alone("mailbox", "create", "of.ann", "--context", "ann").code == 0
        assert alone("send", "of.ann", "x", "--server", url, "--creds", "ann.creds").out == "sent, msg_id 0\n"
        refused = alone("send", "of.ann", "x", "--server", url, "--creds", "mallory.creds")
        assert "it does not accept these credentials; give --creds" in refused.err
        settings = ("--config", "m.toml")
        (tmp_path / "m.toml").write_text(f'nats_url = "{url}"\nnats_creds = "{tmp_path}/service.creds"\n')
        checked = alone("check", *settings, "--creds", "ann.creds")
        assert checked.code == 0, checked.err
        assert "verified   requests on $mq9.AI.> arrive" in checked.out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('nats_creds = "a.creds"', "nats_creds: expected only with nats_url"),
        ('nats_url = "nats://u:p@host"\nnats_creds = "a.creds"', "nats_creds: nats_url has another login"),
        ('nats_url = "nats://127.0.0.1:1"\nnats_creds = "a.creds"', "creds: cannot read a.creds"),
    ],
)
def test_credentials_of_the_service_that_cannot_be_used(alone, tmp_path, settings, said):
    (tmp_path / "m.toml").write_text(settings)
    result = alone("check", "--config", "m.toml")
    assert (result.code, said in result.err) == (2, True)
