"""From journal to report: Spark compared with DuckDB on the same files, and the rows read by the tenth run."""

import itertools
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench import Bench, ResultRow, at_most, number
from mediator.journal.segments import COLUMNS, encode
from mediator.mailboxes.events import Event, EventType

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIZES = (1_000_000, 5_000_000)
QUICK_SIZES = (30_000, 300_000)
BOXES = 200
LINE = 100
FILE = 200_000
"""Events; about ten megabytes."""
START = 1_767_225_600_000
HOUR = 3_600_000
DAYS = 2
RUNS = 10
READ = 1.1
NAMES = {"at": "moment", "created_at": "created", "group": "group_no"}
"""Columns whose names mean something in SQL."""
CONF = (("spark.driver.memory", "3g"),)


def run(bench: Bench) -> Iterator[ResultRow]:
    if find_spec("pyspark") is None or find_spec("duckdb") is None:
        yield ResultRow("pipeline: not measured, Spark or DuckDB is not installed", "-")
        return
    from pipeline.session import session_scope

    with session_scope(conf=CONF, name="benchmark") as spark:
        yield from _beside(bench, spark)
        yield _tenth(bench, spark)


def journal(folder: Path, events: int, first: int = 0, days: int = DAYS) -> None:
    """Write sealed journal files of complete message lifecycles: stored, leased, acknowledged."""
    folder.mkdir(parents=True, exist_ok=True)
    seqs = itertools.count(1 + first)
    step = days * 24 * HOUR / events
    for start in range(first, first + events, FILE):
        lines: list[bytes] = []
        numbers = range(start, min(start + FILE, first + events), LINE)
        for line in numbers:
            events_of_line = [_event(at, step) for at in range(line, min(line + LINE, first + events))]
            lines.append(encode(events_of_line, instance="bench", seqs=seqs, after=None, mark=None)[0])
        (folder / f"{start + 1:020d}-bench.jsonl").write_bytes(b"".join(lines))


def _event(place: int, step: float) -> Event:
    message, kind = divmod(place, 3)
    created_at = START + int(message * 3 * step)
    what = (EventType.STORED, EventType.LEASED, EventType.ACKNOWLEDGED)[kind]
    box, msg_id = message % BOXES, message // BOXES
    at = created_at + kind * (500 + message * 7919 % 5_000)
    return Event(what, at, "default", 1 + box, 2, msg_id, 256, created_at, 1 + box if kind else 0)


def _beside(bench: Bench, spark: "SparkSession") -> Iterator[ResultRow]:
    """Take turns at each size and extrapolate from which size on Spark would be faster."""
    points: list[tuple[int, float, float]] = []
    for events in QUICK_SIZES if bench.quick else SIZES:
        source = bench.folder / f"journal{events}"
        bench.status(f"pipeline: write {events:,} events")
        journal(source, events)
        ours, theirs = [], []
        # The first round warms up the JVM.
        for turn in range(bench.rounds + 1):
            bench.status(f"pipeline: {events:,} events, round {turn} of {bench.rounds}")
            (source / "read.json").unlink(missing_ok=True)
            spent = _spark(spark, source, bench.folder / f"lake{events}-{turn}")
            other = _duckdb(source, bench.folder / f"duck{events}-{turn}")
            if turn:
                ours.append(spent)
                theirs.append(other)
        points.append((events, sorted(ours)[len(ours) // 2], sorted(theirs)[len(theirs) // 2]))
        ratio = points[-1][1] / points[-1][2]
        claim = f"ingest and report tables, {events:,} events / DuckDB"
        yield ResultRow(claim, number(points[-1][1], "s"), number(points[-1][2], "s"), f"{ratio:.2f}×")
    yield ResultRow("ingest and report tables, Spark is ahead of DuckDB", _crossing(*points))


def _crossing(small: tuple[int, float, float], large: tuple[int, float, float]) -> str:
    """Fit a line through the two sizes of each side and intersect them."""
    spark, duckdb = ((large[which] - small[which]) / (large[0] - small[0]) for which in (1, 2))
    ahead = (small[1] - spark * small[0]) - (small[2] - duckdb * small[0])
    if spark >= duckdb:
        return "at no size on this machine"
    return f"from {ahead / (duckdb - spark):,.0f} events on"


def _spark(spark: "SparkSession", source: Path, lake: Path) -> float:
    from pipeline.lake.ingest import ingest
    from pipeline.reports.engines import spark_engine
    from pipeline.reports.usage import update

    started = time.perf_counter()
    ingest(spark, source, lake)
    with spark_engine(spark) as engine:
        update(engine, lake)
    return time.perf_counter() - started


def _duckdb(source: Path, lake: Path) -> float:
    """Do the same with DuckDB, without transactions and without deduplication against existing rows."""
    from pipeline.reports.engines import duck_engine
    from pipeline.reports.usage import TABLES, define_event_views, read_sql
    from pipeline.source.schema import EVENTS, PARTITION

    started = time.perf_counter()
    with duck_engine() as engine:
        columns = dict.fromkeys(COLUMNS, "BIGINT[]") | {"instance": "VARCHAR", "seq": "BIGINT", "tenant": "VARCHAR"}
        unnested = ", ".join(f'unnest("{name}") as {NAMES.get(name, name)}' for name in COLUMNS)
        engine.define(
            "journal_events",
            f"""select * exclude (moment, created), timestamp_millis(moment) as happened_at, 0 as position,
                timestamp_millis(created) as created_at, timestamp_millis(moment)::date as date
                from (select instance, seq, tenant, {unnested}
                from read_json('{source}/0*.jsonl', format='newline_delimited', columns={columns}))""",
            kept=True,
        )
        engine.writer("select * from journal_events", EVENTS)(lake, "events", PARTITION)
        define_event_views(engine)
        for name, schema in TABLES.items():
            engine.writer(read_sql(name), schema)(lake, name, PARTITION)
    return time.perf_counter() - started


def _tenth(bench: Bench, spark: "SparkSession") -> ResultRow:
    """Run ingest and report ten times, with one new day of the same size each."""
    events = (30_000 if bench.quick else 300_000) // LINE * LINE
    source, lake = bench.folder / "days", bench.folder / "days-lake"
    rows = []
    for turn in range(RUNS):
        bench.status(f"pipeline: day {turn + 1} of {RUNS}")
        journal(source, events, first=turn * events, days=1)
        before = _rows_read(spark)
        _spark(spark, source, lake)
        rows.append(_rows_read(spark) - before)
    return at_most("rows read by the tenth run / the first", "rows", [float(rows[-1])], [float(rows[0])], READ)


def _rows_read(spark: "SparkSession") -> int:
    """Return how many rows the tasks of this session have read from files."""
    context: Any = spark.sparkContext
    # The listener bus is asynchronous.
    context._jsc.sc().listenerBus().waitUntilEmpty()
    stages = context._jsc.sc().statusStore().stageList(None, False, False, context._gateway.new_array(
        context._jvm.double, 0), None)  # fmt: skip
    return sum(stages.apply(place).inputRecords() for place in range(stages.size()))
