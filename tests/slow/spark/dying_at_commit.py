"""A program for the tests to kill: an ingest into an object store that stands still beside the commit of its events."""

import json
import sys
from pathlib import Path
from threading import Event
from typing import Any

from pipeline.lake import EVENTS, ObjectPlace
from pipeline.lake.delta import LakeTable
from pipeline.lake.ingest import ingest
from pipeline.session import session
from tests.harness.spark import small


class StandingTable(LakeTable):
    """Stands still before or after it commits the events."""

    at = ""

    def commit(self, *arguments: Any) -> None:
        of_events = str(self.path).endswith(f"/{EVENTS}")
        if self.at == "after" or not of_events:
            super().commit(*arguments)
        if of_events:
            print("it stands", flush=True)
            Event().wait()


def main(journal: str, stops: str) -> None:
    """Ingest, up to the kill."""
    given = json.loads(Path(stops).read_bytes())
    StandingTable.at = given["at"]
    sys.modules[ingest.__module__].LakeTable = StandingTable  # type: ignore[attr-defined]
    spark = session(master="local[2]", conf=list(small().items()), name="dying")
    ingest(spark, Path(journal), ObjectPlace(given["url"], tuple(given["options"].items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
