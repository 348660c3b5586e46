"""The report over 30 days of 1 000 mailboxes, by DuckDB and by Spark, and again when one day more has come."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench import Bench, ResultRow, at_most, below, figure
from mediator.mailboxes.events import EventType

if TYPE_CHECKING:
    from pipeline.reports.engines import Engine
    from pipeline.reports.summary import UsageSummary

DAYS = 30
BOXES = 1_000
PER_DAY = 28_000
"""Messages of the busiest day, with three to four events each."""
WEEK = "[0.97, 0.85, 0.3, 0.2, 0.95, 1, 0.9]"
"""How much of it each day of the week has, beginning with a Thursday, 2026-01-01."""
START = 1_767_225_600_000
MILLISECONDS = 86_400_000
DUCKDB_SECONDS, SPARK_SECONDS = 20.0, 120.0
AGAIN = 0.2
MAX_BYTES = 500_000
CONF = (("spark.driver.memory", "3g"),)


def run(bench: Bench) -> Iterator[ResultRow]:
    if find_spec("pyspark") is None or find_spec("duckdb") is None:
        yield ResultRow("pipeline_report: not measured, Spark or DuckDB is not installed", "-")
        return
    days = 3 if bench.quick else DAYS
    source = bench.folder / "report-lake"
    bench.status(f"pipeline_report: write {days} days")
    fill(source, range(days))
    yield from _measure(bench, source, days, "DuckDB", DUCKDB_SECONDS)
    yield from _measure(bench, source, days, "Spark", SPARK_SECONDS)


def fill(lake: Path, days: range) -> None:
    """Add days of traffic to a lake: a few busy mailboxes and many quiet ones, by office hours, of three tenants."""
    from pipeline.lake import EVENTS as EVENTS_TABLE
    from pipeline.lake.delta import LakeTable, lock_lake
    from pipeline.reports.engines import duck_engine
    from pipeline.source.schema import EVENTS, PARTITION

    with lock_lake(lake, create=True), duck_engine() as engine:
        engine.define("drawn", _drawn(days), kept=True)
        table = LakeTable(lake / EVENTS_TABLE, EVENTS, PARTITION)
        name = f"{days.stop:020d}-bench"
        table.append_written(engine.writer(_events(), EVENTS), name, {"bench": days.stop})


def _drawn(days: range) -> str:
    """Return messages with pseudo-random mailboxes, times, waits and fates."""
    first, count = days.start * PER_DAY, len(days) * PER_DAY

    def draw(which: int) -> str:
        return f"(hash(id * 10 + {which}) % 1000000 / 1000000.0)"

    hours = "[7, 8, 8, 9, 9, 9, 10, 10, 10, 11, 11, 11, 12, 13, 13, 14, 14, 14, 15, 15, 16, 16, 17, 18, 20, 22, 1, 4]"
    return f"""
        SELECT
            id, 1 + CAST(floor({BOXES} * pow({draw(1)}, 2.5)) AS BIGINT) AS mailbox,
            {START} + CAST(id // {PER_DAY} AS BIGINT) * {MILLISECONDS}
                + {hours}[1 + CAST(floor(28 * {draw(2)}) AS INT)] * 3600000
                + CAST(floor(3600000 * {draw(3)}) AS BIGINT) AS created,
            CAST(200 + 3000 * pow({draw(4)}, 4) AS BIGINT) AS bytes,
            CAST(exp(4 + 8 * {draw(5)} + 3 * pow({draw(6)}, 6)) AS BIGINT) AS wait,
            {draw(7)} AS fate
        FROM range({first}, {first + count}) AS numbers(id)
        WHERE {draw(8)} < {WEEK}[1 + CAST(id // {PER_DAY} % 7 AS INT)]"""


def _events() -> str:
    kinds = {
        EventType.STORED: ("created", "true"),
        EventType.LEASED: ("created + wait", "fate < 0.93 AND mailbox % 41 <> 0"),
        EventType.ACKNOWLEDGED: ("created + 2 * wait + 700", "fate < 0.90 AND mailbox % 41 <> 0"),
        EventType.DELETED: ("created + 2 * wait + 700", "fate < 0.90 AND mailbox % 41 <> 0 AND mailbox % 3 > 0"),
        EventType.DEAD: ("created + 3 * wait + 60000", "fate BETWEEN 0.90 AND 0.902 AND mailbox % 41 <> 0"),
        EventType.EXPIRED: ("created + 86400000", "fate > 0.985"),
    }
    events = [
        f"""SELECT 'bench' AS instance, id * 10 + {kind.value} AS seq, 0 AS position,
            CASE WHEN mailbox % 5 = 0 THEN 'partners' WHEN mailbox % 7 = 0 THEN 'wallets' ELSE 'default' END AS tenant,
            timestamp_millis({at}) AS happened_at, {kind.value} AS what, mailbox, 2 AS lane, id AS msg_id, bytes,
            {"NULL" if kind is EventType.DEAD else "timestamp_millis(created)"} AS created_at,
            {0 if kind in (EventType.STORED, EventType.DELETED, EventType.EXPIRED) else 5} AS group_no,
            CAST(timestamp_millis({at}) AS DATE) AS date FROM drawn WHERE {which}"""
        for kind, (at, which) in kinds.items()
    ]
    return " UNION ALL ".join(events)


def _measure(bench: Bench, source: Path, days: int, name: str, limit: float) -> Iterator[ResultRow]:
    from pipeline.reports.engines import duck_engine, spark_engine
    from pipeline.reports.page import LocalClock, page
    from pipeline.session import session_scope

    lake = bench.folder / f"report-{name.lower()}"
    shutil.copytree(source, lake)
    with ExitStack() as stack:
        if name == "Spark":
            spark = stack.enter_context(session_scope(conf=CONF, name="benchmark"))
            engine: Engine = stack.enter_context(spark_engine(spark))
        else:
            engine = stack.enter_context(duck_engine())
        bench.status(f"pipeline_report: {days} days by {name}")
        first, told = _report(engine, lake)
        fill(lake, range(days, days + 1))
        bench.status(f"pipeline_report: one day more by {name}")
        second, _ = _report(engine, lake)
    yield below(f"report on {days} days of {BOXES:,} mailboxes, {name}", "s", [first], limit)
    yield at_most(f"the same with one new day / the first, {name}", "s", [second], [first], AGAIN)
    if name == "DuckDB":
        size = len(page(told, LocalClock(), {}).encode())
        yield below("its page", "bytes", [float(size)], MAX_BYTES)
        yield figure("messages in it", "messages", [float(told.totals["sent"])])


def _report(engine: "Engine", lake: Path) -> tuple[float, "UsageSummary"]:
    """Do what the command does, but for starting."""
    from pipeline.reports.engines import duck_engine
    from pipeline.reports.page import LocalClock, page
    from pipeline.reports.summary import span_of, summarize
    from pipeline.reports.usage import define_tables, hours, update

    started = time.perf_counter()
    update(engine, lake)
    with duck_engine() as tables:
        define_tables(tables, lake)
        told = summarize(tables, span_of(hours(lake), None, None))
    page(told, LocalClock(), {})
    return time.perf_counter() - started, told
