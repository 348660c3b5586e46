"""What `mediator quickstart` makes: a service that starts, users who log in, and a unit that systemd takes."""

import asyncio
import json
import os
import shlex
import shutil
import stat
import subprocess

import pytest

from mediator.cli.quickstart import unit_text
from tests.harness.service import Service, free_port
from tests.integration.test_cli import alone

__all__ = ["alone"]


def test_what_it_makes_starts_and_lets_each_user_in(alone, tmp_path):
    ports = {"nats": f"127.0.0.1:{free_port()}", "http": f"127.0.0.1:{free_port()}"}
    options = [f"--{name}={value}" for name, value in ports.items()]
    made = alone("quickstart", "a place", "--user", "ann", "--user", "bob", *options, "--json").json
    assert made["config"] == str(tmp_path / "a place" / "mediator.toml")
    service = Service("made", tmp_path / "log", data_dir=made["data_dir"], config=made["config"], **ports)
    service.http_port = int(ports["http"].rpartition(":")[2])
    service.start()
    try:
        asyncio.run(service.ready())
        # As they are printed.
        for command in made["next"]:
            name, *arguments = shlex.split(command)
            result = alone(*arguments)
            assert (name, result.code) == ("mediator", 0), result.err
        assert "hello" in result.out
        for user, file in made["contexts"].items():
            assert alone("query", "my.inbox", "--context", file).code == 0, user
        login = json.loads((tmp_path / "a place" / "contexts" / "ann.json").read_text())
        wrong = alone("send", "my.inbox", "x", "--server", login["server"], "--user", "ann", "--password", "guessed")
        assert "user or password is wrong" in wrong.err
        assert "it asks for a login" in alone("send", "my.inbox", "x", "--server", login["server"]).err
        service.terminate()
        assert asyncio.run(service.ended()) == 0
    finally:
        service.discard()


def test_all_of_it_is_for_its_owner_alone(alone, tmp_path):
    result = alone("quickstart")
    assert result.code == 0, result.err
    files = [tmp_path / "mediator", *(tmp_path / "mediator").rglob("*")]
    assert {path.name for path in files} >= {"mediator.toml", "data", "agent.json", "mediator.service"}
    assert [path for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    assert f"mediator serve --config {tmp_path}/mediator/mediator.toml\n" in result.out
    password = json.loads((tmp_path / "mediator" / "contexts" / "agent.json").read_text())["password"]
    assert len(password) == 32
    assert password not in result.out
    assert alone("check", "--config", "mediator/mediator.toml").code == 0


@pytest.mark.parametrize("folder", ["mediator", "."])
def test_nothing_of_it_ends_in_a_commit(alone, tmp_path, folder):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    made = alone("quickstart", folder, "--json").json
    (tmp_path / made["data_dir"] / "mediator.db").touch()
    status = ["git", "-C", tmp_path, "status", "--porcelain", "--untracked-files=all"]
    assert subprocess.run(status, check=True, capture_output=True, text=True).stdout == ""


def test_nothing_is_overwritten(alone, tmp_path):
    folder = tmp_path / "mediator"
    folder.mkdir()
    (folder / "mediator.service").write_text("mine")
    result = alone("quickstart")
    assert result.code == 1
    assert f"{folder}/mediator.service is there already; nothing was written" in result.err
    assert [path.name for path in folder.rglob("*")] == ["mediator.service"]
    (folder / "mediator.service").unlink()
    assert alone("quickstart").code == 0
    before = (folder / "mediator.toml").read_bytes()
    assert alone("quickstart").code == 1
    assert (folder / "mediator.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--user", "a b"), "expected different names"),
        (("--user", "../up"), "expected different names"),
        (("--user", "a", "--user", "a"), "expected different names"),
        (("--nats", "4222"), "expected HOST:PORT"),
        (("--http", "127.0.0.1:0"), "expected a port that clients can know"),
    ],
)
def test_what_cannot_be_set_up_is_refused(alone, tmp_path, arguments, said):
    result = alone("quickstart", *arguments)
    assert result.code == 2
    assert said in " ".join(result.err.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_a_unit_of_the_system_has_a_user_of_its_own(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    made = alone("quickstart", "--system", "--json").json
    unit = (tmp_path / "mediator" / "mediator.service").read_text()
    assert "User=mediator\n" in unit
    assert f"ReadWritePaths={made['data_dir']}\n" in unit
    assert made["start"] == [
        "useradd --system --no-create-home mediator",
        f"chown -R mediator: {tmp_path}/mediator",
        f"systemctl enable --now {tmp_path}/mediator/mediator.service",
    ]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_units_ask_for_few_rights(alone, tmp_path):
    """Below 2 of 10 in systemd's own measure of what a unit exposes."""
    made = alone("quickstart", "--system", "--json").json
    units = [made["unit"], *made["optional_units"]]
    assert systemd("verify", "--man=no", *units) == ""
    for unit in units:
        if unit.endswith(".service"):
            systemd("security", "--offline=yes", "--threshold=19", unit)


def systemd(*arguments: str) -> str:
    """Return what systemd-analyze objects to; it fails where the exposure is above the threshold."""
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=True).stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path):
    folder = tmp_path / "50% of $HOME"
    folder.mkdir()
    (tmp_path / "mediator.service").write_text(unit_text(["/bin/sh", "-c", str(folder)], folder, "root"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "mediator.service"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "mediator.service" not in checked.stderr
    (tmp_path / "mediator.service").write_text("[Service]\nExecStart=/bin/true\nNoSuch=1\n")
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "mediator.service"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "mediator.service" in checked.stderr
