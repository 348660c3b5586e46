"""Mailboxes as frames: each row is what the domain says, whoever reads which part of it."""

import re
import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, LessThan

from mediator.errors import BadRequestError
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.message import Filter, Message
from mediator.mailboxes.querying import Query, query
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from pipeline.source.database import MessageRange, RowRange, sql_literal
from pipeline.source.datasource import register
from pipeline.source.mailboxes import BatchOffsets, MailboxReader, split_ranges, split_rows
from pipeline.source.options import BATCH, MAX_TIME, ReadOptions, parse
from pipeline.source.schema import NAMES
from tests.harness.postgres import Server
from tests.harness.samples import ALL, add, cut, get, put
from tests.slow.spark.conftest import OpenStore

MINUTE = 60_000
EVERYTHING = Filter()


@pytest.fixture
def now() -> int:
    return time.time_ns() // 1_000_000


@dataclass
class Kept:
    """A store that is open, as a running service's, and how a reader finds it."""

    store: Store
    option: str
    place: str
    spark: SparkSession

    def read(self, ddl: str | None = None, **options: str) -> DataFrame:
        reader = self.spark.read.format("mq9").option(self.option, self.place)
        if ddl is not None:
            reader = reader.schema(ddl)
        for name, value in options.items():
            reader = reader.option(name, value)
        return reader.load()

    def execute(self, statement: str) -> None:
        """Change the database behind the store's back."""
        if self.option == "data.dir":
            with closing(sqlite3.connect(Path(self.place) / "mediator.db", isolation_level=None)) as connection:
                connection.execute(statement)
            return
        import psycopg

        with psycopg.connect(self.place, autocommit=True) as server:
            server.execute(statement)


@pytest.fixture
def kept(open_store: OpenStore, spark: SparkSession) -> Kept:
    register(spark)
    return Kept(*open_store, spark)


def instant(milliseconds: int | None) -> datetime | None:
    """What Spark shows a time as."""
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds // 1000, UTC).replace(microsecond=milliseconds % 1000 * 1000)


def row(address: str, number: int, message: Message, tenant: str = "default") -> dict[str, Any]:
    """Return the row that a message must be."""
    return {
        "tenant": tenant,
        "mailbox": address,
        "mailbox_no": number,
        "msg_id": message.msg_id,
        "lane": message.lane.name.lower(),
        "key": message.key,
        "tags": list(message.tags),
        "headers": dict(message.headers),
        "dedup_id": message.dedup_id,
        "reply_to": message.reply_to,
        "recipient": message.recipient,
        "size": message.size,
        "created_at": instant(message.created_at),
        "sent_at": instant(message.sent_at),
        "expire_at": instant(message.expire_at),
        "payload": message.payload,
    }


def rows(frame: DataFrame) -> list[dict[str, Any]]:
    """Collect a frame in the order of mailboxes and msg_ids, whatever columns it has."""
    shown = [each.asDict() for each in frame.collect()]
    for each in shown:
        for name, value in each.items():
            if isinstance(value, datetime):
                each[name] = value.astimezone(UTC)
            elif isinstance(value, bytearray):
                each[name] = bytes(value)
    return sorted(shown, key=lambda each: (each.get("mailbox_no", 0), each.get("msg_id", 0)))


def direct(option: str, place: str, names: tuple[str, ...] = NAMES, **options: str) -> list[dict[str, Any]]:
    """Read as one task after the other, without Spark."""
    given = {option: place} | options
    reader = MailboxReader(parse(given), names, BatchOffsets.of(given))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    shown = [row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict")]
    return sorted(shown, key=lambda each: (each["mailbox_no"], each["msg_id"]))


def asked(store: Store, address: str, now: int, wanted: Filter = EVERYTHING) -> list[dict[str, Any]]:
    """Return the rows of what MSG.QUERY answers (Q1)."""
    with store.reading() as tx:
        answer = query(tx, Query("default", address, wanted, ALL, ALL), now)
        number = get(tx, address).id
        return [row(address, number, message) for message in answer]


def furnish(store: Store, now: int) -> None:
    """Fill mailboxes with all that a message can have, and what nobody may see."""
    with store.transaction() as tx:
        plain, full = add(tx, "plain", created_at=now), add(tx, "task.full", created_at=now)
        for number in range(3):
            put(tx, plain, bytes([number]), created_at=now + number, sent_at=now + number)
        for number in range(40):
            put(
                tx,
                full,
                bytes(range(256)) * number * 40,
                size=number * 10_240 + 7,
                lane=LANES[number % 4],
                created_at=now + number,
                sent_at=now - number,
                expire_at=(None, now + 60 * MINUTE, now - MINUTE)[number % 3],
                key=f"k'{number}" if number % 5 else None,
                tags=("even", "o'clock", "100%")[: number % 4],
                headers={"Größe": "☃", "n": str(number)} if number % 3 else {},
                dedup_id=f"d{number}" if number % 4 == 1 else None,
                reply_to="answers" if number % 7 == 0 else None,
                recipient="did:key:z6Mk" if number % 6 == 0 else None,
            )
        cut(tx, full, 13, 14)
        shared = b"said to both" * 10_000
        for box in (plain, full):
            put(tx, box, shared, created_at=now + 100, sent_at=now)
        put(tx, add(tx, "plain", tenant="other"), b"not yours", created_at=now, sent_at=now)
        put(tx, add(tx, "over", expire_at=now - MINUTE), b"too late", created_at=now, sent_at=now)
        gone = add(tx, "gone")
        put(tx, gone, b"deleted", created_at=now, sent_at=now)
        tx.mailboxes.retire(gone)
        add(tx, "empty")


def test_each_row_is_what_a_query_answers(kept: Kept, now: int) -> None:
    furnish(kept.store, now)
    expected = asked(kept.store, "plain", now) + asked(kept.store, "task.full", now)
    assert len(expected) == 4 + 41 - 13 - 1
    assert rows(kept.read()) == expected
    assert rows(kept.read(subscribe="task.full, plain", minPartitions="3")) == expected
    assert rows(kept.read(subscribe="empty")) == []


def test_options_choose_mailboxes_times_and_tags(kept: Kept, now: int) -> None:
    furnish(kept.store, now)

    def read(**options: str) -> list[dict[str, Any]]:
        return direct(kept.option, kept.place, **options)

    full = asked(kept.store, "task.full", now)
    assert read(prefix="task.") == read(subscribePattern=r"task\..*") == full
    assert read(prefix="tas~") == read(subscribePattern="task") == []
    tagged = asked(kept.store, "task.full", now, Filter(tags=("o'clock", "even")))
    assert read(prefix="task", tags="even,o'clock") == tagged != []
    assert read(prefix="task", tags="eve") == read(tags="EVEN") == []
    since = asked(kept.store, "task.full", now, Filter(since=now + 11))
    assert read(prefix="task", startingTimestamp=str(now + 11)) == since != []
    assert read(prefix="task", endingTimestamp=str(now + 11)) == [each for each in full if each not in since]
    assert [each["payload"] for each in read(tenant="other")] == [b"not yours"]


@pytest.mark.rule("A6")
@pytest.mark.parametrize("between", [0, 1])
def test_what_others_have_between_is_not_read(kept: Kept, now: int, between: int) -> None:
    with kept.store.transaction() as tx:
        for address, tenant, count in (("a", "default", 3), ("b", "other", between), ("c", "default", 3)):
            box = add(tx, address, tenant=tenant)
            for _ in range(count):
                put(tx, box, address.encode(), created_at=now)
    assert [each["payload"] for each in direct(kept.option, kept.place)] == [b"a"] * 3 + [b"c"] * 3


def test_columns_that_nobody_asked_for_are_not_read(kept: Kept, now: int) -> None:
    furnish(kept.store, now)
    expected = asked(kept.store, "task.full", now)
    kept.execute("ALTER TABLE body RENAME TO elsewhere")
    try:
        narrow = kept.read(prefix="task", columns="msg_id, size,tags")
        assert narrow.columns == ["msg_id", "size", "tags"]
        assert rows(narrow) == [{name: each[name] for name in narrow.columns} for each in expected]
        typed = kept.read(ddl="sent_at timestamp, msg_id bigint, mailbox string", prefix="task")
        assert rows(typed) == [{name: each[name] for name in typed.columns} for each in expected]
        with pytest.raises(PySparkException, match="body"):
            kept.read(prefix="task").collect()
    finally:
        kept.execute("ALTER TABLE elsewhere RENAME TO body")


def fill(store: Store, now: int) -> int:
    """Put 10 000 messages into two mailboxes, a millisecond apart, and take some away again."""
    with store.transaction() as tx:
        for address, count in (("big", 9000), ("small", 1000)):
            box = add(tx, address)
            for number in range(count):
                put(tx, box, b"%d" % number, created_at=now + number, sent_at=now + number)
        cut(tx, get(tx, "big"), *range(100, 300))
    return 9800


def test_tasks_share_ten_thousand_rows_without_loss_or_repeats(kept: Kept, now: int) -> None:
    count = fill(kept.store, now)
    frame = kept.read(numPartitions="4")
    parts = frame.withColumn("part", f.spark_partition_id()).collect()
    assert len(parts) == count
    expected = {("big", n, b"%d" % n) for n in range(9000) if not 100 <= n < 300}
    expected |= {("small", n, b"%d" % n) for n in range(1000)}
    assert {(each.mailbox, each.msg_id, bytes(each.payload)) for each in parts} == expected
    shares = Counter(each.part for each in parts)
    assert sorted(shares) == [0, 1, 2, 3]
    assert max(shares.values()) < 2 * min(shares.values())


def test_spark_filters_leave_out_what_no_row_of_the_answer_has(kept: Kept, now: int) -> None:
    fill(kept.store, now)
    at = instant(now + 5000)
    wanted = (f.col("mailbox") == "big") & (f.col("msg_id") >= 10) & (f.col("created_at") < f.lit(at))
    found = kept.read(columns="mailbox,msg_id,created_at").where(wanted)
    assert [each["msg_id"] for each in rows(found)] == [*range(10, 100), *range(300, 5000)]
    reader = MailboxReader(parse({kept.option: kept.place}), NAMES)
    filters = [EqualTo(("mailbox",), "big"), GreaterThanOrEqual(("msg_id",), 10), LessThan(("created_at",), at)]
    assert list(reader.pushFilters(filters)) == filters  # Spark compares once more
    (share,) = reader.partitions()
    (read,) = share.ranges
    assert (read.address, read.first, read.last) == ("big", 10, 5000)


def test_a_reader_sees_one_snapshot_and_keeps_nobody_waiting(kept: Kept, now: int) -> None:
    fill(kept.store, now)
    reader = MailboxReader(
        parse({kept.option: kept.place, "subscribe": "big", "numPartitions": "1"}), ("msg_id", "headers")
    )
    (share,) = reader.partitions()
    reading = iter(reader.read(share))
    seen = next(reading).num_rows
    with kept.store.transaction() as tx:
        cut(tx, get(tx, "big"), *range(8000, 9000))
        put(tx, get(tx, "big"), created_at=now + 10_000)
    assert seen + sum(batch.num_rows for batch in reading) == 8800
    assert len(direct(kept.option, kept.place, subscribe="big")) == 7801


def test_a_batch_is_bounded_by_its_bytes(kept: Kept, now: int) -> None:
    mib = 1 << 20
    with kept.store.transaction() as tx:
        box = add(tx, "a")
        for number in range(40):
            put(tx, box, bytes([number]) * (mib if number < 30 else 10), created_at=now)
    reader = MailboxReader(parse({kept.option: kept.place}), ("msg_id", "payload"))
    everything = reader.partitions()
    reader.pushFilters([LessThan(("msg_id",), 39)])
    # By their places in the table, and by the index.
    for shares in (everything, reader.partitions()):
        batches = [batch for share in shares for batch in reader.read(share)]
        assert [each for batch in batches for each in batch.column(0).to_pylist()] == list(range(40))
        assert max(batch.nbytes for batch in batches) <= 18 * mib


WRONG = [
    ({"subscribe": "task", "subscripe": "x"}, "subscripe: unknown option"),
    ({"startingTimestamp": "soon"}, "startingTimestamp: expected a whole number"),
    ({"startingTimestamp": "10", "endingTimestamp": "9"}, "endingTimestamp: expected 10"),
    ({"numPartitions": "0"}, "numPartitions: expected a whole number from 1"),
    ({"numPartitions": "2", "minPartitions": "2"}, "minPartitions: expected either it or numPartitions"),
    ({"subscribe": "a", "prefix": "a"}, "prefix: expected either it or subscribe"),
    ({"subscribe": "NO"}, "subscribe: expected lowercase"),
    ({"subscribe": "a,,b"}, "subscribe: expected words"),
    ({"subscribePattern": "("}, "subscribePattern: expected a regular expression"),
    ({"columns": "msg_id,sise"}, 'columns: no column "sise"'),
    ({"data.dir": ""}, "data.dir: expected a directory"),
    ({"database.url": "mysql://u:secret@h/d"}, "database.url: expected either it or data.dir"),
]


@pytest.mark.parametrize(("options", "problem"), WRONG)
def test_a_wrong_option_is_named(options: dict[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=re.escape(problem)):
        parse({"data.dir": str(tmp_path)} | options)


def test_where_the_mail_is_must_be_said() -> None:
    with pytest.raises(BadRequestError, match=r"data\.dir: expected"):
        parse({})
    with pytest.raises(BadRequestError, match=r"database\.url: expected postgresql://") as error:
        parse({"database.url": "mysql://u:secret@h/d"})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subscribe": "plain,nobody"}, 'subscribe: tenant "default" has no mailbox "nobody"'),
        ({"subscribe": "over"}, 'subscribe: tenant "default" has no mailbox "over"'),
        ({"tenant": "o'ther"}, 'tenant: "o\'ther" has no mailboxes'),
    ],
)
def test_what_is_not_there_is_named(kept: Kept, now: int, options: dict[str, str], problem: str) -> None:
    furnish(kept.store, now)
    with pytest.raises(BadRequestError, match=f"^{re.escape(problem)}"):
        direct(kept.option, kept.place, **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subscribe": "nobody"}, 'subscribe: tenant "default" has no mailbox "nobody"'),
        ({"ddl": "msg_id string"}, "schema: expected msg_id to be bigint"),
        ({"journl": "x"}, "journl: unknown option"),
    ],
)
def test_spark_tells_what_is_wrong(spark: SparkSession, tmp_path: Path, options: dict[str, str], problem: str) -> None:
    register(spark)
    with closing(SqliteStore(tmp_path / "mediator.db")) as store:
        kept = Kept(store, "data.dir", str(tmp_path), spark)
        with pytest.raises(PySparkException) as error:
            kept.read(**options).collect()
        assert f"BadRequestError: {problem}" in str(error.value).splitlines()[0]


def test_an_installed_format_is_known_to_sql(kept: Kept, now: int) -> None:
    """Spark finds it by itself, so a view needs nothing but SQL; a table would forget its options."""
    furnish(kept.store, now)
    options = f"OPTIONS ('{kept.option}' '{kept.place}')"
    kept.spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW mail USING mq9 {options}")
    try:
        assert kept.spark.sql("SELECT count(*) FROM mail").first()[0] == kept.read().count() > 0
    finally:
        kept.spark.catalog.dropTempView("mail")
    with pytest.raises(PySparkException, match="expected CREATE TEMPORARY VIEW"):
        kept.spark.sql(f"CREATE TABLE mail USING mq9 {options}")


def test_directories_and_files_without_mail_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"data\.dir: there is no mediator\.db in"):
        direct("data.dir", str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "mediator.db"
    file.write_bytes(b"no database" * 1000)
    with pytest.raises(BadRequestError, match=r"data\.dir: cannot read .*not a database"):
        direct("data.dir", str(tmp_path))
    file.unlink()
    with closing(sqlite3.connect(file)) as other:
        other.execute("CREATE TABLE other (no INTEGER)")
    with pytest.raises(BadRequestError, match=r"data\.dir: cannot read .*no such table: mailbox"):
        direct("data.dir", str(tmp_path))


@pytest.mark.postgres
def test_a_refused_login_is_reported_without_the_password(postgres: Server) -> None:
    with postgres.database() as url:
        with pytest.raises(BadRequestError, match=r"database\.url: cannot read it: .*mailbox"):
            direct("database.url", url)
        parts = urlsplit(url)
        wrong = urlunsplit(parts._replace(netloc=f"nobody:wr0ng@{parts.hostname}:{parts.port}"))
        with pytest.raises(BadRequestError, match=r"database\.url: cannot read it: .*nobody") as error:
            direct("database.url", wrong)
    assert "wr0ng" not in str(error.value)


def ids(found: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(each["mailbox"], each["msg_id"]) for each in found]


def test_a_batch_is_read_between_offsets_of_a_stream(kept: Kept) -> None:
    with kept.store.transaction() as tx:
        for address in ("more", "orders"):
            add(tx, address)
            for number in range(6):
                put(tx, get(tx, address), str(number).encode())
        cut(tx, get(tx, "orders"), 3)
        more, orders = (get(tx, address).id for address in ("more", "orders"))
    begin, end = f'{{"{orders}": 2}}', f'{{"{orders}": 5, "{more}": 1}}'
    read = ids(direct(kept.option, kept.place, startingOffsets=begin, endingOffsets=end))
    assert read == [("more", 0), ("orders", 2), ("orders", 4)]
    assert ids(rows(kept.read(startingOffsets=begin, endingOffsets=end))) == read
    # Further than the newest message, and nothing at all.
    assert ids(direct(kept.option, kept.place, subscribe="orders", startingOffsets=f'{{"{orders}": 9}}')) == []
    assert ids(direct(kept.option, kept.place, subscribe="orders", endingOffsets=f'{{"{orders}": 0}}')) == []
    everything = ids(direct(kept.option, kept.place))
    assert ids(direct(kept.option, kept.place, startingOffsets="earliest", endingOffsets="latest")) == everything
    assert ids(direct(kept.option, kept.place, endingOffsets=f'{{"{orders}": 99, "{more}": 99}}')) == everything


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"startingOffsets": "latest"}, "startingOffsets: expected earliest or an offset as JSON"),
        ({"endingOffsets": "earliest"}, "endingOffsets: expected latest or an offset as JSON"),
        ({"endingOffsets": '{"one": 1}'}, 'endingOffsets: expected {"MAILBOX_NO": MSG_ID}'),
        ({"endingOffsets": '{"1": -1}'}, 'endingOffsets: expected {"MAILBOX_NO": MSG_ID}'),
        ({"endingOffsets": '{"77": 1}'}, "endingOffsets: no mailbox that is read has the number 77"),
        ({"startingOffsets": '{"1": 5}', "endingOffsets": '{"1": 4}'}, "endingOffsets: expected 5, which is in"),
        ({"endingOffsets": '{"1": 4}', "endingTimestamp": "1"}, "endingOffsets: expected either it or endingTimestamp"),
        ({"startingOffsets": '{"1": 4}', "startingTimestamp": "1"}, "startingOffsets: expected either it or"),
    ],
)
def test_wrong_offsets_of_a_batch_are_named(kept: Kept, now: int, options: dict[str, str], problem: str) -> None:
    furnish(kept.store, now)
    with pytest.raises(BadRequestError, match=f"^{re.escape(problem)}"):
        direct(kept.option, kept.place, **options)


VALUES = st.one_of(st.sampled_from(["", "a", "a.b,c", "7", "-1", "0x7", "1e3", ",", "["]), st.text(max_size=12))


@given(st.dictionaries(st.one_of(st.sampled_from(BATCH), st.text(max_size=8)), VALUES, max_size=4))
def test_any_options_are_understood_or_the_wrong_one_is_named(given: dict[str, str]) -> None:
    wrong = None
    try:
        parsed = parse(given)
    except BadRequestError as error:
        wrong = error.field
    if wrong is None:
        assert set(given) <= set(BATCH)
        assert parsed == parse({name.upper(): value for name, value in given.items()})
        assert (parsed.data_dir is None) != (parsed.database_url is None)
    else:
        assert wrong in {*given, "data.dir"}


@given(st.integers(0, 2**53), st.integers(0, 2**53), st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
def test_right_options_mean_what_they_say(first: int, second: int, names: list[str]) -> None:
    low, high = sorted(min(each, MAX_TIME) for each in (first, second))
    given = {"startingTimestamp": str(low), "endingTimestamp": f" {high} ", "columns": ", ".join(names)}
    parsed = parse({"data.dir": "/mail"} | given)
    assert (parsed.starting, parsed.ending, parsed.columns) == (low, high, tuple(names))


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 5000), st.integers(1, 3000)), max_size=20),
    st.integers(1, 40),
)
def test_shares_are_all_of_the_slices_once(mailboxes: list[tuple[int, int, int]], wanted: int) -> None:
    whole = [MessageRange(no, "a", first, first + more, weight) for no, (first, more, weight) in enumerate(mailboxes)]
    shares = split_ranges(whole, ReadOptions(partitions=wanted))
    assert 1 <= len(shares) <= wanted
    dealt = [each for part in shares for each in part]
    for each in whole:
        parts = [part for part in dealt if part.mailbox_no == each.mailbox_no]
        assert (parts[0].first, parts[-1].last) == (each.first, each.last)
        assert all(part.first <= part.last for part in parts)
        assert all(after.first == before.last + 1 for before, after in pairwise(parts))
    weights = [sum(part.weight for part in each) for each in shares]
    assert max(weights) - min(weights) <= 1


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), min_size=1, max_size=20),
    st.integers(1, 40),
    st.integers(1, 2**40),
    st.integers(1, 10**6),
)
def test_large_reads_use_ranges_and_small_ones_the_index(
    mailboxes: list[tuple[int, int]], wanted: int, first: int, length: int
) -> None:
    slices = [MessageRange(no, "a", 0, more, weight) for no, (more, weight) in enumerate(mailboxes)]
    stretches = split_rows(slices, RowRange(first, first + length - 1), ReadOptions(partitions=wanted))
    total = sum(part.weight for each in split_ranges(slices, ReadOptions(partitions=1)) for part in each)
    assert bool(stretches) == (total * 4 >= length)
    if stretches:
        assert (stretches[0].first, stretches[-1].last) == (first, first + length - 1)
        assert len(stretches) == min(wanted, total)
        assert all(after.first == before.last + 1 for before, after in pairwise(stretches))


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_literal_is_the_text_that_it_was_made_of(text: str) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        assert connection.execute(f"SELECT {sql_literal(text)}").fetchone() == (text,)
