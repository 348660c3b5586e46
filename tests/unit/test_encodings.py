"""Files that begin with a byte order mark, as editors on Windows write them."""

import base64
from codecs import BOM_UTF8
from pathlib import Path

import pytest

from mediator.login import Login
from mediator.settings.sources import read_file
from pickup.dids.identities import KEY_FILE, Vault
from pipeline.lake.sealing import read_keys
from registry.cards.sources import read_sources
from registry.evaluation import read_cases, read_catalog
from tests.harness.nkeys import Key

CARD = b'{"mailbox": "sea.tides", "name": "Tide Table"}'
KEY = bytes(range(32))


@pytest.fixture(params=[BOM_UTF8, b""], ids=["marked", "plain"])
def mark(request: pytest.FixtureRequest) -> bytes:
    return bytes(request.param)


def test_settings(tmp_path: Path, mark: bytes) -> None:
    file = tmp_path / "mediator.toml"
    file.write_bytes(mark + b'log_level = "debug"\n')
    assert read_file(file).values == {"log_level": "debug"}


def test_logins(tmp_path: Path, mark: bytes) -> None:
    file = tmp_path / "user.nk"
    file.write_bytes(mark + Key("user").seed.encode())
    Login("nats://localhost", nkey=str(file)).check()


def test_keys(tmp_path: Path, mark: bytes) -> None:
    for name in (KEY_FILE, "archive.keys"):
        file = tmp_path / name
        file.touch(0o600)
        file.write_bytes(mark + base64.b64encode(KEY))
    assert Vault.load(None, tmp_path).open(Vault(KEY).seal(b"secret")) == b"secret"
    assert [key.secret for key in read_keys(tmp_path / "archive.keys")] == [KEY]


@pytest.mark.parametrize("name", ["card.json", "cards.jsonl"])
def test_cards(tmp_path: Path, mark: bytes, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(mark + CARD + b"\n")
    assert [source.data for source in read_sources([str(file)])] == [CARD]


def test_requests_of_an_evaluation(tmp_path: Path, mark: bytes) -> None:
    cards, cases = tmp_path / "cards.jsonl", tmp_path / "cases.jsonl"
    cards.write_bytes(CARD)
    cases.write_bytes(mark + b'{"qid": "1", "query": "boat", "relevant": ["sea.tides"]}\n')
    [case] = read_cases(cases, read_catalog(read_sources([str(cards)])))
    assert case.qid == "1"
