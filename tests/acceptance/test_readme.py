"""The blocks of README.md, run in their order as a reader would run them, do what the README says and print it."""

import base64
import json
import re
import subprocess
import sys

import pytest

from tests.acceptance import readme
from tests.harness.service import listening

README = readme.ROOT / "README.md"
ALONE = ["unshare", "--map-root-user", "--net"]
"""A network of its own, in which the ports that are printed are free."""
PORTS = (4222, 8080)
NEAR = 0.03
"""How far a score may be from the one that is printed: processors differ in how they compute vectors."""
GENERATED = (
    (re.compile(r"\(\d+ ms\)"), "(MS)"),
    (re.compile(r"did:key:z6Mk\w+"), "DID"),
    (re.compile(r"[─ ]+"), " "),
)
SCORE = re.compile(r"\b[01]\.\d{3}\b")


def prefix() -> list[str]:
    """Return what runs a command where the README's ports are free."""
    try:
        if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0:
            return ALONE
    except FileNotFoundError:
        pass
    if any(map(listening, PORTS)):
        pytest.skip(f"somebody listens on {PORTS}, and there may be no network namespace")
    return []


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each block printed."""
    folder = tmp_path_factory.mktemp("readme")
    command = [*prefix(), sys.executable, readme.__file__, str(README), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    log = folder / "log"
    assert done.returncode == 0, f"{done.stderr}\n{log.read_text() if log.exists() else ''}"
    outcomes: list[dict[str, str]] = json.loads(done.stdout)
    return outcomes


def plain(text: str) -> list[str]:
    """Return the lines that say something, without what differs from run to run."""
    for pattern, instead in GENERATED:
        text = pattern.sub(instead, text)
    return [line.strip() for line in SCORE.sub("SCORE", text).splitlines() if line.strip()]


def test_each_block_is_run_or_left_out_for_a_reason(printed: list[dict[str, str]]) -> None:
    run = [outcome["text"] for outcome in printed]
    left_out = [text for _, text in readme.blocks(README) if text not in run]
    assert [name for name in readme.NOT_RUN for text in left_out if text.startswith(name)] == [*readme.NOT_RUN]
    assert len(left_out) == len(readme.NOT_RUN)
    assert readme.serve_command() == ".venv/bin/mediator serve"


def test_no_block_fails(printed: list[dict[str, str]]) -> None:
    for outcome in printed:
        assert outcome["code"] == 0, outcome
        assert "error" not in outcome["err"].lower(), outcome
        for found in re.findall(r'"error":\s*"([^"]*)"', outcome["out"]):
            assert found == "", outcome


def test_blocks_print_what_the_readme_shows(printed: list[dict[str, str]]) -> None:
    shown = [outcome for outcome in printed if outcome["language"] == "console"]
    assert len(shown) >= 2
    for outcome in shown:
        expected = outcome["text"].partition("\n")[2]
        assert plain(outcome["out"]) == plain(expected)
        scores = zip(SCORE.findall(outcome["out"]), SCORE.findall(expected), strict=True)
        assert all(abs(float(got) - float(wanted)) < NEAR for got, wanted in scores), outcome["out"]


def test_each_way_to_a_mailbox_gets_what_was_sent(printed: list[dict[str, str]]) -> None:
    by_first = {outcome["text"].split("\n")[0].split(" ")[0]: outcome["out"] for outcome in reversed(printed)}
    assert "urgent" in by_first[".venv/bin/mediator"]
    assert "translate this" in by_first[".venv/bin/mediator"]
    assert f'"payload":"{base64.b64encode(b"translate this").decode()}","priority":"urgent"' in by_first["nats"]
    (python,) = [outcome["out"] for outcome in printed if outcome["language"] == "python"]
    assert python == "critical b'abort the task'\n"
