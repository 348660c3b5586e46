"""The commands against a running `mediator serve`: what they do, what they print, and their exit codes.

Commands run inside this process, which is quicker; those that set up logging or must be interrupted run in their own.
"""

import asyncio
import base64
import contextlib
import io
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mediator.cli import main
from mediator.journal.segments import GAPS
from mediator.nats.server import find_binary
from tests.harness.service import Service, free_port
from tests.harness.waiting import block_until

WITHIN = 40.0


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MEDIATOR_")} | more


def program(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mediator", *map(str, arguments)]


def serving(folder: Path, **options: object) -> Iterator[Service]:
    """Run a service, and hold that it ends well."""
    service = Service("service", folder, **options)
    service.start()
    try:
        asyncio.run(service.ready())
        yield service
        service.terminate()
        assert asyncio.run(service.ended()) == 0
    finally:
        service.discard()


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Mediator = Callable[..., Result]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    yield from serving(tmp_path_factory.mktemp("service"))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mediator:
    """Run a command that finds nothing but the defaults; ``stdin`` is what it may read."""
    for name in os.environ:
        if name.startswith("MEDIATOR_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "400")

    def run(*arguments: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["mediator", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        assert isinstance(code, int)
        return Result(code, said.out, said.err)

    return run


@pytest.fixture
def mediator(alone: Mediator, service: Service, monkeypatch: pytest.MonkeyPatch) -> Mediator:
    """Run a command that finds the service."""
    monkeypatch.setenv("MEDIATOR_DATA_DIR", str(service.data_dir))
    return alone


@pytest.fixture
def box(mediator: Mediator) -> str:
    """A mailbox of the test's own."""
    address = mediator("mailbox", "create", "--json").json["mail_address"]
    assert isinstance(address, str)
    return address


def payloads(result: Result) -> list[bytes]:
    return [base64.b64decode(message["payload"]) for message in result.json["messages"]]


# Creating and sending.


def test_create_prints_address_and_token(mediator):
    result = mediator(
        *("mailbox", "create", "cli.created", "--ttl", "2h", "--desc", "words", "--tag", "a", "--tag", "b"),
        *("--public", "--retention", "until_ack", "--archive", "--ack-wait", "90s"),
    )
    assert result.code == 0
    view = mediator("mailbox", "show", "cli.created", "--json").json
    assert result.out.startswith(f"created cli.created\nsend    {view['send_address']}  (")
    assert "\ntoken   " in result.out
    assert (view["desc"], view["tags"], view["public"], view["archive"]) == ("words", ["a", "b"], True, True)
    assert (view["retention"], view["ack_wait_ms"]) == ("until_ack", 90_000)
    assert view["expire_at"] - view["created_at"] == 7200


def test_taken_address_is_refused_in_the_service_s_words(mediator, box):
    result = mediator("mailbox", "create", box)
    assert (result.code, result.out, result.err) == (1, "", f"mediator: mailbox {box} already exists\n")


def test_with_json_a_refusal_prints_the_reply_as_well(mediator, box):
    result = mediator("mailbox", "create", box, "--json")
    assert result.code == 1
    assert result.json["error"] == f"mailbox {box} already exists"
    assert result.json["created"] is False


def test_create_again_with_public_is_no_error(mediator, box):
    result = mediator("mailbox", "create", box, "--public")
    assert (result.code, result.out) == (0, f"{box} was there already\n")


def test_send_says_the_msg_id(mediator, box):
    assert mediator("send", box, "one").out == "sent, msg_id 0\n"
    assert mediator("send", box, "two", "--json").json == {"error": "", "msg_id": 1}


def test_a_payload_from_standard_input_and_from_a_file(mediator, box, tmp_path):
    binary = bytes(range(256))
    (tmp_path / "payload").write_bytes(binary)
    mediator("send", box, "-", stdin=b"from\nstdin\xff")
    mediator("send", box, "--file", tmp_path / "payload")
    mediator("send", box, "")
    assert payloads(mediator("query", box, "--json")) == [b"from\nstdin\xff", binary, b""]


def test_everything_that_can_be_said_with_a_message(mediator, box):
    before = int(time.time())
    result = mediator(
        *("send", box, "x", "--priority", "high", "--key", "k", "--tag", "a", "--tag", "b", "--dedup-id", "d"),
        *("--reply-to", "me", "--header", "X-Own: value: 1", "--ttl", "1h", "--expire-at", "2h", "--archive"),
    )
    assert result.code == 0
    (message,) = mediator("query", box, "--json").json["messages"]
    assert 3600 <= message.pop("expire_at") - before <= 3660
    assert message.pop("create_time") >= before
    assert message == {
        "msg_id": 0,
        "payload": "eA==",
        "priority": "critical",
        "key": "k",
        "tags": ["a", "b"],
        "dedup_id": "d",
        "reply_to": "me",
        "headers": {"X-Own": "value: 1", "mq9-reply-to": "me"},
    }
    assert mediator("send", box, "y", "--dedup-id", "d").out == "sent, msg_id 0\n"


@pytest.mark.rule("S4")
@pytest.mark.parametrize("when", [("--delay", "1h"), ("--send-at", "1h")])
def test_delayed_mail_has_no_number_yet(mediator, box, when):
    assert mediator("send", box, "later", *when).out.startswith("stored, msg_id -1")
    view = mediator("mailbox", "show", box, "--json").json
    assert view["delayed"]["messages"] == 1
    assert 3500 < view["delayed"]["next_due_at"] - time.time() <= 3600


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("x", "--delay", "soon"), "expected a span such as"),
        (("x", "--ttl", "500ms"), "expected whole seconds"),
        (("x", "--send-at", "noon"), "expected a span such as 2h, a date"),
        (("x", "--priority", "loud"), "loud"),
        (("x", "--header", "no colon"), "expected NAME:VALUE"),
        (("x", "--file", "y"), "expected TEXT, or -"),
        ((), "expected TEXT, or -"),
    ],
)
def test_wrong_usage_is_exit_code_2(mediator, box, arguments, said):
    result = mediator("send", box, *arguments)
    assert (result.code, result.out) == (2, "")
    assert said in " ".join(result.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("address", "arguments", "said"),
    [
        ("not.there", ("x",), "mailbox not.there does not exist"),
        ("Not-One", ("x",), "mail_address: expected lowercase letters and digits"),
        ("not.there", ("x", "--delay", "1s", "--send-at", "2h"), "mq9-delay"),
        ("not.there", ("x", "--expire-at", "2020-01-01T00:00Z"), "mq9-expire-at"),
        ("not.there", ("x", "--header", "A: one\ntwo"), "A: expected no control characters"),
        ("not.there", ("x", "--header", "a b: c"), "invalid header"),
        ("not.there", ("--file", "/not/there"), "cannot read /not/there: No such file"),
    ],
)
def test_what_was_not_done_is_exit_code_1_with_the_reason(mediator, address, arguments, said):
    result = mediator("send", address, *arguments)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("mediator: ")
    assert said in result.err
    assert result.err.count("\n") == 1


@pytest.mark.rule("N7")
def test_a_message_above_the_limit_is_refused(mediator, box, tmp_path):
    (tmp_path / "large").write_bytes(bytes((10 << 20) + 1))
    result = mediator("send", box, "--file", tmp_path / "large")
    assert (result.code, "message_too_large" in result.err) == (1, True)
    (tmp_path / "larger").write_bytes(bytes(20 << 20))
    result = mediator("send", box, "--file", tmp_path / "larger")
    assert (result.code, "this NATS server takes at most" in result.err) == (1, True)


# Fetching and settling.


@pytest.mark.rule("F1", "F3")
def test_fetch_shows_a_table_in_the_order_of_delivery(mediator, box):
    mediator("send", box, "plain")
    mediator("send", box, "--file", "/dev/stdin", "--priority", "critical", stdin=b"")
    mediator("send", box, "[bold]red[/bold]", "--priority", "critical")
    result = mediator("fetch", box, "--deliver", "earliest")
    rows = [line.split() for line in result.out.splitlines() if line.strip()]
    assert rows[0] == ["id", "priority", "created", "details", "payload"]
    assert [row[0] for row in rows[2:]] == ["1", "2", "0"]
    assert rows[3][-1] == "[bold]red[/bold]"
    assert rows[4][-1] == "plain"


def test_fetch_raw_writes_payloads_and_nothing_else(mediator, box):
    for payload in ("one", "two\n", '{"a": 1}'):
        mediator("send", box, payload)
    fetch = ("fetch", box, "--group", "g", "--deliver", "earliest", "--wait", "0", "--ack", "--raw")
    assert mediator(*fetch).out == 'one\ntwo\n{"a": 1}\n'
    assert mediator(*fetch).out == ""
    assert "one of --raw and --json" in mediator(*fetch, "--json").err


def test_an_empty_fetch_says_why_it_may_be(mediator, box):
    mediator("send", box, "before")
    result = mediator("fetch", box, "--wait", "0")
    assert (result.code, result.out) == (0, "no messages\n")
    assert "--deliver earliest" in result.err


@pytest.mark.rule("F1")
def test_a_character_that_the_terminal_lacks_is_shown_by_number(mediator, box, monkeypatch):
    mediator("send", box, "Füße 日")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="latin-1", write_through=True))
    assert mediator("query", box).code == 0
    assert "Füße \\u65e5" in printed.getvalue().decode("latin-1")


def test_where_a_fetch_begins(mediator, box):
    for text in ("a", "b", "c"):
        mediator("send", box, text)

    def fetch(*arguments):
        return payloads(mediator("fetch", box, "--wait", "0", "--json", *arguments))

    assert fetch("--deliver", "earliest", "--num", "2") == [b"a", b"b"]
    assert fetch("--from-id", "1") == [b"b", b"c"]
    assert fetch("--from-time", "1h") == [b"a", b"b", b"c"]
    assert fetch("--deliver", "latest") == []
    assert fetch("--group", "g", "--from-id", "2") == [b"c"]
    assert fetch("--group", "g", "--from-id", "0") == [b"c"]
    assert fetch("--group", "g", "--from-id", "0", "--force") == [b"a", b"b", b"c"]


@pytest.mark.rule("K2")
def test_fetch_with_ack_acknowledges_what_was_printed(mediator, box):
    for text in ("a", "b", "c"):
        mediator("send", box, text)
    fetch = ("fetch", box, "--group", "g", "--deliver", "earliest", "--wait", "0", "--json", "--ack")
    assert payloads(mediator(*fetch, "--num", "2")) == [b"a", b"b"]
    assert payloads(mediator(*fetch)) == [b"c"]
    assert payloads(mediator(*fetch)) == []


@pytest.mark.rule("F6", "K3")
def test_lease_extend_nack_ack(mediator, box):
    mediator("send", box, "a")
    mediator("send", box, "b")
    fetch = ("fetch", box, "--group", "g", "--deliver", "earliest", "--wait", "0", "--ack-wait", "10m", "--json")
    assert payloads(mediator(*fetch)) == [b"a", b"b"]
    assert payloads(mediator(*fetch)) == []
    assert mediator("extend", box, "0", "1", "--group", "g", "--ack-wait", "20m").out == "2 made longer\n"
    assert mediator("nack", box, "1", "--group", "g").out == "1 given back\n"
    assert payloads(mediator(*fetch)) == [b"b"]
    assert mediator("nack", box, "1", "--group", "g", "--delay", "1h", "--json").json == {"error": "", "returned": 1}
    assert payloads(mediator(*fetch)) == []
    assert mediator("ack", box, "0", "1", "--group", "g").out == "2 acknowledged\n"
    assert mediator("ack", box, "0", "--group", "g", "--json").json == {"error": "", "acknowledged": 0}
    assert mediator("extend", box, "0", "--group", "g", "--ack-wait", "20m", "--json").json["extended"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ack",), "only a group can acknowledge"),
        (("--follow", "--group", "g"), "needs --group and --ack"),
        (("--from-id", "0", "--deliver", "earliest"), "give one of"),
        (("--num", "1001"), "--num"),
        (("--ack-wait", "x"), "expected a span"),
    ],
)
def test_wrong_usage_of_fetch(mediator, box, arguments, said):
    result = mediator("fetch", box, *arguments)
    assert (result.code, result.out) == (2, "")
    assert said in " ".join(result.err.replace("│", " ").split())


def test_follow_prints_what_comes_until_it_is_interrupted(mediator, service, box):
    mediator("send", box, "first")
    follow = subprocess.Popen(
        program(
            *("fetch", box, "--group", "g", "--deliver", "earliest", "--ack", "--follow", "--json"),
            *("--server", service.nats_url),
        ),
        stdout=subprocess.PIPE,
        env=environment(),
    )
    with follow:
        try:
            assert b"Zmlyc3Q=" in follow.stdout.readline()
            mediator("send", box, "second")
            line = json.loads(follow.stdout.readline())
            assert [message["msg_id"] for message in line["messages"]] == [1]
            follow.send_signal(signal.SIGINT)
            assert follow.wait(WITHIN) == 0
        finally:
            follow.kill()


@pytest.mark.rule("Q1")
def test_query_filters(mediator, box):
    mediator("send", box, "a", "--tag", "x", "--tag", "y")
    mediator("send", box, "b", "--tag", "x", "--key", "k")

    def query(*arguments):
        return payloads(mediator("query", box, "--json", *arguments))

    assert query() == [b"a", b"b"]
    assert query("--tag", "x", "--tag", "y") == [b"a"]
    assert query("--key", "k") == [b"b"]
    assert query("--before", "1") == [b"a"]
    assert query("--limit", "1") == [b"b"]
    assert query("--since", "1h") == [b"a", b"b"]
    assert query("--since", str(int(time.time()) + 1000)) == []
    shown = mediator("query", box, "--headers-only").out
    assert "(1 byte)" in shown
    assert "key k" in shown


@pytest.mark.rule("Q2")
def test_delete_removes_one_message_once(mediator, box):
    mediator("send", box, "a")
    assert mediator("delete", box, "0").out == "deleted\n"
    result = mediator("delete", box, "0", "--json")
    assert (result.code, result.err) == (1, "mediator: message not found\n")
    assert result.json == {"error": "message not found", "error_code": "message_not_found", "deleted": False}


@pytest.mark.parametrize(
    "command",
    [
        ("fetch", "not.there", "--wait", "0"),
        ("ack", "not.there", "0", "--group", "g"),
        ("nack", "not.there", "0", "--group", "g"),
        ("extend", "not.there", "0", "--group", "g", "--ack-wait", "5s"),
        ("query", "not.there"),
        ("delete", "not.there", "0"),
        ("mailbox", "show", "not.there"),
        ("mailbox", "set", "not.there", "--ack-wait", "5s"),
        ("mailbox", "delete", "not.there", "--yes"),
        ("mailbox", "move", "not.there", "b", "0"),
        ("mailbox", "copy", "not.there", "b", "0"),
        ("mailbox", "leases", "not.there", "--group", "g"),
        ("mailbox", "release", "not.there", "--group", "g"),
        ("mailbox", "drop-group", "not.there", "--group", "g", "--yes"),
        ("mailbox", "purge", "not.there", "--yes"),
        ("dead", "list", "not.there", "--group", "g"),
        ("dead", "redrive", "not.there", "--group", "g"),
        ("dead", "resend", "not.there", "0", "--group", "g"),
        ("dead", "drop", "not.there", "--group", "g"),
        ("doctor", "not.there"),
    ],
)
def test_every_command_names_a_mailbox_that_is_not_there(mediator, command):
    result = mediator(*command)
    assert (result.code, result.out, result.err) == (1, "", "mediator: mailbox not.there does not exist\n")


# When nobody answers.


def test_no_server_is_one_line(alone):
    result = alone("send", "a", "x", "--server", f"nats://u:secret@127.0.0.1:{free_port()}")
    assert result.code == 1
    assert "cannot connect to nats://127.0.0.1:" in result.err
    assert "is `mediator serve` running?" in result.err
    assert "secret" not in result.err
    assert result.err.count("\n") == 1


OF_OPERATORS = (("status",), ("mailbox", "list"), ("dead", "list", "a", "--group", "g"), ("doctor", "a"))
OF_CLIENTS = (("send", "a", "x"), ("mailbox", "create"), ("agent", "list"), ("bench",))


def test_commands_of_operators_say_where_they_find_a_service(alone, tmp_path):
    for command in OF_OPERATORS:
        result = alone(*command)
        assert result.code == 1
        assert result.err.startswith(f"mediator: no service runs on {tmp_path}/mediator-data; start `mediator serve`")
        assert "or name the directory of a running service with --data-dir: operators' commands" in result.err
        assert result.err.count("\n") == 1


@pytest.mark.parametrize("command", OF_CLIENTS, ids=" ".join)
def test_clients_without_any_service_try_the_default_server(alone, monkeypatch, command):
    url = f"nats://127.0.0.1:{free_port()}"
    monkeypatch.setattr("mediator.cli.client.DEFAULT_SERVER", url)
    result = alone(*command)
    assert result.code == 1
    assert result.err.startswith(f"mediator: cannot connect to {url}: ")
    assert result.err.endswith("is `mediator serve` running? --server, --context or --data-dir names another service\n")


# The operator's commands.


def test_list_pages_through_prefixes_in_order(mediator):
    names = [f"cli.list.{number:02}" for number in range(12)]
    for name in [*reversed(names), "cli.list", "cli.lisu"]:
        mediator("mailbox", "create", name)

    def listed(*arguments):
        answer = mediator("mailbox", "list", "--json", *arguments).json
        return [row["mail_address"] for row in answer["mailboxes"]], answer["more"]

    assert listed("--prefix", "cli.list.") == (names, False)
    assert listed("--prefix", "cli.list") == (["cli.list", *names], False)
    assert listed("--prefix", "cli.list", "--limit", "3") == (["cli.list", *names[:2]], True)
    assert listed("--prefix", "no.such") == ([], False)
    assert listed("--tenant", "other") == ([], False)
    assert "cli.list.00" in mediator("mailbox", "list", "--prefix", "cli.").out
    assert "There are more" in mediator("mailbox", "list", "--prefix", "cli.", "--limit", "1").err
    assert mediator("mailbox", "list", "--tenant", "other").out == "no mailboxes\n"


def test_list_asks_again_where_an_answer_is_full(mediator, monkeypatch):
    monkeypatch.setattr("mediator.cli.mailboxes.PAGE", 2)
    names = [f"cli.page.{number}" for number in range(5)]
    for name in names:
        mediator("mailbox", "create", name)
    answer = mediator("mailbox", "list", "--prefix", "cli.page.", "--json").json
    assert [row["mail_address"] for row in answer["mailboxes"]] == names


def test_show_tells_lanes_groups_and_delayed_mail(mediator, box):
    mediator("send", box, "a", "--priority", "urgent")
    mediator("send", box, "b")
    mediator("send", box, "c", "--delay", "1h")
    mediator("fetch", box, "--group", "workers", "--deliver", "earliest", "--num", "1", "--ack-wait", "1h")
    shown = mediator("mailbox", "show", box)
    [listed] = mediator("mailbox", "list", "--prefix", box, "--json").json["mailboxes"]
    assert f"number      {listed['number']}, by which" in shown.out
    assert shown.code == 0
    rows = [line.split() for line in shown.out.splitlines() if line.strip()]
    assert ["messages", "2,", "2", "B;", "the", "next", "msg_id", "is", "2"] in rows
    assert next(row for row in rows if row[0] == "urgent")[:3] == ["urgent", "1", "0"]
    assert next(row for row in rows if row[0] == "workers")[:6] == ["workers", "1", "0", "1", "0", "0"]
    assert any(row[:2] == ["delayed", "1,"] for row in rows)
    view = mediator("mailbox", "show", box, "--json").json
    assert view["groups"][0]["settled"] == {"critical": -1, "urgent": 0, "normal": -1, "low": -1}


@pytest.mark.rule("F8")
def test_set_gives_a_mailbox_its_own_lease(mediator, box):
    assert mediator("mailbox", "set", box, "--ack-wait", "30s").out == f"{box}: lease 30s\n"
    mediator("send", box, "a")
    fetch = ("fetch", box, "--group", "g", "--deliver", "earliest", "--wait", "0", "--json")
    assert payloads(mediator(*fetch)) == [b"a"]
    assert payloads(mediator(*fetch)) == []
    assert mediator("mailbox", "set", box, "--ack-wait", "0", "--json").json["ack_wait_ms"] == 0
    assert mediator("mailbox", "set", box, "--ack-wait", "default", "--json").json["ack_wait_ms"] is None
    result = mediator("mailbox", "set", box, "--ack-wait", "10ms")
    assert (result.code, result.err) == (1, "mediator: ack_wait_ms: expected 0, or 1000 to 43200000\n")
    assert mediator("mailbox", "set", box, "--ack-wait", "often").code == 2


@pytest.mark.rule("M4")
def test_delete_asks_first(mediator, box):
    mediator("send", box, "a")
    refused = mediator("mailbox", "delete", box, stdin=b"n\n")
    assert refused.code == 1
    assert f"Delete {box} with 1 message?" in refused.err
    assert mediator("mailbox", "delete", box, stdin=b"y\n").out.strip() == f"deleted {box}"
    assert mediator("query", box).code == 1


@pytest.mark.rule("F7")
def test_dead_messages_are_listed_redriven_and_dropped(mediator, box):
    for text in ("a", "b", "c" * 300):
        mediator("send", box, text)
    fetch = ("fetch", box, "--group", "g", "--deliver", "earliest", "--ack-wait", "1s", "--max-deliver", "1", "--json")
    assert len(payloads(mediator(*fetch))) == 3
    dead = ("--group", "g", "--json")

    def listed():
        return mediator("dead", "list", box, *dead).json["messages"]

    block_until(lambda: len(listed()) == 3, what="the leases end")
    assert [message["deliveries"] for message in listed()] == [1, 1, 1]
    shown = mediator("dead", "list", box, "--group", "g").out
    assert f"{'c' * 200}… (300 bytes)" in shown
    assert mediator("dead", "redrive", box, "0", *dead).json["redriven"] == 1
    # With a lease that outlives the rest of the test, or this one is dead again by then.
    assert payloads(mediator(*fetch, "--wait", "0", "--ack-wait", "1h")) == [b"a"]
    assert mediator("dead", "drop", box, "1", "--group", "g").out == "1 dropped\n"
    assert mediator("dead", "drop", box, *dead).json["dropped"] == 1
    assert mediator("dead", "redrive", box, "--group", "none").code == 1


def test_doctor_explains_a_mailbox(mediator, box):
    assert mediator("doctor", box).code == 0
    mediator("send", box, "a")
    result = mediator("doctor", box)
    assert result.code == 1
    assert result.out.startswith("!!  No group has fetched from it yet; 1 message waiting")
    assert f"mediator fetch {box} --group NAME --deliver earliest" in result.out
    mediator("fetch", box, "--group", "g", "--deliver", "earliest")
    (first, *_) = mediator("doctor", box, "--json").json["findings"]
    assert first["level"] == "problem"
    assert "has not acknowledged them" in first["text"]


def test_doctor_looks_at_the_whole_installation(mediator, service):
    result = mediator("doctor")
    assert (result.code, result.err) == (0, "")
    assert "ok  The service is ready: " in result.out
    assert f"are free under {service.data_dir}" in result.out
    assert "The database has" in result.out


def test_doctor_names_gaps_in_the_journal(mediator, service):
    now = time.time_ns() // 1_000_000
    gap = {"at": now, "why": "space", "from": now - 2000, "to": now - 1000, "events": 7, "bytes": 70}
    path = service.data_dir / "journal" / GAPS
    path.write_text(json.dumps(gap) + "\n")
    try:
        result = mediator("doctor")
    finally:
        path.unlink()
    assert result.code == 1
    assert "!!  The journal has gaps: 7 events between" in result.out


def test_doctor_without_a_service_still_looks_at_the_disk(alone, tmp_path):
    result = alone("doctor", "--data-dir", tmp_path)
    assert result.code == 1
    assert "!!  The service does not answer: no service runs on" in result.out
    assert "are free under" in result.out


def test_status(mediator, service, box):
    mediator("send", box, "a")
    result = mediator("status")
    assert result.code == 0
    assert f"nats            {service.nats_url}\n" in result.out
    assert "ready           yes\n" in result.out
    view = mediator("status", "--json").json
    assert (view["pid"], view["http_port"]) == (service.process.pid, service.http_port)
    assert view["tenants"]["default"]["messages"] >= 1


def test_bench_prints_its_figures_and_leaves_nothing_behind(mediator):
    result = mediator("bench", "--seconds", "0.2", "--json")
    assert result.code == 0
    steps = result.json["steps"]
    assert [step["step"] for step in steps] == [
        "SEND, 1 in flight",
        "SEND, 10 in flight",
        "SEND, 100 in flight",
        "FETCH 100 + ACK",
    ]
    assert steps[3]["messages"] == sum(step["messages"] for step in steps[:3]) > 0
    assert all(step["per_second"] > 0 for step in steps)
    rows = mediator("mailbox", "list", "--limit", "1000", "--json").json["mailboxes"]
    assert all(
        row["messages"] == 0 for row in rows if row["retention"] == "until_ack" and len(row["mail_address"]) > 20
    )
    assert "SEND, 100 in flight" in mediator("bench", "--seconds", "0.1").out


# The service's own commands, as processes.

APPLIED = "".join(f"applied {path.stem}\n" for path in sorted((Path(__file__).parents[2] / "migrations").glob("0*.py")))


def run(*arguments: object, **more: str) -> Result:
    done = subprocess.run(
        program(*arguments), capture_output=True, text=True, timeout=WITHIN, env=environment(**more), check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_a_second_service_on_the_same_data_is_told_who_has_it(service):
    result = run("serve", "--data-dir", service.data_dir, "--nats", "127.0.0.1:0", "--http", "127.0.0.1:0")
    assert (result.code, result.out) == (2, "")
    assert f"mediator.db is held by process {service.process.pid}" in result.err
    assert "Traceback" not in result.err


def test_wrong_settings_are_a_line_each(tmp_path):
    result = run("serve", "--data-dir", tmp_path, "--nats", "4222", "--log-level", "loud")
    assert result.code == 2
    assert result.err == (
        "mediator: nats: expected HOST:PORT, got '4222' (from the command line)\n"
        "log_level: expected debug, info, warning or error, got 'loud' (from the command line)\n"
    )


def test_migrate_names_its_steps_and_refuses_newer_schemas(alone, tmp_path):
    first = alone("migrate", "--data-dir", tmp_path)
    assert (first.code, first.out) == (0, APPLIED)
    assert alone("migrate", "--data-dir", tmp_path).out == "the schema is up to date\n"
    with contextlib.closing(sqlite3.connect(tmp_path / "mediator.db")) as database, database:
        database.execute("INSERT INTO schema_migration (name, applied) VALUES ('9999_later', '2030-01-01')")
    result = run("serve", "--data-dir", tmp_path, "--nats", "127.0.0.1:0", "--http", "127.0.0.1:0")
    assert result.code == 2
    assert "the database is newer than this program, which does not know 9999_later" in result.err
    assert "Traceback" not in result.err


@pytest.mark.postgres
def test_migrate_on_postgresql(alone, postgres, tmp_path):
    with postgres.database() as url:
        assert alone("migrate", "--data-dir", tmp_path, "--database-url", url).out == APPLIED
        assert alone("migrate", "--data-dir", tmp_path, "--database-url", url).out == "the schema is up to date\n"


def test_cleanup_asks_the_running_service(mediator):
    result = mediator("cleanup")
    assert result.code == 0
    assert result.out.startswith(("nothing to remove", "removed "))
    assert mediator("cleanup", "--dry-run").code == 0
    assert mediator("cleanup", "--confirm-clock").out == "expiry was not paused\n"
    assert mediator("cleanup", "--dry-run", "--confirm-clock").code == 2


def test_on_a_terminal_serve_says_where_it_is_and_what_to_try(tmp_path):
    ours, theirs = pty.openpty()
    service = subprocess.Popen(
        program("serve", "--data-dir", tmp_path, "--nats", "127.0.0.1:0", "--http", "127.0.0.1:0"),
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    os.close(theirs)
    try:
        said = b""
        while b"fetch my.inbox" not in said:
            said += os.read(ours, 4096)
    finally:
        service.terminate()
        code = service.wait(WITHIN)
        os.close(ours)
    assert code == 0
    text = said.decode()
    assert "The mediator is ready." in text
    assert "NATS   nats://127.0.0.1:" in text
    assert f"data   {tmp_path}" in text
    assert f"mediator send my.inbox 'hello' --data-dir {tmp_path}\r\n" in text


def test_init_writes_a_file_once_and_serve_takes_it(alone, tmp_path):
    assert alone("init").code == 0
    text = (tmp_path / "mediator.toml").read_text()
    result = alone("init")
    assert (result.code, result.err) == (1, "mediator: mediator.toml is there already; nothing was written\n")
    assert (tmp_path / "mediator.toml").read_text() == text
    assert alone("init", "/not/there/mediator.toml").code == 1
    assert alone("check", "--config", "mediator.toml").code == 0


def test_check_says_what_the_settings_mean(alone, tmp_path):
    (tmp_path / "m.toml").write_text(
        'data_dir = "/srv/mail"\nnats = "0.0.0.0:4300"\ndefault_mailbox_ttl = 3600\n'
        '[quotas]\nmailbox_messages = 7\n[tenants.acme]\nusers = [{name = "u", password = "hidden"}]\n'
    )
    result = alone("check", "--config", "m.toml")
    assert result.code == 0
    assert "data       /srv/mail (will be made)\n" in result.out
    assert "managed, listens on 0.0.0.0:4300; users of the tenants may connect from any machine" in result.out
    assert "tenants    acme (users u)\n" in result.out
    assert "mailboxes  live 1h unless" in result.out
    assert "quotas     mailbox_messages 7\n" in result.out
    assert "hidden" not in result.out
    (tmp_path / "m.toml").write_text('nats = "4300"\nquota = 3\n')
    wrong = alone("check", "--config", "m.toml")
    assert (wrong.code, wrong.out) == (2, "")
    assert "quota: unknown option, did you mean quotas?" in wrong.err


# A NATS server of one's own.


@pytest.fixture
def external(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Start a nats-server with a configuration; gives its port."""
    processes = []

    def start(configuration: str, **more: str) -> int:
        folder = tmp_path / f"nats{len(processes)}"
        folder.mkdir()
        path = folder / "nats.conf"
        path.write_text(f'host: "127.0.0.1"\nport: -1\n{configuration}')
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [find_binary(), "-c", path, "--ports_file_dir", folder],
                stdout=log,
                stderr=log,
                env=os.environ | more,
            )
        processes.append(process)
        ports = folder / f"nats-server_{process.pid}.ports"

        def port() -> int | None:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                return int(json.loads(ports.read_bytes())["nats"][0].rpartition(":")[2])
            return None

        return int(block_until(port, what="nats-server listens"))

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_check_verifies_an_external_server(alone, external, monkeypatch):
    port = external("")
    monkeypatch.setenv("MEDIATOR_NATS_URL", f"nats://127.0.0.1:{port}")
    result = alone("check")
    assert result.code == 0, result.err
    assert f"NATS       external, 127.0.0.1:{port}; every caller is tenant default" in result.out
    assert "verified   requests on $mq9.AI.> arrive" in result.out
    assert "open       anybody can list what others subscribe to" in result.out


def test_check_says_when_they_do_not(alone, external, monkeypatch, caplog):
    port = external('authorization { users: [{user: s, password: p, permissions: {subscribe: {deny: "$mq9.>"}}}] }\n')
    monkeypatch.setattr("mediator.cli.configuration.ARRIVE_SECONDS", 1.0)
    monkeypatch.setenv("MEDIATOR_NATS_URL", f"nats://s:p@127.0.0.1:{port}")
    result = alone("check")
    assert result.code == 1
    assert "nothing arrives on $mq9.AI.>" in result.err


def test_the_snippet_makes_a_server_that_check_is_content_with(alone, external, monkeypatch, tmp_path):
    config = tmp_path / "m.toml"
    config.write_text('[tenants.acme]\naccounts = ["ACME"]\n')
    monkeypatch.setenv("MEDIATOR_CONFIG", str(config))
    monkeypatch.setenv("MEDIATOR_NATS_ACCOUNTS", "true")
    monkeypatch.setenv("MEDIATOR_NATS_URL", "nats://127.0.0.1:1")
    snippet = alone("check", "--snippet")
    assert snippet.code == 0
    users = SimpleNamespace(acme='users: [{user: "a", password: "pa"}]', other='users: [{user: "o", password: "po"}]')
    lines = [users.acme if "Your users go here" in line else line for line in snippet.out.splitlines()]
    # An account that was set up like a tenant's, and that the mediator's settings know nothing of.
    start = next(number for number, line in enumerate(lines) if '"ACME": {' in line)
    other = "\n".join(lines[start:-1]).replace("ACME", "OTHER").replace(users.acme, users.other)
    port = external("\n".join([*lines[:-1], other, "}"]) + "\n", MQ9_PASSWORD="pw")
    monkeypatch.setenv("MEDIATOR_NATS_URL", f"nats://mediator:pw@127.0.0.1:{port}")
    served = alone("check")
    assert served.code == 0, served.err
    assert "not proved this login may listen on mq9.*.$mq9.AI.>" in served.out
    assert "not proved clients cannot list what others subscribe to" in served.out
    followed = alone("check", "--user", "a", "--password", "pa")
    assert followed.code == 0, followed.err
    assert "requests of a arrive from account ACME, tenant acme" in followed.out
    assert "verified   a cannot list what others subscribe to" in followed.out
    permissions = 'permissions: {publish: {deny: ["$mq9.PUSH.>"]}}'
    loose = external("\n".join(lines).replace('password: "pa"', f'password: "pa", {permissions}'), MQ9_PASSWORD="pw")
    with monkeypatch.context() as patched:
        patched.setenv("MEDIATOR_NATS_URL", f"nats://mediator:pw@127.0.0.1:{loose}")
        listed = alone("check", "--user", "a", "--password", "pa")
    assert (listed.code, "a can list what others subscribe to" in listed.err) == (1, True)
    unmapped = alone("check", "--user", "o", "--password", "po")
    assert (unmapped.code, "account OTHER, which is no tenant's" in unmapped.err) == (1, True)
    with monkeypatch.context() as patched:
        # For so long it tries.
        patched.setattr("mediator.nats.connection.CONNECT_SECONDS", 1.0)
        wrong = alone("check", "--user", "a", "--password", "no")
    assert (wrong.code, "cannot connect to NATS" in wrong.err) == (2, True)
    # The login of a tenant instead of the service's own.
    monkeypatch.setattr("mediator.cli.configuration.ARRIVE_SECONDS", 1.0)
    monkeypatch.setenv("MEDIATOR_NATS_URL", f"nats://a:pa@127.0.0.1:{port}")
    tenant = alone("check", "--user", "a", "--password", "pa")
    assert (tenant.code, "must be of the account that exports" in tenant.err) == (1, True)
