"""The sdist and the wheel, installed where nothing else is: every door works from the wheel alone."""

import asyncio
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.service import Service

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = ("mediator", "pickup", "registry", "pipeline")
CARD = '{"mailbox": "post.opener", "name": "Letter Opener", "description": "Sorts scanned post by sender."}'

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist, made from the checkout, and of the wheel, made from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of an environment that has the wheel and what its server asks for."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=True)
    wheel = next(built.glob("*.whl"))
    subprocess.run([environment / "bin" / "pip", "install", "--quiet", f"{wheel}[server]"], check=True)
    return environment / "bin"


class Installed(Service):
    """The service of an installed wheel."""

    def __init__(self, scripts: Path, folder: Path) -> None:
        super().__init__("installed", folder)
        self.scripts = scripts
        self.folder = folder

    @property
    def command(self) -> list[str]:
        return [str(self.scripts / "mediator"), *super().command[3:]]

    def run(self, *arguments: str, stdin: str = "") -> str:
        """Run a command of the wheel against the service, and return what it prints."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MEDIATOR_", "PYTHON"))}
        ran = subprocess.run(
            [self.scripts / "mediator", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env={**clean, "MEDIATOR_DATA_DIR": str(self.data_dir)},
        )
        assert ran.returncode == 0, ran.stderr + self.tail()
        return ran.stdout


@pytest.fixture(scope="module")
def service(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    running = Installed(installed, tmp_path_factory.mktemp("service"))
    running.start()
    try:
        asyncio.run(running.ready())
        yield running
    finally:
        running.discard()


def test_the_wheel_holds_types_and_migrations(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    migrations = {f"mediator/_migrations/{file.name}" for file in (ROOT / "migrations").glob("[0-9]*.py")}
    assert migrations
    assert migrations <= names
    assert {name.split("/")[0] for name in names} == {*PACKAGES, f"agent_mediator-{VERSION}.dist-info"}


def test_the_sdist_holds_what_a_contributor_needs(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "tests/conftest.py"} <= names


def test_the_installed_command_tells_its_version(installed: Path) -> None:
    shown = subprocess.run([installed / "mediator", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["mediator", VERSION]


def test_mail_passes_the_nats_door_of_the_wheel(service: Installed) -> None:
    service.run("mailbox", "create", "agent.inbox")
    service.run("send", "agent.inbox", "translate this", "--priority", "urgent")
    assert "translate this" in service.run("fetch", "agent.inbox", "--group", "workers", "--deliver", "earliest")


@pytest.mark.parametrize("version", ["--v1", "--v2"])
def test_a_wallet_passes_the_didcomm_door_of_the_wheel(service: Installed, version: str) -> None:
    assert "picked up" in service.run("try", version)


def test_an_agent_is_found_in_the_registry_of_the_wheel(service: Installed) -> None:
    service.run("mailbox", "create", "post.opener")
    service.run("agent", "register", "-", stdin=CARD)
    assert "Letter Opener" in service.run("agent", "discover", "scanned post")
