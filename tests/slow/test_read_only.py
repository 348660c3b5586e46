"""A database in a directory that cannot be written is read as it is, and is not called damaged."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from tests.integration.test_verify import TENANT, fill, opened

MOUNT = 'mount --bind "$1" "$2" && mount -o remount,ro,bind "$2" && shift 2 && exec "$@"'
COMMAND = (sys.executable, "-m", "mediator")
COUNT = """
import sys
from pathlib import Path
from pipeline.source.options import parse
from pipeline.source.database import SqliteDatabase
database = SqliteDatabase(parse({"data.dir": sys.argv[1]}))
print(database.table("SELECT count(*) AS n FROM message").to_pylist()[0]["n"], flush=True)
sys.stdin.read()
database.close()
"""
VERIFY = """
import sys
from pathlib import Path
from mediator.store.snapshots import open_snapshots
database = open_snapshots(Path(sys.argv[1]), None)
with database.open() as ask:
    print(ask("SELECT count(*) FROM message", ())[0][0], flush=True)
sys.stdin.read()
database.close()
"""


class Mounted:
    """A folder, and a place where commands see it mounted read-only."""

    def __init__(self, folder: Path, place: Path) -> None:
        self._namespace = ("unshare", "-m", "sh", "-c", MOUNT, "sh", str(folder), str(place))
        self.place = place

    def start(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([*self._namespace, *command], text=True, stdin=pipe, stdout=pipe, stderr=pipe)

    def run(self, *command: str) -> tuple[int, str]:
        """Return exit status and output."""
        process = self.start(*command)
        out, err = process.communicate()
        return process.returncode, out + err

    def doctor(self) -> list[str]:
        """Return the findings that concern the database."""
        _, out = self.run(*COMMAND, "doctor", "--json", "--data-dir", str(self.place))
        return [each["text"] for each in json.loads(out)["findings"] if "database" in each["text"].lower()]


@contextmanager
def reading(mounted: Mounted, script: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Run a script that prints how many messages there are, and closes the database when its input ends."""
    with mounted.start(sys.executable, "-c", script, str(mounted.place)) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield int(line), process


@pytest.fixture
async def mounted(tmp_path: Path) -> Mounted:
    """A database of a service that was stopped."""
    for name in ("data", "place"):
        (tmp_path / name).mkdir(mode=0o700)
    found = Mounted(tmp_path / "data", tmp_path / "place")
    status, out = found.run("true")
    if status:
        pytest.skip(f"nothing can be mounted here: {out.strip()}")
    async with opened(tmp_path / "data") as broker:
        await fill(broker, 20)
    return found


def test_a_healthy_database_on_a_read_only_mount_is_read(mounted: Mounted, tmp_path: Path):
    pytest.importorskip("adbc_driver_sqlite", reason="needs the extra pipeline")
    assert mounted.doctor()[-1] == "The database is intact."
    status, out = mounted.run(*COMMAND, "verify", "--data-dir", str(mounted.place))
    assert (status, "nothing is damaged" in out) == (0, True), out
    file = tmp_path / "backup.tar"
    status, out = mounted.run(*COMMAND, "backup", str(file), "--data-dir", str(mounted.place))
    assert (status, "3 mailboxes with 1 message" in out) == (0, True), out
    with reading(mounted, COUNT) as (count, process):
        assert (count, process.communicate()) == (1, ("", ""))


def test_doctor_says_that_the_directory_cannot_be_written(mounted: Mounted):
    status, out = mounted.run(*COMMAND, "doctor", "--data-dir", str(mounted.place))
    assert status == 1
    assert f"{mounted.place} cannot be written" in out
    assert "damaged" not in out


async def test_a_read_only_mount_shows_what_a_running_service_has(mounted: Mounted, tmp_path: Path):
    async with opened(tmp_path / "data") as broker:
        await broker.send(Send(TENANT, "other", Draft(b"in the log alone")))
        for script in (VERIFY, COUNT):
            with reading(mounted, script) as (count, _):
                assert count == 2
        assert mounted.doctor()[-1] == "The database is intact."


async def test_a_log_that_cannot_be_read_is_no_damage(mounted: Mounted, tmp_path: Path):
    """A service was killed, and a copy has its log without the index that reading it needs."""
    data = tmp_path / "data"
    async with opened(data) as broker:
        await broker.send(Send(TENANT, "other", Draft(b"in the log alone")))
        for name in ("mediator.db", "mediator.db-wal"):
            shutil.copy(data / name, tmp_path)
    for name in ("mediator.db", "mediator.db-wal"):
        (tmp_path / name).replace(data / name)
    commands = ("verify",), ("backup", str(tmp_path / "backup.tar")), ("doctor",)
    for command in commands:
        status, out = mounted.run(*COMMAND, *command, "--data-dir", str(mounted.place))
        assert (status, f"{mounted.place} cannot be written, and mediator.db-wal may have mail" in out) == (1, True), (
            out
        )
        assert "damaged" not in out
    _, out = mounted.run(sys.executable, "-c", COUNT, str(mounted.place))
    assert "data.dir" in out
    assert "may have mail" in out


@pytest.mark.parametrize("script", [VERIFY, COUNT])
def test_what_a_service_changes_meanwhile_is_not_relied_on(mounted: Mounted, tmp_path: Path, script: str):
    with reading(mounted, script) as (_, process):
        with closing(SqliteStore(database_path(tmp_path / "data"))) as store, store.transaction() as tx:
            tx.write_heartbeat(5)
        assert "a service began to write to mediator.db while it was read" in process.communicate()[1]
