"""What each command prints with --json: the fields of docs/json.md, no more and no fewer, for every command."""

import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mediator.cli import build_app
from mediator.operate.run_history import RunHistoryClient
from mediator.operate.runs import Outcome
from mediator.parts import installed_settings
from pickup.rules.names import from_verkey
from tests.harness.certificates import issue
from tests.harness.service import Service
from tests.integration.test_cli import Mediator, alone, external, mediator, service
from tests.unit.test_cli import commands

__all__ = ["alone", "external", "mediator", "service"]

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
SPARK = {f"pipeline {name}" for name in ("compact", "embed", "ingest", "replay", "report", "upload")}
"""These start Spark or need an object store, and are run in tests/slow/spark."""
CATALOG = {"pipeline publish"}
"""Run in tests/unit/test_lake_iceberg.py, with a catalog."""
CARD = '{"name": "Ann", "mailbox": "json.ann", "description": "Translates.", "skills": [{"id": "a", "name": "words"}]}'
POSTGRES = {"migrate-to"}
"""Run in tests/integration/test_backup.py."""

RUNS = """
quickstart new
init new.toml
context add one --server nats://host --user a --password b --tls-ca {authority}
context add two --server nats://host
context list
context show one
context select one
context select
context remove one
check
check --snippet
check --config external.toml
migrate --data-dir fresh
verify --data-dir fresh
backup b.tar
restore b.tar --data-dir restored
mailbox create json.box --ttl 1h --desc words --tag a --public
mailbox create json.box --public
mailbox create json.work --retention until_ack
send json.box text --priority high --key k --tag t --dedup-id d --reply-to me --header a:b --ttl 1h
send json.box later --delay 1h
send json.box more
fetch json.box --group g --deliver earliest --ack-wait 1m --max-deliver 1
fetch json.box --deliver earliest --num 1
query json.box
query json.box --headers-only
extend json.box 0 --group g --ack-wait 1m
nack json.box 0 --group g
dead list json.box --group g
mailbox show json.box
doctor json.box
dead resend json.box 0 --group g --payload text --lane low
fetch json.box --group g --ack-wait 1m
mailbox leases json.box --group g
mailbox release json.box --group g
mailbox copy json.box json.work 1
mailbox move json.box json.work 2
mailbox purge json.work --yes
dead redrive json.box 0 --group g
dead drop json.box --group g
ack json.box 1 --group g
mailbox drop-group json.box --group g --yes
copy add all json.work --address json.box
copy list
copy remove all
conformance mq9 {server} --only mq9.verbs
conformance mq9 --list
delete json.box 1
mailbox list
mailbox set json.box --ack-wait 5s
mailbox delete json.box --yes
forget json.box --yes
bench --seconds 0.1
agent register card.json
agent report json.ann
agent list
agent discover words --explain
agent forget-use
agent import card.json
agent unregister json.ann
agent eval {data}/catalog.jsonl {data}/queries.jsonl --mode text --limit-queries 3
tenant add json-t --user json-a --token one --quota-rate 5
tenant list
tenant set json-t --quota-bytes 9
tenant user add json-t json-b
tenant token add json-t two
tenant rotate json-t --grace 1h
tenant user remove json-t json-b
tenant token remove json-t two
tenant remove json-t --yes
invite --label words
try {link}
conformance didcomm {link} --only didcomm.ping
invitations list
invitations remove {invitation}
try
connections list
connections show {connection}
connections remove {connection} --yes
didcomm allow add 203.0.113.9 --note partner
didcomm stats
didcomm allow list
didcomm allow remove 203.0.113.9
didcomm deny add 203.0.113.0/24
didcomm deny list
didcomm deny remove 203.0.113.0/24
keys attach {key} json.work
keys list
keys detach {key}
identity rotate
doctor
console
alarms
audit
operators reload
status
cleanup --dry-run
cleanup
cleanup --confirm-clock
pipeline runs
pipeline archive
"""
"""Command lines in their order; each command that has --json is among them."""


def shapes() -> dict[str, list[dict[str, Any]]]:
    """Read the page: for each command its shapes, of which an object has one."""
    found: dict[str, list[dict[str, Any]]] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        blocks = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
        found[section.partition("\n")[0].removeprefix("mediator ")] = [json.loads(block) for block in blocks]
    return found


KINDS = {
    "text": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def differences(value: Any, shape: Any, path: str = "") -> Iterator[str]:
    """Yield what is not as the page has it."""
    if isinstance(shape, str):
        if not any(KINDS[kind](value) for kind in shape.split(" or ")):
            yield f"{path}: expected {shape}, got {value!r}"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{path}: expected a list, got {value!r}"
            return
        for number, item in enumerate(value):
            yield from differences(item, shape[0], f"{path}[{number}]")
    elif not isinstance(value, dict):
        yield f"{path}: expected an object, got {value!r}"
    elif "*" in shape:
        for name, item in value.items():
            yield from differences(item, shape["*"], f"{path}.{name}")
    else:
        known = {name.removesuffix("?"): inner for name, inner in shape.items()}
        yield from (f"{path}.{name}: is not in the page" for name in value.keys() - known.keys())
        yield from (f"{name}: is missing in {path}" for name in shape.keys() - value.keys() if not name.endswith("?"))
        for name in value.keys() & known.keys():
            yield from differences(value[name], known[name], f"{path}.{name}")


def check_shape(name: str, found: dict[str, Any], page: dict[str, list[dict[str, Any]]]) -> None:
    """Compare what a command printed with its shapes in the page."""
    wrong = [list(differences(found, shape, name)) for shape in page[name]]
    assert [] in wrong, "\n".join(min(wrong, key=len))


def name_of(line: str, known: list[str]) -> str:
    return max((name for name in known if f"{line} ".startswith(f"{name} ")), key=len)


def with_json() -> list[str]:
    """The commands that have the option."""
    return [
        path.removeprefix("mediator ")
        for path, command in commands(build_app())
        if "as_json" in inspect.signature(command.callback).parameters
    ]


def test_the_page_has_every_command():
    assert sorted(shapes()) == sorted(with_json())
    run = {name_of(line, with_json()) for line in RUNS.strip().splitlines()}
    assert set(with_json()) - run == SPARK | CATALOG | POSTGRES


def test_every_command_prints_what_the_page_says(mediator: Mediator, external, service: Service, tmp_path):
    page, known = shapes(), with_json()
    values = {
        "authority": issue(tmp_path).authority,
        "data": Path(__file__).parents[1] / "data",
        "key": from_verkey(bytes(range(32))),
        "server": service.nats_url,
    }
    (tmp_path / "card.json").write_text(CARD)
    (tmp_path / "external.toml").write_text(f'nats_url = "nats://127.0.0.1:{external("")}"\n')
    history = RunHistoryClient(installed_settings().load(data_dir=service.data_dir))
    history.end(history.begin("report", ["--days", "7"]), Outcome.SUCCEEDED, {"rows": 3}, "")
    for line in RUNS.strip().splitlines():
        result = mediator(*shlex.split(line.format(**values)), "--json")
        # A doctor's code says what was found.
        assert result.code == 0 or line.startswith("doctor"), f"{line}: {result.err}"
        assert result.out.count("\n") == 1, line
        found = result.json
        assert found.pop("error") == "", line
        check_shape(name_of(line, known), found, page)
        if line == "invite --label words":
            values["link"] = found["v1_url"]
        if line == "invitations list":
            values["invitation"] = found["invitations"][-1]["id"]
        if line == "connections list":
            values["connection"] = found["connections"][-1]["connection"]
