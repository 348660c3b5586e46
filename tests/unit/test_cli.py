"""The command line without a service: rendering, help, what it imports, and the file it writes to start from."""

import base64
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mediator import __version__
from mediator.cli import COMMANDS, GROUPS, WELCOME, build_app, output
from mediator.cli.configuration import template
from mediator.cli.messages import own_headers
from mediator.cli.options import CommandGroup
from mediator.login import Login
from mediator.parts import find_parts, installed_settings
from mediator.settings.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
HEAVY = ("nats", "pydantic_settings", "aiohttp", "apscheduler", "peewee", "prometheus_client", "uvloop", "structlog")
HEAVY += ("pyspark", "py4j", "pyarrow", "deltalake", "duckdb", "pandas")
OF_NO_CLIENT = {*HEAVY, "numpy", "onnxruntime", "mediator.mailboxes.sending", "mediator.operate.records", "pickup.part"}
OF_NO_CLIENT = (OF_NO_CLIENT | {"pipeline.part", "registry.part"}) - {"nats"}
RARE = ("authlib.oidc", "deltalake", "joserfc", "markdown_it", "onnxruntime", "opentelemetry", "pyspark", "torch")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch, tmp_path):
    for name in ("MEDIATOR_NATS_SERVER", "MEDIATOR_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


# Payloads.


def test_a_payload_that_is_text_is_shown_whole():
    assert output.payload_text("grüße\n\tzwei".encode()) == "grüße\n\tzwei"
    assert output.payload_text(b"x" * 100_000) == "x" * 100_000


def test_a_payload_cannot_take_over_the_terminal():
    shown = output.payload_text("a\x1b[31mb\rc\x07\x9b\u202ed".encode())
    assert shown == "a\\x1b[31mb\\x0dc\\x07\\x9b\\u202ed"


def test_binary_payload_is_shown_in_hexadecimal():
    assert output.payload_text(b"\xff\x00") == "0xff00 (2 bytes)"
    assert output.payload_text(b"\xff" * 100) == f"0x{'ff' * 24}… (100 bytes)"


def test_the_beginning_of_a_payload_may_end_inside_a_character():
    whole = "äöü" * 10
    assert output.payload_text(whole.encode()[:7], 60) == "äöü… (60 bytes)"
    assert output.payload_text(whole.encode()[:1], 1) == "0xc3 (1 byte)"


def test_markup_in_a_message_is_text(capsys):
    output.print_table(("payload",), [("[bold]x[/bold] [/wrong] :smile:",)])
    assert "[bold]x[/bold] [/wrong] :smile:" in capsys.readouterr().out


def test_a_message_shows_all_that_is_set():
    row = output.message_row(
        {
            "msg_id": 7,
            "payload": base64.b64encode(b"hello").decode(),
            "priority": "urgent",
            "create_time": 1_769_860_800,
            "key": "k",
            "tags": ["a", "b"],
            "headers": {"X": "y", "mq9-reply-to": "me"},
            "expire_at": 1_769_860_801,
            "dedup_id": "d",
            "reply_to": "me",
            "sent_time": 1_769_860_799,
            "deliveries": 2,
        }
    )
    assert row[:3] == ("7", "urgent", "2026-01-31 12:00:00Z")
    assert row[3].split("\n") == [
        "key k",
        "tags a,b",
        "expires 2026-01-31 12:00:01Z",
        "sent 2026-01-31 11:59:59Z",
        "dedup id d",
        "reply to me",
        "delivery 2",
        "X: y",
    ]
    assert row[4] == "hello"


# Options.


def test_headers_are_split_at_the_first_colon():
    assert own_headers(["A:b:c", " B : d "]) == {"A": "b:c", "B": "d"}


@pytest.mark.parametrize("wrong", ["A", ":b", " :b"])
def test_what_is_no_header_is_refused(wrong):
    with pytest.raises(typer.BadParameter, match="expected NAME:VALUE"):
        own_headers([wrong])


def test_no_error_shows_a_login():
    assert Login("nats://u:secret@host:1,nats://v:other@two").shown == "nats://host:1,nats://two"


# Help.


def test_version_is_printed_from_the_package():
    assert CliRunner().invoke(build_app(), ["--version"]).output == f"mediator {__version__}\n"


def test_shells_complete_commands_of_core_and_parts():
    environment = os.environ | {"_MEDIATOR_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    for begun, completed in (("mailb", "mailbox"), ("inv", "invite\ninvitations"), ("--ver", "--version")):
        words = environment | {"COMP_WORDS": f"mediator {begun}"}
        done = subprocess.run(
            [sys.executable, "-m", "mediator"], env=words, capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == completed


def test_alone_it_says_where_to_begin():
    said = CliRunner().invoke(build_app(), [])
    assert (said.exit_code, said.output) == (0, f"{WELCOME}\n")
    known = {path for path, _ in commands(build_app())}
    named = [line.split("  ")[1] for line in WELCOME.splitlines() if line.startswith("  mediator ")]
    for command in named:
        assert "-" in command or "COMMAND" in command or any(command.startswith(path) for path in known), command
    assert max(map(len, WELCOME.splitlines())) <= 100


def commands(group, path="mediator"):
    for command in group.registered_commands:
        yield f"{path} {command.name or command.callback.__name__}", command
    for inner in group.registered_groups:
        yield from commands(inner.typer_instance, f"{path} {inner.name}" if isinstance(inner.name, str) else path)


def test_every_command_has_help_and_an_example_of_itself():
    for path, command in commands(build_app()):
        assert command.callback.__doc__, path
        assert command.epilog.startswith(f"Example: {path}"), path


def test_the_page_of_commands_is_up_to_date_and_whole():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert page == module.commands(), "run: python docs/generate.py"
    for path, _ in commands(build_app()):
        assert f"## {path}\n" in page


def test_nothing_heavy_is_imported_before_a_command_runs():
    script = (
        f"import sys, mediator.cli as cli; cli.build_app(); print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["--version"], {"asyncio", "mediator.errors", "typer"}),
        ([], {"asyncio", "mediator.errors", "typer"}),
        (["send", "--help"], OF_NO_CLIENT | {"nats"}),
        (["send", "a", "x", "--server", "nats://127.0.0.1:1"], OF_NO_CLIENT),
        (["fetch", "a", "--server", "nats://127.0.0.1:1"], OF_NO_CLIENT),
        (["mailbox", "create", "--server", "nats://127.0.0.1:1"], OF_NO_CLIENT - {"mediator.operate.records"}),
    ],
)
def test_a_command_imports_only_what_it_needs(words, unwanted):
    script = f"""
import sys, mediator.cli as cli
sys.argv[1:] = {words!r}
try:
    cli.main()
except SystemExit:
    pass
print([name for name in {sorted(unwanted)!r} if name in sys.modules])
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MEDIATOR_")}
    done = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Traceback" not in done.stderr


def test_each_command_is_found_by_its_word_alone():
    whole = {path for path, _ in commands(build_app())}
    found = {path for part in find_parts() for path, _ in commands(brought_by(part))}
    for word in [*" ".join(COMMANDS.values()).split(), *GROUPS.values()]:
        loaded = {path for path, _ in commands(build_app(word))}
        assert loaded < whole
        own = {path for path in loaded if path.split()[1] == word}
        assert own
        found |= own
    assert found == whole


def brought_by(part):
    app = CommandGroup()
    part.add_commands(app)
    return app


def test_a_service_imports_nothing_that_few_services_need():
    script = (
        "import sys, mediator.app, pickup.door, registry.service;"
        f"print([name for name in {RARE!r} if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


# The file to start from.


def test_the_template_changes_nothing_and_names_every_option():
    text = template()
    assert tomllib.loads(text) == {}
    for name, field in Settings.model_fields.items():
        assert f"# {name} = " in text or f"# [{name}]" in text or f"# [{name}." in text, name
        model = field.annotation
        for inner in getattr(model, "model_fields", {}):
            assert f"# {inner} = " in text, inner


def test_what_the_template_gives_as_defaults_are_the_defaults(tmp_path):
    examples = ("data_dir", "nats_url", "nats_creds", "database_url", "log_format", "instance", "tenants", "users")
    examples += ("public_url", "allow", "key", "outbound_networks", "push_webhook", "terms", "archive_key_file")
    examples += ("control_key", "http_trusted_proxies", "listen", "direct", "tls_cert", "tls_key", "tls_client_ca")
    examples += ("nats_nkey", "nats_ca", "nats_cert", "nats_key", "memory_tenants", "memory_signs", "backup_dir")
    examples += ("embeddings_url", "embeddings_key", "rerank_url", "rerank_key", "cors_origins", "copies", "networks")
    examples += ("tokens", "issuer", "client_id", "client_secret", "roles", "endpoint", "sample_ratio", "models")
    examples += ("lake", "storage")
    lines = []
    for line in template().splitlines():
        bare = line.removeprefix("# ")
        if bare.startswith("[tenants"):
            break
        known = " = " in bare and bare.split(" = ")[0].replace("_", "").isalnum()
        if bare.startswith("[") or (known and bare.split(" = ")[0] not in examples):
            lines.append(bare)
    path = tmp_path / "mediator.toml"
    path.write_text("\n".join(lines))
    assert installed_settings().load(path) == installed_settings().load()
    assert len(lines) > 20
