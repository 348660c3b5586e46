"""Removes a mailbox's messages from the archive, with the files that had them; it starts no Spark."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.lake import ARCHIVE as ARCHIVE_TABLE
from pipeline.lake import table_path
from pipeline.lake.archive import ARCHIVE, PARTITION
from pipeline.lake.delta import LakeTable
from pipeline.lake.folder import lock_lake

_WHOSE = ("tenant", "mailbox")


def forget(lake: Path, tenant: str, address: str) -> int:
    """Write the days that hold messages of a mailbox anew without them, and return how many messages there were.

    Files of before are deleted, and so is the table's log, whose statistics name addresses: there is no time travel to
    what was before. Sealed messages need no key. Raises as :func:`pipeline.lake.folder.lock_lake`.
    """
    with lock_lake(lake):
        table = LakeTable(table_path(lake, ARCHIVE_TABLE), ARCHIVE, PARTITION)
        days: dict[str, list[Path]] = {}
        for file in table.files():
            days.setdefault(str(file["partition"]), []).append(Path(file["path"]))
        removed = 0
        for day, paths in days.items():
            count = sum(_count(path, tenant, address) for path in paths)
            if count:
                table.rewrite(day, paths, lambda rows: rows.filter(pc.invert(_theirs(rows, tenant, address))))
                removed += count
        # Also where a former run was killed between its commits and this.
        table.drop_history()
        return removed


def _theirs(rows: pa.Table, tenant: str, address: str) -> pa.ChunkedArray:
    return pc.and_(pc.equal(rows["tenant"], tenant), pc.equal(rows["mailbox"], address))


def _count(path: Path, tenant: str, address: str) -> int:
    rows = pq.ParquetFile(path).read(columns=list(_WHOSE))
    return int(pc.sum(_theirs(rows, tenant, address).cast(pa.int64())).as_py() or 0)
