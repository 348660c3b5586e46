"""What the archive has leaves the outbox through the service, or in the store where none runs."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mediator.errors import SetupError, UnavailableError
from mediator.housekeeping import archived
from mediator.housekeeping.archived import MAX_RANGES, REMOVED_AT_ONCE, Outbox
from mediator.operators.archive import ArchiveOperating
from mediator.operators.control import MAX_REQUEST
from mediator.settings import Settings
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from tests.conformance.samples import add, put
from tests.integration.house import house


def fill(data_dir: Path, count: int) -> None:
    """Let copies wait under the numbers from 1 on, in a store that nobody holds afterwards."""
    store = SqliteStore(database_path(data_dir))
    with store.transaction() as tx:
        mailbox = add(tx)
        message = put(tx, mailbox)
        for _ in range(count):
            tx.outbox.add(mailbox, message)
    store.close()


def backlog(data_dir: Path) -> int:
    store = SqliteStore(database_path(data_dir))
    with store.reading() as tx:
        count = tx.outbox.backlog()
    store.close()
    return count


@pytest.mark.rule("S6")
def test_in_the_store_where_no_service_runs(tmp_path: Path) -> None:
    fill(tmp_path, 9)
    outbox = Outbox(Settings(data_dir=tmp_path))
    assert outbox.remove([]) == 0
    assert outbox.remove([9, 1, 2, 4]) == 4
    assert outbox.remove([1, 2, 3]) == 1
    assert backlog(tmp_path) == 4
    with pytest.raises(SetupError, match="no database in"):
        Outbox(Settings(data_dir=tmp_path / "none")).remove([1])


@pytest.mark.rule("S6")
async def test_through_the_service_in_requests_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = REMOVED_AT_ONCE + 2 * MAX_RANGES + 10
    fill(tmp_path, count)
    asked: list[int] = []
    turn = archived.Owner.turn

    def counting(self: Any, command: str, fields: dict[str, Any], here: Any) -> Any:
        asked.append(len(fields["ranges"]))
        return turn(self, command, fields, here)

    monkeypatch.setattr(archived.Owner, "turn", counting)
    async with house(tmp_path) as home:
        ArchiveOperating(home.broker).register(home.control)
        outbox = Outbox(Settings(data_dir=tmp_path))
        assert await asyncio.to_thread(outbox.remove, range(1, REMOVED_AT_ONCE + 2)) == REMOVED_AT_ONCE + 1
        odd = range(REMOVED_AT_ONCE + 2, count, 2)
        assert await asyncio.to_thread(outbox.remove, odd) == len(odd)
        assert asked == [1, 1, MAX_RANGES, 4]
        assert home.rows("outbox") == count - REMOVED_AT_ONCE - 1 - len(odd)
    assert len(str([[2**62, 2**62]] * MAX_RANGES)) < MAX_REQUEST


@pytest.mark.parametrize(
    "ranges",
    [
        None,
        7,
        [7],
        [[1]],
        [[1, 2, 3]],
        [[2, 1]],
        [[-1, 1]],
        [["1", 2]],
        [[True, 2]],
        [[1, 2**63]],
        [[1, REMOVED_AT_ONCE + 1]],
    ],
)
async def test_what_cannot_be_ranges_is_refused(tmp_path: Path, ranges: Any) -> None:
    fill(tmp_path, 3)
    async with house(tmp_path) as home:
        ArchiveOperating(home.broker).register(home.control)
        answer = await home.ask("archive-remove", ranges=ranges)
        assert answer["error"].startswith("ranges: expected ")
        assert home.rows("outbox") == 3


async def test_a_service_that_does_not_know_the_command_keeps_its_outbox(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    async with house(tmp_path) as home:
        with pytest.raises(UnavailableError, match="expected one of"):
            await asyncio.to_thread(Outbox(Settings(data_dir=tmp_path)).remove, [1])
        assert home.rows("outbox") == 3
