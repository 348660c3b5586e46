"""Parts of others: a package with an entry point adds a door without touching ours."""

import subprocess
import sys
from pathlib import Path

import nats
import orjson
import pytest

from mediator.operate.control import send_command
from tests.harness.service import Services
from tests.harness.waiting import PATIENCE

PART = '''
from contextlib import asynccontextmanager
from pathlib import Path

from mediator.settings.types import PartSettings
from mediator.parts import Part


class EchoSettings(PartSettings):
    """The echo door."""

    greeting: str = "hello"


class EchoPart(Part):
    name = "echo"
    migrations = Path(__file__).with_name("echo_migrations")

    def settings(self):
        return EchoSettings

    def add_commands(self, app):
        @app.command()
        def shout(text: str) -> None:
            """Say a text loudly."""
            print(text.upper())

    @asynccontextmanager
    async def open(self, host):
        from aiohttp import web

        from mediator.operate.operations import Operation, Right
        from mediator.operate.operations import TEXT, object_schema

        greeting = host.settings.section(EchoSettings).greeting

        async def say(tenant, data, room):
            return b'{"error": "", "said": "%s %s"}' % (greeting.encode(), tenant.encode())

        async def page(request):
            return web.Response(text=greeting)

        async def healthy():
            return None

        async def command(request):
            return {"said": greeting}

        host.add_verb("ECHO.SAY", "ECHO", say)
        host.app.router.add_get("/echo", page)
        host.add_health_check("echo", healthy)
        answer = object_schema(said=TEXT)
        host.operations.add(Operation("echo", command, Right.READ, "Say the greeting", answer, path="/echo"))
        yield


part = EchoPart()
'''


def install(folder: Path, name: str, target: str, module: str) -> None:
    """Put a package with an entry point into a folder, as an installer would."""
    (folder / f"{target.partition(':')[0]}.py").write_text(module)
    about = folder / f"{name}_door-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-door\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[mediator.parts]\n{name} = {target}\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder from which programs that the test starts import packages."""
    made = tmp_path / "site"
    made.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(made))
    return made


MIGRATION = """
def up(migrator, db):
    db.execute_sql("CREATE TABLE echo (said TEXT NOT NULL)")
"""


def mediator(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mediator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def test_part_of_others_adds_doors(folder: Path, services: Services) -> None:
    install(folder, "echo", "echo_door:part", PART)
    service = services.new()
    service.environment["MEDIATOR_ECHO__GREETING"] = "good day"
    await service.serve()
    client = await nats.connect(service.nats_url)
    reply = await client.request("$mq9.AI.ECHO.SAY", b"{}", timeout=PATIENCE)
    await client.close()
    assert orjson.loads(reply.data) == {"error": "", "said": "good day default"}
    assert await service.get("/echo") == (200, "good day")
    _, report = await service.get("/readyz")
    assert orjson.loads(report)["checks"]["echo"] == "ok"
    assert await send_command(service.data_dir, "echo") == {"error": "", "said": "good day"}


def test_part_of_others_adds_commands(folder: Path) -> None:
    install(folder, "echo", "echo_door:part", PART)
    assert "shout" in mediator("--help").stdout
    assert mediator("shout", "hey").stdout == "HEY\n"


def test_part_of_others_brings_tables(folder: Path, tmp_path: Path) -> None:
    install(folder, "echo", "echo_door:part", PART)
    (folder / "echo_migrations").mkdir()
    (folder / "echo_migrations" / "0001_echo.py").write_text(MIGRATION)
    migrate = ("migrate", "--data-dir", str(tmp_path / "data"))
    assert mediator(*migrate).stdout.splitlines()[-1] == "applied 0001_echo"
    assert mediator(*migrate).stdout == "the schema is up to date\n"


def test_broken_part_is_named(folder: Path) -> None:
    install(folder, "echo", "echo_door:part", "import nothing_of_this_name")
    failed = mediator("--help")
    assert failed.returncode == 2
    assert failed.stderr.startswith("mediator: part echo: echo_door:part of echo-door cannot be loaded")


def test_part_without_interface_is_named(folder: Path) -> None:
    install(folder, "echo", "echo_door:part", "part = 7")
    assert "part echo: echo_door:part of echo-door is no Part" in mediator("--help").stderr


def test_two_parts_of_one_name_are_named(folder: Path) -> None:
    install(folder, "registry", "other_registry:part", "part = None")
    failed = mediator("--help")
    assert failed.returncode == 2
    assert "part registry: both " in failed.stderr
    assert "other_registry:part of registry-door" in failed.stderr


def test_section_of_the_core_is_not_replaced(folder: Path) -> None:
    install(folder, "quotas", "echo_door:part", PART.replace('name = "echo"', 'name = "quotas"'))
    failed = mediator("check")
    assert failed.returncode == 2
    assert "part quotas: the core has an option of this name" in failed.stderr
