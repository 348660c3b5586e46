"""What a newcomer runs into: which service a command speaks to, and what it says when something is wrong."""

import inspect
import json
import socket
from collections.abc import Iterator

import pytest

from mediator.cli import build_app
from mediator.cli.options import AsJson
from tests.harness.certificates import issue
from tests.harness.service import Service, free_port
from tests.integration.test_cli import alone, external, mediator, run, service, serving
from tests.unit.test_cli import commands

__all__ = ["alone", "external", "mediator", "service"]

GUARDED = """
log_level = "debug"
[gateway]
tls_cert = "{folder}/cert.pem"
tls_key = "{folder}/key.pem"
[registry]
enabled = false
[tenants.acme]
users = [{{ name = "ann", password = "right" }}]
[tenants.beta]
users = [{{ name = "bob", password = "right" }}]
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of two tenants, whose clients log in and encrypt."""
    folder = tmp_path_factory.mktemp("guarded")
    issue(folder, "mail.example.com")
    (folder / "m.toml").write_text(GUARDED.format(folder=folder))
    for encrypted in serving(folder, config=folder / "m.toml"):
        encrypted.nats_url = encrypted.nats_url.replace("nats:", "tls:")
        yield encrypted


# Which service a command speaks to.


def test_a_command_speaks_to_the_service_of_its_data_directory(alone, service, guarded, tmp_path):
    assert alone("mailbox", "create", "mine", "--data-dir", service.data_dir).code == 0
    (tmp_path / "m.toml").write_text(f'data_dir = "{service.data_dir}"\n')
    assert alone("send", "mine", "x", "--config", "m.toml").out == "sent, msg_id 0\n"
    shown = alone("query", "mine", "--data-dir", guarded.data_dir, "--user", "ann", "--password", "right")
    assert shown.err == "mediator: mailbox mine does not exist\n"


def test_a_command_finds_the_default_server_from_any_folder(alone, service, tmp_path, monkeypatch):
    monkeypatch.setattr("mediator.cli.client.DEFAULT_SERVER", service.nats_url)
    assert alone("mailbox", "create", "anywhere").code == 0
    assert alone("send", "anywhere", "hello").out == "sent, msg_id 0\n"
    assert "hello" in alone("fetch", "anywhere", "--deliver", "earliest").out
    assert not (tmp_path / "mediator-data").exists()


def test_the_data_directory_at_hand_comes_before_the_default(alone, service, tmp_path, monkeypatch):
    monkeypatch.setattr("mediator.cli.client.DEFAULT_SERVER", f"nats://127.0.0.1:{free_port()}")
    (tmp_path / "mediator-data").symlink_to(service.data_dir)
    assert alone("mailbox", "create").code == 0


def test_a_command_asks_no_server_instead_of_its_service(alone, external, tmp_path, monkeypatch):
    # Somebody else's server stands where this service would listen.
    url = f"nats://127.0.0.1:{external('')}"
    monkeypatch.setattr("mediator.cli.client.DEFAULT_SERVER", url)
    (tmp_path / "mediator-data").mkdir()
    for arguments, start in (
        ((), "mediator serve"),
        (("--data-dir", "other place"), "mediator serve --data-dir 'other place'"),
    ):
        result = alone("send", "a", "secret", *arguments)
        assert result.code == 1
        assert f"no service runs on {tmp_path}/" in result.err
        assert f"; start `{start}`, or " in result.err
    # One that was named is asked, and one that the settings name.
    assert alone("send", "a", "x", "--server", url).err == f"mediator: no mediator answers on {url}\n"
    monkeypatch.setenv("MEDIATOR_NATS_URL", url)
    assert alone("send", "a", "x").err == f"mediator: no mediator answers on {url}\n"


@pytest.mark.parametrize("lost", ["removed", "damaged", "without a server", "of the environment"])
def test_no_login_of_a_context_goes_to_the_default_server(alone, tmp_path, monkeypatch, lost):
    assert alone("context", "add", "ann", "--server", "nats://host", "--user", "ann", "--password", "right").code == 0
    assert alone("context", "select", "ann").code == 0
    file = tmp_path / "config" / "mediator" / "contexts" / "ann.json"
    match lost:
        case "removed":
            file.unlink()
        case "damaged":
            file.write_text("{")
        case "without a server":
            file.write_text('{"user": "ann", "password": "right"}')
        case _:
            monkeypatch.setenv("MEDIATOR_CONTEXT", "bob")
    with socket.create_server(("127.0.0.1", 0)) as default:
        default.setblocking(False)
        monkeypatch.setattr("mediator.cli.client.DEFAULT_SERVER", f"nats://127.0.0.1:{default.getsockname()[1]}")
        result = alone("send", "a", "x")
        assert (result.code, "context" in result.err, "right" in result.err) == (1, True, False)
        with pytest.raises(BlockingIOError):
            default.accept()


def test_commands_trust_the_certificate_of_their_service(guarded):
    result = run("mailbox", "create", "--data-dir", guarded.data_dir, "--user", "ann", "--password", "right")
    assert (result.code, result.err) == (0, "")


# What is wrong is said.


@pytest.mark.parametrize(
    ("login", "said"),
    [
        (("--user", "ann", "--password", "wrong"), "user or password is wrong; give --user and --password"),
        (("--user", "nobody", "--password", "right"), "user or password is wrong; give --user and --password"),
        ((), "it asks for a login; give --user and --password, --token, --nkey or --creds"),
    ],
)
def test_a_refused_login_is_called_so(alone, guarded, login, said):
    result = alone("send", "a", "x", "--data-dir", guarded.data_dir, *login)
    assert result.code == 1
    assert result.err == f"mediator: cannot connect to {guarded.nats_url}: {said}\n"


def test_a_server_that_cannot_be_used_is_called_so(alone, guarded, service, monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for server, said in (
            (
                guarded.nats_url,
                "its certificate is not trusted (unable to get local issuer certificate); --tls-ca",
            ),
            (f"nats://127.0.0.1:{service.http_port}", "no NATS server answers there within "),
            (f"nats://127.0.0.1:{silent.getsockname()[1]}", "no NATS server answers there within "),
            ("nats://nowhere.invalid:4222", "no such host"),
            (service.nats_url.replace("nats:", "tls:"), "the server does not encrypt, but the URL begins with tls://"),
        ):
            # Time to find out, but where nothing is to be found out.
            seconds = 0.5 if "answers there" in said else 60.0
            monkeypatch.setattr("mediator.client.connection.CONNECT_SECONDS", seconds)
            result = alone("send", "a", "x", "--server", server)
            assert result.code == 1
            assert result.err.startswith(f"mediator: cannot connect to {server}: {said}")
            assert "mediator serve" not in result.err


ARGUMENTS = {
    "serve": "--nats 127.0.0.1:0 --http 127.0.0.1:0",
    "send": "a x",
    "fetch": "a",
    "ack": "a 1 --group g",
    "nack": "a 1 --group g",
    "extend": "a 1 --group g --ack-wait 5s",
    "query": "a",
    "delete": "a 1",
    "mailbox show": "a",
    "mailbox set": "a --ack-wait 5s",
    "mailbox delete": "a --yes",
    "mailbox move": "a b 1",
    "mailbox copy": "a b 1",
    "mailbox leases": "a --group g",
    "mailbox release": "a --group g",
    "mailbox drop-group": "a --group g --yes",
    "mailbox purge": "a --yes",
    "dead list": "a --group g",
    "dead redrive": "a --group g",
    "dead resend": "a 1 --group g",
    "dead drop": "a --group g",
    "agent register": "-",
    "agent report": "a",
    "agent unregister": "a",
    "agent discover": "words",
    "agent import": "cards.json",
    "connections show": "1",
    "connections remove": "1 --yes",
    "invitations remove": "x",
    "keys attach": "k a",
    "keys detach": "k",
    "backup": "there",
    "migrate-to": "postgresql://localhost/x",
    "forget": "a --yes",
    "tenant add": "acme",
    "tenant set": "acme --quota-mailboxes 1",
    "tenant rotate": "acme",
    "tenant remove": "acme --yes",
    "tenant user add": "acme ann",
    "tenant user remove": "acme ann",
    "tenant token add": "acme t",
    "tenant token remove": "acme t",
    "copy add": "all a",
    "copy remove": "all",
    "didcomm allow add": "127.0.0.1",
    "didcomm allow remove": "127.0.0.1",
    "didcomm deny add": "127.0.0.1",
    "didcomm deny remove": "127.0.0.1",
}
"""What a command needs beside its data directory."""
APART = ("agent eval", "mcp", "restore", "pipeline ")
"""The first makes nothing there, the second looks for the service when a tool is used, the third reads its backup
before, the others look at their lake."""


def with_data_dir() -> list[str]:
    """The commands that have a data directory."""
    paths = [
        path.removeprefix("mediator ")
        for path, command in commands(build_app())
        if "data_dir" in inspect.signature(command.callback).parameters
    ]
    return [path for path in paths if not path.startswith(APART)]


@pytest.mark.parametrize("command", with_data_dir())
def test_a_data_directory_that_cannot_be_is_one_line(alone, tmp_path, command):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below", "/proc/nothing"):
        result = alone(*command.split(), *ARGUMENTS.get(command, "").split(), "--data-dir", place)
        assert result.code != 0
        assert str(tmp_path / place) in result.out + result.err
        assert "Traceback" not in result.err


@pytest.mark.parametrize("command", ["serve", "migrate"])
def test_what_makes_a_data_directory_says_why_it_cannot(alone, tmp_path, command):
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o644)
    mode = (tmp_path / "file").stat().st_mode
    for place, why in (("file", "there is a file of this name"), ("file/below", "Not a directory")):
        said = (
            f"mediator: data_dir: cannot write to {tmp_path / place}: {why}; choose another directory with --data-dir"
        )
        result = alone(command, "--data-dir", place)
        assert (result.code, said in result.err) == (2, True)
        # A file that was named by mistake is nobody's to change.
        assert (tmp_path / "file").stat().st_mode == mode
    # There, but not to be written to, by the superuser either.
    assert "cannot write to /proc/self: " in alone(command, "--data-dir", "/proc/self").err


def test_a_file_that_cannot_be_written_is_one_line(alone, tmp_path):
    (tmp_path / "file").write_text("")
    result = alone("init", "file/m.toml")
    assert (result.code, result.err) == (1, "mediator: cannot write file/m.toml: Not a directory\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("send", "a", "x", "--priority", "hgih"), 'urgent, normal or low, got "hgih"; did you mean high?'),
        (("fetch", "a", "--deliver", "earlist"), 'expected latest or earliest, got "earlist"; did you mean earliest?'),
        (("mailbox", "create", "--retention", "until"), "did you mean until_ack?"),
        (("agent", "list", "--state", "alve"), 'expected alive, stale or gone, got "alve"; did you mean alive?'),
        (("agent", "eval", "a", "b", "--mode", "words"), 'expected text, semantic, reranked or vectors, got "words"'),
    ],
)
def test_a_misspelt_word_is_told_the_nearest_one(alone, monkeypatch, arguments, said):
    result = alone(*arguments)
    assert result.code == 2
    assert said in " ".join(result.err.replace("│", " ").split())


@pytest.mark.rule("S1", "N3")
def test_service_suggests_the_nearest_priority(mediator):
    mediator("mailbox", "create", "spelling")
    result = mediator("send", "spelling", "x", "--header", "mq9-priority:hgih")
    assert result.err.endswith('low, got "hgih"; did you mean high?\n')


def test_import_gives_advice_only_where_it_helps(mediator, tmp_path):
    (tmp_path / "card.json").write_text('{"description": "Has neither mailbox nor name."}')
    assert "--mailbox-prefix" in mediator("agent", "import", "card.json").err
    (tmp_path / "card.json").write_text('{"name": "Nobody", "mailbox": "Not an address"}')
    result = mediator("agent", "import", "card.json", "--mailbox-prefix", "catalog")
    assert ": mailbox: " in result.err
    assert "--mailbox-prefix" not in result.err
    (tmp_path / "card.json").write_text('{"name": "One", "description": "Is alone.", "mailbox": "shop.one"}')
    assert mediator("agent", "import", "card.json").out == "registered 1 card\n"


# What the operator sees.


def test_list_shows_the_mailboxes_of_every_tenant(alone, guarded, monkeypatch):
    at = ("--data-dir", guarded.data_dir)
    for user in ("ann", "bob"):
        for name in ("list.one", "list.two"):
            alone("mailbox", "create", name, *at, "--user", user, "--password", "right")

    def listed(*arguments: str) -> list[tuple[str, str]]:
        rows = alone("mailbox", "list", "--prefix", "list.", *at, *arguments, "--json").json["mailboxes"]
        return [(row["tenant"], row["mail_address"]) for row in rows]

    everything = [(tenant, name) for tenant in ("acme", "beta") for name in ("list.one", "list.two")]
    assert listed() == everything
    assert listed("--tenant", "beta") == everything[2:]
    assert listed("--limit", "3") == everything[:3]
    monkeypatch.setattr("mediator.cli.mailboxes.PAGE", 1)
    assert listed() == everything
    table = alone("mailbox", "list", "--prefix", "list.", *at).out
    assert [line.split()[:2] for line in table.splitlines() if "list." in line] == [[b, a] for a, b in everything]


@pytest.mark.rule("A7")
def test_debug_logs_each_request_and_no_secret(alone, guarded):
    login = ("--data-dir", guarded.data_dir, "--user", "ann", "--password", "right")
    address = alone("mailbox", "create", "--json", *login).json["mail_address"]
    alone("send", address, "the payload", *login)
    alone("send", "nobody", "x", *login)
    guarded.get_blocking("/livez")
    lines = guarded.events("request")
    told = {(line.get("verb"), line.get("tenant"), line["result"]) for line in lines}
    assert {("CREATE", "acme", "ok"), ("SEND", "acme", "ok"), ("SEND", "acme", "mailbox_not_found")} <= told
    assert ("/livez", 200) in {(line.get("route"), line["result"]) for line in lines}
    assert all(0 <= line["ms"] < 60_000 for line in lines)
    everything = json.dumps(guarded.events())
    assert address not in everything
    assert "the payload" not in everything


# --json.

WITHOUT_JSON = {"serve": "runs on", "mcp": "runs on"}


def test_each_command_has_the_same_json_option_last():
    for path, command in commands(build_app()):
        name = path.removeprefix("mediator ")
        *_, (last, parameter) = inspect.signature(command.callback).parameters.items()
        if name in WITHOUT_JSON:
            assert last != "as_json"
        else:
            assert (last, parameter.annotation, parameter.default) == ("as_json", AsJson, False), name


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("mailbox create", {"mail_address", "token"}),
        ("mailbox list", {"mailboxes", "more"}),
        ("mailbox show json.box", {"tenant", "groups"}),
        ("send json.box text", {"msg_id"}),
        ("query json.box", {"messages"}),
        ("fetch json.box --group g --deliver earliest", {"messages"}),
        ("ack json.box 0 --group g", {"acknowledged"}),
        ("dead list json.box --group g", {"messages"}),
        ("agent list", {"agents", "states", "total"}),
        ("status", {"nats", "ready"}),
        ("doctor json.box", {"findings"}),
        ("cleanup", {"removed"}),
        ("cleanup --dry-run", {"findings"}),
        ("cleanup --confirm-clock", {"ahead_seconds"}),
        ("try", {"steps"}),
        ("connections list", {"connections", "total"}),
        ("invite", {"v1_url"}),
    ],
)
def test_json_is_one_object_with_an_empty_error(mediator, command, fields):
    mediator("mailbox", "create", "json.box", "--public")
    result = mediator(*command.split(), "--json")
    assert (result.code, result.out.count("\n"), result.json["error"]) == (0, 1, ""), result.err
    assert fields <= set(result.json)


def test_json_without_a_service(alone, tmp_path):
    assert alone("check", "--json").json["settings"]["tenants"] == "everybody is default"
    assert "MQ9" in alone("check", "--snippet", "--json").json["snippet"]
    assert alone("migrate", "--data-dir", "d", "--json").json["applied"][0].startswith("0001_")
    assert alone("migrate", "--data-dir", "d", "--json").json == {"error": "", "applied": []}


def test_json_of_a_failure_is_one_object_with_the_error(alone, mediator):
    gone = "mailbox nobody does not exist"
    result = mediator("send", "nobody", "text", "--json")
    assert (result.code, result.err) == (1, f"mediator: {gone}\n")
    assert result.json == {"error": gone, "error_code": "mailbox_not_found", "msg_id": -1}
    assert mediator("mailbox", "show", "nobody", "--json").json == {"error": gone}
    assert mediator("agent", "import", "none.json", "--json").json["refused"] == 1
    (code, error) = alone("migrate", "--data-dir", "/proc/none", "--json").json.popitem()
    assert (code, error) == ("error_code", "setup")
    assert alone("status", "--data-dir", "none", "--json").json["error"].startswith("no service runs on ")


def test_json_pages_are_joined(mediator, monkeypatch):
    for number in range(3):
        card = {"name": f"N{number}", "mailbox": f"json.n{number}"}
        mediator("agent", "register", "-", stdin=json.dumps(card).encode())
    monkeypatch.setattr("registry.cli.agents.PAGE", 2)
    found = mediator("agent", "list", "--json").json
    assert len(found["agents"]) == len(found["states"]) == found["total"] >= 3
