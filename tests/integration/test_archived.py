"""What the archive has leaves the outbox through the service, or in the store where none runs."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mediator.errors import SetupError, UnavailableError
from mediator.mailboxes.message import OutboxKey
from mediator.operate.store_access import ask_or_use_store
from mediator.settings.settings import Settings
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from pipeline import outbox as outbox_module
from pipeline.outbox import MAX_COPIES, ArchiveOperations, OutboxClient
from tests.harness.core import core, make_settings
from tests.harness.samples import add, put
from tests.harness.stores import migrated


def fill(data_dir: Path, count: int) -> list[OutboxKey]:
    """Let copies wait in a store that nobody holds afterwards, and return what names them."""
    store = SqliteStore(migrated(database_path(data_dir)))
    with store.transaction() as tx:
        mailbox = add(tx)
        message = put(tx, mailbox)
        for _ in range(count):
            tx.outbox.add(mailbox, message)
    store.close()
    return [OutboxKey(seq, mailbox.id, message.msg_id, message.created_at) for seq in range(1, count + 1)]


def backlog(data_dir: Path) -> int:
    store = SqliteStore(migrated(database_path(data_dir)))
    with store.reading() as tx:
        count = tx.outbox.backlog()
    store.close()
    return count


@pytest.mark.rule("S6")
def test_in_the_store_where_no_service_runs(tmp_path: Path) -> None:
    copies = fill(tmp_path, 9)
    outbox = OutboxClient(make_settings(data_dir=tmp_path))
    assert outbox.remove([]) == 0
    assert outbox.remove([copies[8], *copies[:2], copies[3]]) == 4
    assert outbox.remove(copies[:3]) == 1
    assert backlog(tmp_path) == 4
    with pytest.raises(SetupError, match="no database in"):
        OutboxClient(make_settings(data_dir=tmp_path / "none")).remove(copies[:1])


@pytest.mark.rule("S6")
async def test_through_the_service_in_requests_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = fill(tmp_path, 2 * MAX_COPIES + 10)
    asked: list[int] = []

    def counting(settings: Settings, command: str, fields: dict[str, Any], work: Any) -> Any:
        asked.append(len(fields["copies"]))
        return ask_or_use_store(settings, command, fields, work)

    monkeypatch.setattr(outbox_module, "ask_or_use_store", counting)
    async with core(tmp_path) as home:
        home.operations.add_methods(ArchiveOperations(home.broker))
        outbox = OutboxClient(make_settings(data_dir=tmp_path))
        assert await asyncio.to_thread(outbox.remove, copies[5:]) == len(copies) - 5
        assert asked == [MAX_COPIES, MAX_COPIES, 5]
        assert home.rows("outbox") == 5
        largest = [[2**63 - 1] * 4] * MAX_COPIES
        assert await home.ask("archive-remove", copies=largest) == {"error": "", "removed": 0}


@pytest.mark.rule("S6")
async def test_reads_of_another_store_cost_the_service_nothing(tmp_path: Path) -> None:
    """A data directory may have the file of a store from before its service went over to another one."""
    former = fill(tmp_path / "former", 3)
    fill(tmp_path / "now", 1)
    store = SqliteStore(database_path(tmp_path / "now"))
    with store.transaction() as tx:
        other = add(tx, "task.other")
        for _ in range(2):
            tx.outbox.add(other, put(tx, other, created_at=former[0].created_at + 1))
    store.close()
    async with core(tmp_path / "now") as home:
        home.operations.add_methods(ArchiveOperations(home.broker))
        await asyncio.to_thread(OutboxClient(make_settings(data_dir=tmp_path / "now")).remove, former[1:])
        assert home.rows("outbox") == 3


@pytest.mark.parametrize(
    "copies",
    [
        None,
        7,
        [7],
        [[1, 2, 3]],
        [[1, 2, 3, 4, 5]],
        [[-1, 1, 1, 1]],
        [["1", 2, 3, 4]],
        [[True, 2, 3, 4]],
        [[1, 2, 3, 2**63]],
        [[1, 2, 3, 4]] * (MAX_COPIES + 1),
    ],
)
async def test_what_cannot_be_copies_is_refused(tmp_path: Path, copies: Any) -> None:
    fill(tmp_path, 3)
    async with core(tmp_path) as home:
        home.operations.add_methods(ArchiveOperations(home.broker))
        answer = await home.ask("archive-remove", copies=copies)
        assert answer["error"].startswith("copies: expected ")
        assert home.rows("outbox") == 3


async def test_a_service_without_the_command_keeps_its_outbox(tmp_path: Path) -> None:
    copies = fill(tmp_path, 3)
    async with core(tmp_path) as home:
        with pytest.raises(UnavailableError, match="expected one of"):
            await asyncio.to_thread(OutboxClient(make_settings(data_dir=tmp_path)).remove, copies[:1])
        assert home.rows("outbox") == 3
