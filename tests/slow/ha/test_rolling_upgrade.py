"""A rolling upgrade under load: a newer instance migrates the database that an older one goes on serving (A8).

The newer program is this one with one more migration, which expands every table that the load uses as migrations may
(tests/integration/test_upgrades.py). So this one is the older: it is asked to work on a schema that it does not know.
"""

import base64
import random
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from mediator.parts import verify_checks
from mediator.store import migrate
from mediator.verify.report import verify
from tests.harness.client import Client
from tests.harness.core import make_settings
from tests.harness.load import Load
from tests.harness.postgres import Server
from tests.harness.service import Services

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(200)]

ANSWERS = 200
"""SENDs that are answered between two steps."""
NEWER = '''
"""What a later version may do: new tables, columns and indexes."""

TABLES = ("mailbox", "message", "delayed", "dedup", "consumer", "lease", "held", "journal_tail", "connection", "agent")


def up(migrator, db):
    db.execute_sql("CREATE TABLE later (no BIGINT PRIMARY KEY, text TEXT NOT NULL)")
    for table in TABLES:
        db.execute_sql(f"ALTER TABLE {table} ADD COLUMN later_text TEXT")
        db.execute_sql(f"ALTER TABLE {table} ADD COLUMN later_number BIGINT NOT NULL DEFAULT 7")
        db.execute_sql(f"CREATE INDEX later_{table} ON {table} (later_number)")
    # An index takes the place of another, with more columns.
    db.execute_sql("DROP INDEX message_expiry")
    db.execute_sql(
        "CREATE INDEX message_expiry ON message (expire_at, mailbox_no, msg_id, size, later_text)"
        " WHERE expire_at IS NOT NULL"
    )
'''
OVERLAY = """
from pathlib import Path

from mediator.store import migrate

migrate.FOLDER = Path({folder!r})
"""


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A folder that makes a program on whose path it is the newer one."""
    folder = shutil.copytree(migrate.FOLDER, tmp_path / "newer" / "migrations")
    (folder / "9000_later.py").write_text(NEWER)
    (tmp_path / "newer" / "sitecustomize.py").write_text(OVERLAY.format(folder=str(folder)))
    return tmp_path / "newer"


@pytest.mark.rule("A3", "A8", "S3", "K2", "K3")
async def test_instances_are_upgraded_one_by_one(
    postgres: Server, services: Services, stack: AsyncExitStack, newer: Path, tmp_path: Path
):
    url = stack.enter_context(postgres.database(migrated=True))
    nats = await services.nats_server()
    common = {"MEDIATOR_DIDCOMM__KEY": base64.b64encode(bytes(32)).decode(), "MEDIATOR_GATEWAY__ENABLED": "false"}
    instances = []
    for name in ("one", "two"):
        instances.append(services.new(name, database_url=url, nats_url=nats))
        instances[-1].environment |= common
        await instances[-1].serve()
    load, client = Load(random.Random("rolling"), "rolling"), await Client.connect(nats, connections=4, tries=10)
    stack.push_async_callback(client.close)
    await load.create(client)

    async def upgrade() -> None:
        for instance in instances:
            await load.answered(ANSWERS)
            instance.terminate()
            assert await instance.ended() == 0
            await load.answered(ANSWERS)
            instance.environment["PYTHONPATH"] = str(newer)
            await instance.serve()
            # Until the second is upgraded, an older and a newer one share the work.
            await load.answered(ANSWERS)
        assert all(instance.alive for instance in instances)

    await load.work(client, upgrade)
    await load.hold(client)
    assert [line for instance in instances for line in instance.complaints()] == []
    # An older one that is started now is told why it cannot be.
    late = services.new("late", database_url=url, nats_url=nats)
    late.start()
    assert await late.ended() == 2
    assert "newer than this program, which does not know 9000_later" in late.said()
    for instance in instances:
        instance.terminate()
        assert await instance.ended() == 0
    settings = make_settings(data_dir=tmp_path / "one-data", database_url=url)
    assert verify(settings, verify_checks(settings), lambda _title, _part: None).damage == []
