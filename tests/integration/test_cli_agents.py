"""The commands for agents against a running `mediator serve`: what they do, what they print, and their exit codes."""

import asyncio
import contextlib
import http.server
import json
import os
import pty
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from a2a.server.request_handlers.response_helpers import agent_card_to_dict
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill

from registry.cards.card import MAX_CARD
from tests.harness.service import Service
from tests.integration.test_cli import Mediator, Result, alone, environment, mediator, program, serving

__all__ = ["alone", "mediator"]

OWN = Path(__file__).parents[1] / "data"
BAKER = '{ "name":"Bread Baker", "mailbox": "mq9://here/shop.baker","description":"Bakes rye bread.\\nAnd rolls.",'
BAKER += '"tags":["food"], "skills":[{"id":"bake","name":"bake bread"}], "price": 1.50 }'
"""No parser writes it back like this."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that searches by meaning."""
    yield from serving(tmp_path_factory.mktemp("service"), semantic=True)


@pytest.fixture(autouse=True)
def _nobody_left(mediator: Mediator, service: Service) -> Iterator[None]:
    """Empty the registry after each test, over one connection: a command for each agent takes much longer."""

    async def unregister(mailboxes: list[str]) -> None:
        client = await nats.connect(service.nats_url)
        for mailbox in mailboxes:
            await client.request("$mq9.AI.AGENT.UNREGISTER", json.dumps({"mailbox": mailbox}).encode(), timeout=40)
        await client.close()

    yield
    asyncio.run(unregister([agent.get("mailbox") or f"name:{agent['name']}" for agent in listed(mediator)]))
    assert listed(mediator) == []


def listed(mediator: Mediator) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = mediator("agent", "list", "--limit", "1000", "--json").json["agents"]
    return found


def rows(result: Result) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = result.out.rpartition("─")[2].splitlines()
    return [re.split(r"\s{3,}", line.strip()) for line in lines if line.strip()]


def register(mediator: Mediator, **card: Any) -> None:
    result = mediator("agent", "register", "-", stdin=json.dumps(card).encode())
    assert (result.code, result.out) == (0, f"registered {card['mailbox']}\n")


# Registering.


@pytest.mark.rule("G1")
def test_a_card_is_registered_from_a_file_byte_for_byte(mediator, tmp_path):
    (tmp_path / "card.json").write_text(BAKER)
    result = mediator("agent", "register", tmp_path / "card.json")
    assert (result.code, result.out) == (0, "registered shop.baker\n")
    assert BAKER in mediator("agent", "list", "--json").out


def test_a_card_from_stdin_gets_a_mailbox_and_a_ttl(mediator):
    result = mediator("agent", "register", "-", "--mailbox", "a.b", "--ttl", "2m", stdin=b'{"name": "Ann", "x": 1.5}')
    assert (result.code, result.out) == (0, "registered a.b\n")
    assert listed(mediator) == [{"mailbox": "a.b", "name": "Ann", "x": 1.5, "ttl": 120}]


def test_a_byte_order_mark_is_no_part_of_a_card(mediator, tmp_path):
    (tmp_path / "card.json").write_bytes(b"\xef\xbb\xbf" + BAKER.encode())
    for file, stdin in ((tmp_path / "card.json", b""), ("-", b"\xef\xbb\xbf" + BAKER.encode())):
        assert mediator("agent", "register", file, stdin=stdin).code == 0
        assert BAKER in mediator("agent", "list", "--json").out


def test_warnings_about_a_card_are_shown(mediator):
    card = {"mailbox": "a.b", "name": "Ann", "protocolVersion": "0.3.0", "skills": [7]}
    result = mediator("agent", "register", "-", stdin=json.dumps(card).encode())
    assert (result.code, result.out) == (0, "registered a.b\n")
    assert "warning: skills" in result.err
    reply = mediator("agent", "register", "-", "--json", stdin=json.dumps(card).encode()).json
    assert reply["warnings"] == [line.removeprefix("warning: ") for line in result.err.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (("-",), b"[]", "mediator: card: expected a JSON object"),
        (("-",), b'{"description": "Ann"}', "mediator: mailbox: expected"),
        (("-", "--ttl", "60s"), b"7", "mediator: card: expected a JSON object"),
        (("-", "--mailbox", "c.d"), b'{"mailbox": "a.b"}', "mediator: mailbox: "),
        (("absent.json",), b"", "mediator: cannot read absent.json: No such file or directory"),
    ],
)
def test_an_invalid_card_is_refused_and_not_registered(mediator, arguments, stdin, said):
    result = mediator("agent", "register", *arguments, stdin=stdin)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(said)
    assert listed(mediator) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("register",), "expected FILE, or - for standard input, or --url"),
        (("register", "-", "--url", "http://x"), "expected FILE, or - for standard input, or --url"),
        (("register", "-", "--ttl", "soon"), "expected a span such as"),
        (("discover", " "), "expected a sentence"),
        (("discover", "x", "--state", "asleep"), "asleep"),
        (("discover", "x", "--min-score", "2"), "--min-score"),
        (("report", "a.b", "[]"), "expected a JSON object"),
        (("report", "a.b", "{}", "--status", "busy"), "give JSON or --status"),
        (("unregister",), "expected ADDRESS or --name"),
        (("unregister", "a.b", "--name", "Ann"), "expected ADDRESS or --name"),
    ],
)
def test_wrong_usage_is_exit_code_2(mediator, arguments, said):
    result = mediator("agent", *arguments)
    assert (result.code, result.out) == (2, "")
    assert said in " ".join(result.err.replace("│", " ").split())


@contextlib.contextmanager
def website(pages: dict[str, bytes]) -> Iterator[str]:
    """Serve pages on this machine, and nothing else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write(page or b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_card_from_its_well_known_path_gets_a_mailbox(mediator):
    with website({"/.well-known/agent-card.json": b'{"name": "Ann"}'}) as url:
        result = mediator("agent", "register", "--url", url, "--mailbox", "a.b")
        assert (result.code, result.out) == (0, "registered a.b\n")
        assert [agent["name"] for agent in listed(mediator)] == ["Ann"]
        result = mediator("agent", "register", "--url", f"{url}/absent.json")
        assert (result.code, result.out) == (1, "")
        assert "404" in result.err


def test_the_card_of_an_a2a_agent_is_imported(mediator):
    card = AgentCard(
        name="Recipe Finder", description="Finds recipes.", version="1.0.0", capabilities=AgentCapabilities(),
        default_input_modes=["text"], default_output_modes=["text"],
        skills=[AgentSkill(id="find", name="Find", description="Finds a recipe.", tags=["food"])],
        supported_interfaces=[
            AgentInterface(url="https://recipes.example/", protocol_binding="JSONRPC", protocol_version="1.0")
        ],
    )  # fmt: skip
    published = json.dumps(agent_card_to_dict(card)).encode()
    with website({"/.well-known/agent-card.json": published}) as url:
        result = mediator("agent", "import", f"{url}/.well-known/agent-card.json", "--mailbox-prefix", "a2a")
        assert (result.code, result.out) == (0, "registered 1 card\n")
        [agent] = listed(mediator)
        assert agent == {"mailbox": "a2a.recipe.finder", **json.loads(published)}
        result = mediator("agent", "import", f"{url}/.well-known/agent.json", "--mailbox-prefix", "a2a")
        assert (result.code, result.out) == (1, "registered 0 cards\nrefused 1\n")
        assert "expected status 200, got 404" in result.err


@pytest.mark.parametrize("url", ["http://agent.example/card.json", "http://10.0.0.1/", "HTTP://[2001:db8::1]/a.json"])
def test_a_card_comes_over_tls_from_other_machines(mediator, url):
    result = mediator("agent", "import", url, "--mailbox-prefix", "a2a")
    assert (result.code, result.out) == (1, "registered 0 cards\nrefused 1\n")
    assert f"{url}: url: expected https; http is only for this machine" in result.err


# Finding.


@pytest.mark.rule("G3")
def test_agents_are_listed_in_order_with_their_state(mediator):
    register(mediator, mailbox="a.one", name="One", description="First line.\nSecond line.", tags=["x"])
    register(mediator, mailbox="a.two", name="Two", tags=["x", "y"], skills=[{"id": "count"}])
    result = mediator("agent", "list")
    assert [row[:3] for row in rows(result)] == [["One", "a.one", "alive"], ["Two", "a.two", "alive"]]
    assert rows(result)[0][4] == "First line."
    assert "Second line." not in result.out
    assert [row[0] for row in rows(mediator("agent", "list", "--tag", "X", "--tag", "y"))] == ["Two"]
    assert [row[0] for row in rows(mediator("agent", "list", "--skill", "count"))] == ["Two"]
    assert mediator("agent", "list", "--state", "gone").out == "no agents\n"
    assert mediator("agent", "list", "--limit", "1").err == (
        "2 agents in all, the first 1 are shown; --limit shows more.\n"
    )


@pytest.mark.rule("G3")
@pytest.mark.parametrize("how", [(), ("--text",)])
def test_the_agent_that_a_sentence_asks_for_is_the_first(mediator, how):
    mediator("agent", "import", OWN / "catalog.jsonl")
    result = mediator("agent", "discover", "warn me of floods before the river's water level rises", *how)
    assert result.code == 0
    first, *others = rows(result)
    assert first[0] == "1"
    assert first[2:5] == ["River Gauge", "own.river-gauge", "alive"]
    assert all(float(row[1]) <= float(first[1]) for row in others)
    wanted = mediator("agent", "discover", "warn me of floods", *how, "--tag", "sea", "--json").json
    assert {agent["id"] for agent in wanted["agents"]} <= {"tide-table"}


def test_more_agents_than_the_limit_are_counted(mediator):
    mediator("agent", "import", OWN / "catalog.jsonl")
    words = " ".join(["water", "plans", "scores", "recipes"])
    whole = rows(mediator("agent", "discover", words, "--text"))
    assert len(whole) > 3
    result = mediator("agent", "discover", words, "--text", "--limit", "2")
    assert [row[3] for row in rows(result)] == [row[3] for row in whole[:2]]
    assert result.err == f"{len(whole)} agents in all, the first 2 are shown; --limit shows more.\n"
    best = whole[0][1]
    assert len(rows(mediator("agent", "discover", words, "--text", "--min-score", best))) == 1


def test_why_an_agent_is_found_is_printed(mediator):
    mediator("agent", "import", OWN / "catalog.jsonl")
    sentence = "warn me of floods before the river's water level rises"
    first = rows(mediator("agent", "discover", sentence, "--text", "--limit", "1", "--explain"))[0]
    assert re.fullmatch(r"words 1\.000: (\w+, )+\w+", first[5])
    assert {"river", "floods"} <= set(first[5].partition(": ")[2].split(", "))


def test_a_search_without_results_says_so(mediator):
    register(mediator, mailbox="a.one", name="One")
    assert mediator("agent", "discover", "zeppelin", "--text").out == "no agent was found\n"
    assert mediator("agent", "list", "--tag", "zeppelin").out == "no agents\n"


def test_a_card_cannot_take_over_the_terminal(mediator):
    register(mediator, mailbox="a.one", name="\u001b[31mred", description="[bold]x[/bold] \u202e")
    shown = mediator("agent", "list").out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[bold]x[/bold]" in shown


# Signs of life, and the end.


@pytest.mark.rule("G2")
def test_a_report_is_kept(mediator):
    register(mediator, mailbox="a.one", name="One")

    def status() -> Any:
        return mediator("agent", "list", "--json").json["states"][0]["status"]

    assert mediator("agent", "report", "a.one").out == "a.one was seen\n"
    assert mediator("agent", "report", "mq9://here/a.one", "--status", "busy").out == "a.one was seen\n"
    assert status() == {"mailbox": "mq9://here/a.one", "status": "busy"}
    assert mediator("agent", "report", "a.one", '{"load": 0.5}').code == 0
    assert status() == {"mailbox": "a.one", "load": 0.5}
    result = mediator("agent", "report", "a.two")
    assert (result.code, result.err) == (1, "mediator: agent a.two is not registered\n")


@pytest.mark.rule("G2")
def test_an_agent_is_unregistered_by_its_mailbox_or_its_name(mediator):
    for address in ("a.one", "a.two", "a.three"):
        register(mediator, mailbox=address, name="Three" if address == "a.three" else "Twin")
    assert mediator("agent", "unregister", "--name", "Three").out == "unregistered a.three\n"
    result = mediator("agent", "unregister", "--name", "Twin")
    assert (result.code, result.err) == (1, "mediator: name: 2 agents match; give mailbox\n")
    assert mediator("agent", "unregister", "a.one").out == "unregistered a.one\n"
    assert mediator("agent", "unregister", "a.one", "--json").json["error"] == "agent a.one is not registered"
    assert [agent["mailbox"] for agent in listed(mediator)] == ["a.two"]


# Importing.


def test_cards_are_imported_from_every_kind_of_source(mediator, tmp_path):
    folder = tmp_path / "cards"
    folder.mkdir()
    (folder / "one.json").write_text(BAKER)
    (folder / "more.json").write_text('[{"mailbox": "a.1"},\n {"mailbox": "a.2"}]')
    (folder / "lines.jsonl").write_text("".join(f'{{"mailbox": "l.{line}"}}\n' for line in range(200)))
    with website({"/card.json": b'{"mailbox": "w.1"}', "/other.json": b'{"mailbox": "w.2"}'}) as url:
        (tmp_path / "urls.txt").write_text(f"{url}/card.json\n")
        result = mediator("agent", "import", folder, tmp_path / "urls.txt", f"{url}/other.json")
    assert (result.code, result.out) == (0, "registered 205 cards\n")
    assert len(listed(mediator)) == 205
    assert BAKER in mediator("agent", "list", "--limit", "1000", "--json").out


def test_bad_cards_are_reported_the_others_registered(mediator, tmp_path):
    lines = [
        '{"mailbox": "a.1"}',
        "{",
        '{"description": "Ann"}',
        '{"mailbox": "A"}',
        '{"mailbox": "a.2", "ttl": "soon"}',
    ]
    lines += [json.dumps({"mailbox": "a.3", "x": "x" * MAX_CARD}), '{"mailbox": "a.4", "name": 7}']
    (tmp_path / "cards.jsonl").write_text("\n".join(lines))
    result = mediator("agent", "import", tmp_path / "cards.jsonl", tmp_path / "absent.json")
    assert result.code == 1
    assert result.out.splitlines()[0] == "registered 2 cards"
    assert result.out.splitlines()[-1] == "refused 6"
    for place in ("cards.jsonl:2: ", "cards.jsonl:3: mailbox", "cards.jsonl:4: mailbox", "cards.jsonl:5: ttl"):
        assert f"{tmp_path}/{place}" in result.err
    assert f"{tmp_path}/cards.jsonl:6: expected at most {MAX_CARD} bytes" in result.err
    assert f"{tmp_path}/absent.json: cannot be read" in result.err
    assert "--mailbox-prefix" in result.err
    assert {agent["mailbox"] for agent in listed(mediator)} == {"a.1", "a.4"}


def test_only_the_first_problems_are_shown(mediator, tmp_path):
    (tmp_path / "cards.jsonl").write_text("[]\n" * 25)
    result = mediator("agent", "import", tmp_path / "cards.jsonl", "--json")
    assert result.code == 1
    counts = result.json
    assert (counts["registered"], counts["refused"], len(counts["problems"])) == (0, 25, 10)
    assert "… and 15 more" in mediator("agent", "import", tmp_path / "cards.jsonl").err


def test_importing_again_under_a_prefix_replaces(mediator, tmp_path):
    path = tmp_path / "cards.jsonl"
    path.write_text(
        '{"id": "Tide-Table", "name": "Tides"}\n{"name": "Twin"}\n{"name": "Twin"}\n{"mailbox": "own.one"}\n'
    )
    expected = ["shop.tide.table", "shop.twin", "shop.twin.2", "own.one"]
    for _ in range(2):
        assert mediator("agent", "import", path, "--mailbox-prefix", "shop.").code == 0
        assert [agent["mailbox"] for agent in listed(mediator)] == expected


def test_an_import_shows_its_progress_on_a_terminal_only(mediator, service, tmp_path):
    (tmp_path / "cards.jsonl").write_text("".join(f'{{"name": "N", "mailbox": "bar.n{n}"}}\n' for n in range(20)))
    assert mediator("agent", "import", "cards.jsonl").err == ""
    ours, theirs = pty.openpty()
    command = program("agent", "import", "cards.jsonl", "--data-dir", service.data_dir)
    done = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, env=environment(TERM="xterm"), check=True
    )
    os.close(theirs)
    drawn = b""
    with contextlib.suppress(OSError):  # the end of what a terminal was sent
        while piece := os.read(ours, 4096):
            drawn += piece
    os.close(ours)
    assert done.stdout == b"registered 20 cards\n"
    assert b"20 registered" in drawn
