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
NAMES = {"at": "moment", "group": "group_no"}
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
    from pipeline.reports.usage import update

    started = time.perf_counter()
    ingest(spark, source, lake)
    update(spark, lake)
    return time.perf_counter() - started


def _duckdb(source: Path, lake: Path) -> float:
    """Do the same with DuckDB, without transactions and without deduplication against existing rows."""
    import duckdb

    lake.mkdir()
    started = time.perf_counter()
    with duckdb.connect() as db:
        columns = dict.fromkeys(COLUMNS, "BIGINT[]") | {"instance": "VARCHAR", "seq": "BIGINT", "tenant": "VARCHAR"}
        unnested = ", ".join(f'unnest("{name}") as {NAMES.get(name, name)}' for name in COLUMNS)
        db.sql(
            f"""copy (select *, epoch_ms(moment)::date as date from (select instance, seq, tenant, {unnested}
                from read_json('{source}/0*.jsonl', format='newline_delimited', columns={columns})))
                to '{lake}/events' (format parquet, compression zstd, partition_by (date))"""
        )
        db.sql(f"create view events as select * from read_parquet('{lake}/events/*/*.parquet')")
        for name, query in _tables().items():
            db.sql(f"copy ({query}) to '{lake}/{name}.parquet' (format parquet, compression zstd)")
    return time.perf_counter() - started


def _tables() -> dict[str, str]:
    """Compute the three tables of the report with DuckDB."""
    hour = f"created_at // {HOUR}"
    kinds = ", ".join(f"count(*) filter (what = {what.value}) as n{what.value}" for what in EventType)
    waits = f"""select tenant, mailbox, {hour} as hour, msg_id,
        min(moment) filter (what in (7, 13)) - min(created_at) as given,
        min(moment) filter (what = 8) - min(created_at) as acked
        from events where what in (7, 8, 13) group by all"""
    quantiles = ", ".join(f"quantile_cont({wait}, [0.5, 0.95, 0.99]), count({wait})" for wait in ("given", "acked"))
    once = """select tenant, mailbox, msg_id, max(what) as what, max(bytes) as bytes, max(created_at) as moment
        from events where what in (4, 6) group by all
        union all select tenant, mailbox, msg_id, what, bytes, greatest(moment, created_at)
        from events where what not in (4, 6)"""
    counts = f"""select tenant, mailbox, moment // {HOUR} as hour, {kinds}, sum(bytes) filter (what in (4, 5)) as size
        from ({once}) group by all"""
    return {
        "usage_hourly": f"""select * from ({counts}) full join (select tenant, mailbox, hour, {quantiles}
            from ({waits}) group by tenant, mailbox, hour) using (tenant, mailbox, hour)""",
        "usage_waits": f"select tenant, hour, {quantiles} from ({waits}) group by grouping sets ((tenant, hour), hour)",
        "usage_groups": f"""select tenant, mailbox, group_no, {hour} as hour,
            count(distinct msg_id) filter (what in (7, 13)) as given,
            count(distinct msg_id) filter (what = 8) as acknowledged
            from events where what in (7, 8, 13) group by all""",
    }


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
