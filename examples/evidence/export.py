"""Copies the usage tables of a lake into a DuckDB file, from which Evidence makes its pages.

The lake is as `mediator pipeline report` left it: that command brings the tables up to date::

    mediator pipeline report
    python examples/evidence/export.py [mediator-data/lake]

The tables name tenants, mailboxes by number, and hours: neither addresses nor payloads.
"""

import sys
from pathlib import Path

import duckdb
from deltalake import DeltaTable

TABLES = ("usage_groups", "usage_hourly", "usage_messages", "usage_waits")
LAKE = Path(sys.argv[1] if len(sys.argv) > 1 else "mediator-data/lake")
FILE = Path(__file__).parent / "sources" / "lake" / "lake.duckdb"


def main() -> None:
    """Replace the file, which Evidence may be reading."""
    new = FILE.with_suffix(".new")
    new.unlink(missing_ok=True)
    with duckdb.connect() as database:
        # Evidence has a DuckDB of its own, which may be older.
        database.execute(f"ATTACH '{new}' AS file (STORAGE_VERSION 'v1.0.0')")
        for name in TABLES:
            database.register("rows", DeltaTable(LAKE / name).to_pyarrow_dataset())
            database.execute(f"CREATE TABLE file.{name} AS SELECT * FROM rows")
            database.unregister("rows")
    new.replace(FILE)
    print(f"{FILE}: {', '.join(TABLES)}")


if __name__ == "__main__":
    main()
