"""A disk that is full: ingest and archive say so, nothing is lost, and the next run goes on."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from mediator.errors import UnavailableError
from mediator.journal import events as told
from mediator.journal.segments import read_up_to
from mediator.store.sqlite import SqliteStore
from pipeline.lake.archive import ArchiveResult, archive, read_archive
from pipeline.lake.ingest import ingest
from pipeline.source.options import ReadOptions
from tests.slow.spark.journals import fill, held, row
from tests.slow.spark.test_archive import fill as fill_outbox
from tests.slow.spark.test_archive import remove, shown, waiting

FULL = "the lake .*: No space left on device$"
PAGE = 4096
ENOUGH = 64 << 20


class Disk:
    """A small disk of its own, in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def leave(self, size: int) -> None:
        """Have so many bytes left."""
        status = os.statvfs(self.folder)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        # Without a size it has no bounds.
        self.mount(f"remount,size={max(used + size, PAGE)}")

    def mount(self, options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "lake", self.folder]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("only root may make a disk")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk")
    made.folder.mkdir()
    made.mount(f"size={PAGE}")
    yield made
    subprocess.run(["umount", "--lazy", made.folder], check=True)


def test_an_ingest_goes_on_when_there_is_room_again(spark: SparkSession, disk: Disk, tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", disk.folder / "lake"
    count = fill(journal, 2, lines=500)
    before = read_up_to(journal)
    # Nothing fits, then some of the tables, then all of them and some of a batch.
    for pages in (0, 1, 4, 7):
        disk.leave(pages * PAGE)
        with pytest.raises(UnavailableError, match=FULL):
            ingest(spark, journal, lake)
        assert read_up_to(journal) == before
    disk.leave(ENOUGH)
    assert ingest(spark, journal, lake).events == count
    assert sorted(held(lake)) == sorted(row(each) for each in told(journal))
    assert {str(path) for path in lake.glob("events/**/*.parquet")} == set(DeltaTable(lake / "events").file_uris())


@pytest.mark.rule("S6")
def test_an_archive_leaves_messages_in_the_outbox(spark: SparkSession, disk: Disk, tmp_path: Path) -> None:
    lake, store = disk.folder / "lake", SqliteStore(tmp_path / "mediator.db")
    sent = fill_outbox(store, 40)
    for pages in (0, 1, 6):
        disk.leave(pages * PAGE)
        with pytest.raises(UnavailableError, match=FULL):
            archive(spark, ReadOptions(data_dir=tmp_path), lake, None, remove(store))
        assert waiting(store) == len(sent)
    disk.leave(ENOUGH)
    assert archive(spark, ReadOptions(data_dir=tmp_path), lake, None, remove(store)) == ArchiveResult(
        messages=len(sent)
    )
    assert waiting(store) == 0
    store.close()
    assert shown(read_archive(spark, lake)) == sent
