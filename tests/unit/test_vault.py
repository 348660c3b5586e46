"""The vault: opens what it sealed and nothing else, and keeps its key where only the service reads it."""

import base64
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import SetupError
from pickup.dids.identities import KEY_BYTES, KEY_FILE, Vault

KEY = bytes(range(KEY_BYTES))
SECRET = b"the private keys of an identity"


@given(st.binary(max_size=500))
def test_what_is_sealed_comes_back(secret: bytes) -> None:
    assert Vault(KEY).open(Vault(KEY).seal(secret)) == secret


def test_nothing_of_the_secret_is_seen_and_no_two_look_alike() -> None:
    one, other = Vault(KEY).seal(SECRET), Vault(KEY).seal(SECRET)
    assert SECRET not in one
    assert one != other


def test_another_key_fails_and_the_error_says_what_to_do() -> None:
    with pytest.raises(SetupError, match=r"didcomm\.key.*restore"):
        Vault(os.urandom(KEY_BYTES)).open(Vault(KEY).seal(SECRET))


@given(st.integers(0, 59), st.integers(1, 255))
def test_what_was_changed_is_not_opened(at: int, flip: int) -> None:
    sealed = bytearray(Vault(KEY).seal(SECRET))
    sealed[at % len(sealed)] ^= flip
    with pytest.raises(SetupError):
        Vault(KEY).open(bytes(sealed))


@given(st.binary(max_size=100))
def test_what_was_never_sealed_is_not_opened(junk: bytes) -> None:
    with pytest.raises(SetupError):
        Vault(KEY).open(junk)


def test_the_key_file_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        first = Vault.load(None, tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [KEY_FILE]
    assert Vault.load(None, tmp_path).open(first.seal(SECRET)) == SECRET


def test_a_configured_key_wins_and_no_file_is_made(tmp_path: Path) -> None:
    assert Vault(KEY).open(Vault.load(KEY, tmp_path).seal(SECRET)) == SECRET
    assert os.listdir(tmp_path) == []


def test_the_file_holds_the_key_in_base64(tmp_path: Path) -> None:
    sealed = Vault.load(None, tmp_path).seal(SECRET)
    key = base64.b64decode((tmp_path / KEY_FILE).read_text())
    assert Vault(key).open(sealed) == SECRET


def test_services_that_start_at_once_use_the_same_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        vaults = list(pool.map(lambda _: Vault.load(None, tmp_path), range(8)))
    sealed = vaults[0].seal(SECRET)
    assert [vault.open(sealed) for vault in vaults] == [SECRET] * 8


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    Vault.load(None, tmp_path)
    (tmp_path / KEY_FILE).chmod(mode)
    with pytest.raises(SetupError, match=f"expected mode 600, got {mode:o}"):
        Vault.load(None, tmp_path)


@pytest.mark.parametrize("text", ["", "short", base64.b64encode(bytes(31)).decode(), "ß" * 40, "A" * 2000])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / KEY_FILE
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SetupError, match="expected 32 bytes in base64"):
        Vault.load(None, tmp_path)


def test_a_folder_that_is_not_there_is_a_fault_of_the_setup(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="No such file"):
        Vault.load(None, tmp_path / "missing")


def test_the_key_is_in_no_text_of_the_vault() -> None:
    vault = Vault(KEY)
    for text in (repr(vault), str(vault), repr(vars(vault))):
        assert KEY.hex() not in text
        assert repr(KEY)[2:-1] not in text
