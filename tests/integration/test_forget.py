"""``mediator forget``: afterwards the bytes of a mailbox's mail are in no file below the data directory."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mediator.broker import Broker
from mediator.cli import main
from mediator.errors import BadRequestError
from mediator.journal.writer import JournalWriter
from mediator.mailboxes import copying, sending
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.copy_rule import CopyRule
from mediator.mailboxes.message import Draft
from mediator.mailboxes.querying import Query
from mediator.mailboxes.sending import Send
from mediator.mailboxes.session import SHARE_FROM
from mediator.metrics import Metrics
from mediator.operate.audit import AuditLog
from mediator.operate.forgetting import Forgetting
from mediator.operate.mailbox_operations import MailboxOperations, find_address
from mediator.operate.operations import Actor, Operations, Right
from mediator.parts import cleanup_steps, find_parts
from mediator.store.base import Store
from mediator.store.opening import DATABASE_FILE
from mediator.store.sqlite import SqliteStore
from registry.tables import RegistryTables
from tests.harness.agents import Agency
from tests.harness.broker import HOUR
from tests.harness.core import make_settings
from tests.harness.mediation import Mediation, key
from tests.harness.postgres import Server
from tests.harness.stores import ram_path
from tests.harness.verified import verify_all

TENANT = "default"
SECRET, OTHERS = b"nobody must ever read this again", b"this stays where it is"
ADDRESS = "secret.inbox"


def furnish(store: Store) -> str:
    """Put mail of two mailboxes wherever there can be some; return the address of a wallet's mailbox."""
    mail = Mediation(store)
    mail.create("audit")
    for name, of in (("all", ">"), ("one", ADDRESS)):
        rule = CopyRule(TENANT, name, "audit", of)
        mail.run(lambda tx: copying.add_rule(tx, rule, mail.now))  # noqa: B023
    for address, text in ((ADDRESS, SECRET), ("other", OTHERS)):
        mail.create(address, public=True)
        for number in range(200):
            mail.send(b"%d %b" % (number, text), to=address, headers={"h": text.decode()}, dedup_id=f"d{number}")
        mail.send(text, to=address, delay=HOUR)
        mail.send(text, to=address, delay=HOUR, archive=True)
        mail.send(text, to=address, archive=True)
        mail.take(box=address, num_msgs=3, ack_wait=1000, max_deliver=1)
    mail.advance(2000)
    mail.take(box=ADDRESS, num_msgs=3, ack_wait=1000)
    large = SECRET * (SHARE_FROM // len(SECRET) + 1)
    mail.create("also.secret")
    shared = [Send(TENANT, box, Draft(large)) for box in (ADDRESS, "also.secret")]
    mail.run(lambda tx: [sending.send(tx, mail.bounds, mail.quotas, each, mail.now) for each in shared])
    holder = mail.holder(1, key(2))
    mail.forward([key(2)], SECRET)
    agency = Agency(store, now=mail.now)
    for address, text in ((ADDRESS, SECRET), ("other", OTHERS)):
        agency.register(address, "name", text.decode())
    return mail.mailbox_of(holder).address


def files_with(data_dir: Path, *texts: bytes) -> list[str]:
    """Return the files below a directory that have one of the texts."""
    files = [path for path in data_dir.rglob("*") if path.is_file()]
    return [path.name for path in files if any(text in path.read_bytes() for text in texts)]


@asynccontextmanager
async def forgetting(store: Store, data_dir: Path) -> AsyncIterator[tuple[Broker, Forgetting]]:
    """Do as a service does."""
    settings = make_settings(data_dir=data_dir)
    journal = JournalWriter(settings.journal, data_dir, "test", Metrics())
    broker = Broker(store, Bounds(), observers=[journal.observe])
    try:
        await journal.start(broker)
        yield broker, Forgetting(broker, cleanup_steps(settings), [part.forget_address for part in find_parts()])
    finally:
        await journal.stop()
        await broker.close()


@pytest.fixture
def data_dir() -> Path:
    """A data directory on a RAM disk."""
    return ram_path().parent


def forget(*options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    monkeypatch.setattr("sys.argv", ["mediator", "forget", *options, "--yes", "--json"])
    with pytest.raises(SystemExit):
        main()
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


async def act(data_dir: Path, address: str) -> None:
    """Let an operator do something to the mailbox, and fail at something, which the audit log keeps."""
    with closing(SqliteStore(data_dir / DATABASE_FILE)) as store:
        broker = Broker(store, Bounds())
        operations = Operations(AuditLog(broker, "here").record, partial(find_address, broker))
        operations.add_methods(MailboxOperations(broker, ["default"]))
        owner = Actor("ada", frozenset(Right), "socket")
        await operations.run(owner, "mailbox-set", {"mail_address": address, "ack_wait_ms": 1000})
        with pytest.raises(BadRequestError):
            await operations.run(owner, "mailbox-set", {"mail_address": address, "ack_wait_ms": 1})
        await broker.close()


def test_the_command_leaves_no_byte_of_it(data_dir: Path, monkeypatch, capsys):
    with closing(SqliteStore(data_dir / DATABASE_FILE)) as store:
        wallet = furnish(store)
    asyncio.run(act(data_dir, ADDRESS))
    capsys.readouterr()
    assert files_with(data_dir, SECRET) == ["mediator.db"]
    answers = [
        forget(address, "--data-dir", str(data_dir), monkeypatch=monkeypatch, capsys=capsys)
        for address in (ADDRESS, "also.secret", wallet, "never.was")
    ]
    assert [answer["error"] for answer in answers] == [""] * 4
    assert answers[0]["removed"] == {
        "agents": 1, "archive_copies": 1, "board_entries": 1, "dedup_ids": 200, "delayed": 2,
        "groups_and_leases": 7, "mailboxes": 1, "messages": 202, "copies": 202, "copy_rules": 1,
    }  # fmt: skip
    assert answers[2]["removed"] == {"connections": 1, "copies": 1, "keys": 1, "mailboxes": 1, "messages": 1}
    assert [answer["left"] for answer in answers] == [[]] * 4
    assert not answers[3]["removed"]
    assert files_with(data_dir, SECRET, ADDRESS.encode(), wallet.encode()) == []
    assert files_with(data_dir, OTHERS) == ["mediator.db"]
    assert not verify_all(data_dir).damage


async def test_a_running_service_forgets_beside_its_senders(data_dir: Path):
    with closing(SqliteStore(data_dir / DATABASE_FILE)) as store:
        wallet = furnish(store)
        async with forgetting(store, data_dir) as (broker, service):
            await broker.send(Send(TENANT, ADDRESS, Draft(SECRET)))
            assert "mediator.db-wal" in files_with(data_dir, SECRET)
            for address in (ADDRESS, "also.secret", wallet):
                answer = await service.forget(TENANT, address)
                assert len(answer["left"]) == 1
                await broker.send(Send(TENANT, "other", Draft(OTHERS)))
            assert files_with(data_dir, SECRET, wallet.encode()) == []
            assert len(await broker.query(Query(TENANT, "other", limit=1000))) == 204
            with pytest.raises(BadRequestError, match="send-only"):
                await service.forget(TENANT, await broker.read(lambda tx, _now: send_only(tx)))
    assert not verify_all(data_dir).damage


async def test_two_that_forget_at_once_leave_no_payload(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    with closing(SqliteStore(data_dir / DATABASE_FILE)) as store:
        mail = Mediation(store)
        for name in ("short", "long", "other"):
            mail.create(name)
        # Pages with rows that stay are not emptied as a whole.
        sends = [Send(TENANT, name, Draft(text)) for name, text in (("long", SECRET), ("other", OTHERS))] * 4000
        mail.run(lambda tx: [sending.send(tx, mail.bounds, mail.quotas, each, mail.now) for each in sends])
        async with forgetting(store, data_dir) as (_, service):
            last_step, reached = service.forget_copies, asyncio.Event()

            async def tell(*given: Any) -> int:
                reached.set()
                return await last_step(*given)

            monkeypatch.setattr(service, "forget_copies", tell)
            first = asyncio.create_task(service.forget(TENANT, "short"))
            await reached.wait()
            await asyncio.gather(first, service.forget(TENANT, "long"))
            assert files_with(data_dir, SECRET) == []


def send_only(tx: Any) -> str:
    return str(tx.mailboxes.send_only(tx.mailboxes.find(TENANT, "other")))


@pytest.mark.postgres
async def test_rows_are_gone_from_postgresql(tmp_path: Path, postgres: Server):
    from mediator.store.postgres import PostgresStore

    with postgres.database(migrated=True) as url, closing(PostgresStore(url)) as store:
        furnish(store)
        async with forgetting(store, tmp_path) as (broker, service):
            answer = await service.forget(TENANT, ADDRESS)
            again = await service.forget(TENANT, ADDRESS)
            left = await broker.read(
                lambda tx, _now: [
                    tx.session.one(f"SELECT count(*) FROM {table} WHERE payload LIKE ?", (b"%" + SECRET + b"%",))[0]
                    for table in ("message", "delayed", "outbox")
                ]
            )
            agent = await broker.read(lambda tx, _now: tx.table(RegistryTables).agents.find(TENANT, ADDRESS))
    assert answer["removed"]["messages"] == 202
    assert answer["removed"]["agents"] == 1
    assert "VACUUM FULL" in answer["left"][0]
    assert again["removed"] == {}
    assert left == [2, 0, 0]  # the wallet's, and its copy
    assert agent is None
