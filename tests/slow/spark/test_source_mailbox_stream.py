"""Mailboxes as streams: what is sent comes once, and a mailbox that went is not passed over in silence."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from mediator.errors import BadRequestError, LostDataError
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from pipeline.source import mailboxes
from pipeline.source.datasource import stream_reader
from pipeline.source.options import Offset
from pipeline.source.progress import messages_behind
from pipeline.source.schema import MESSAGES
from tests.harness.samples import T0, add, cut, get, put
from tests.slow.spark.conftest import OpenStore
from tests.slow.spark.streams import Batches, ask, drain, follow, read


class Kept:
    """A store that is open, as a running service's, and how a stream finds it."""

    def __init__(self, store: Store, option: str, place: str) -> None:
        self.store = store
        self.where = {option: place}

    def create(self, *addresses: str) -> None:
        with self.store.transaction() as tx:
            for address in addresses:
                add(tx, address)

    def send(self, address: str, *payloads: str, **more: object) -> None:
        with self.store.transaction() as tx:
            mailbox = get(tx, address)
            for payload in payloads:
                put(tx, mailbox, payload.encode(), **more)

    def remove(self, address: str, *ids: int) -> None:
        with self.store.transaction() as tx:
            cut(tx, get(tx, address), *ids)

    def delete(self, address: str) -> None:
        with self.store.transaction() as tx:
            tx.mailboxes.retire(get(tx, address))

    def stream(self, **options: object) -> DataSourceStreamReader:
        given = {"subscribe": "orders", "startingOffsets": "earliest"} | {k: str(v) for k, v in options.items()}
        return stream_reader(self.where | given, MESSAGES)


@pytest.fixture
def kept(open_store: OpenStore) -> Kept:
    return Kept(*open_store)


def payloads(reader: DataSourceStreamReader, start: Offset | None = None) -> list[list[object]]:
    """Each batch from an offset on."""
    found = ask(reader, reader.initialOffset() if start is None else start, "payload")
    return [[str(value, "utf-8") for value in values] for values, _ in found]


def end(reader: DataSourceStreamReader) -> Offset:
    return reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Kept]:
    with closing(SqliteStore(tmp_path / "mediator.db")) as store:
        yield Kept(store, "data.dir", str(tmp_path))


def test_a_mailbox_is_followed_and_resumed(spark: SparkSession, sqlite: Kept, tmp_path: Path) -> None:
    batches = Batches()
    sqlite.create("orders")
    sqlite.send("orders", "before")
    stream = follow(spark, batches, tmp_path / "checkpoint", **sqlite.where, subscribe="orders")
    query = stream.start()
    try:
        query.processAllAvailable()
        sqlite.send("orders", "one", "two")
        query.processAllAvailable()
        sqlite.send("orders", "three")
        query.processAllAvailable()
    finally:
        query.stop()
    sqlite.send("orders", "four")
    drain(stream)
    drain(stream)
    assert [bytes(value).decode() for value in batches.column("payload")] == ["one", "two", "three", "four"]
    assert batches.column("msg_id") == [1, 2, 3, 4]


def test_progress_says_how_far_a_stream_is_behind(spark: SparkSession, sqlite: Kept, tmp_path: Path) -> None:
    sqlite.create("orders", "more")
    stream = follow(
        spark, Batches(), tmp_path / "checkpoint", **sqlite.where, startingOffsets="earliest", maxOffsetsPerTrigger=4
    )
    sqlite.send("orders", *"abcdef")
    sqlite.send("more", *"ab")
    query = stream.trigger(availableNow=True).start()
    query.awaitTermination()
    read = [progress for progress in query.recentProgress if progress["numInputRows"]]
    assert [progress["numInputRows"] for progress in read] == [4, 4]
    assert [messages_behind(progress["sources"][0]) for progress in read] == [4, 0]


def test_a_stream_has_no_end(sqlite: Kept) -> None:
    sqlite.create("orders")
    for option in ("endingOffsets", "endingTimestamp"):
        with pytest.raises(BadRequestError, match=f"^{option}: unknown option"):
            sqlite.stream(**{option: "{}"})


def test_a_followed_mailbox_that_goes_ends_the_query(spark: SparkSession, sqlite: Kept, tmp_path: Path) -> None:
    batches = Batches()
    sqlite.create("orders")
    stream = follow(spark, batches, tmp_path / "checkpoint", **sqlite.where, subscribe="orders")
    drain(stream)
    sqlite.delete("orders")
    with pytest.raises(StreamingQueryException) as error:
        drain(stream)
    first = str(error.value).splitlines()[0]
    assert "LostDataError: mailbox 1 was deleted or expired, what it had from msg_id 0 on" in first


def test_earliest_has_what_is_there_and_latest_what_comes(kept: Kept) -> None:
    kept.create("orders")
    kept.send("orders", "a", "b")
    latest = kept.stream(startingOffsets="latest").initialOffset()
    assert payloads(kept.stream()) == [["a", "b"]]
    kept.send("orders", "c")
    assert payloads(kept.stream(), latest) == [["c"]]
    [number] = latest
    assert payloads(kept.stream(startingOffsets=f'{{"{number}": 1}}')) == [["b", "c"]]


def test_a_timestamp_says_where_a_new_query_begins(kept: Kept) -> None:
    kept.create("orders", "empty")
    for number in range(6):
        kept.send("orders", str(number), created_at=T0 + 10 * number)
    kept.remove("orders", 3)
    began = {at: stream_reader(kept.where | {"startingTimestamp": str(at)}, MESSAGES) for at in (T0 + 25, T0 + 99)}
    assert [payloads(reader) for reader in began.values()] == [[["4", "5"]], []]


def test_removed_and_expired_messages_are_not_shown(kept: Kept) -> None:
    kept.create("orders")
    kept.send("orders", *"abcdef")
    kept.send("orders", "gone", expire_at=1)
    kept.remove("orders", 0, 1, 2, 4)
    assert payloads(kept.stream(maxOffsetsPerTrigger=1)) == [["d"], ["f"], []]
    kept.remove("orders", 3, 5, 6)
    start = kept.stream(startingOffsets="latest").initialOffset()
    kept.send("orders", "next")
    assert list(start.values()) == [7]
    assert payloads(kept.stream(), start) == [["next"]]


def test_a_limit_is_dealt_out_to_all_mailboxes(kept: Kept) -> None:
    kept.create("large", "small", "empty")
    kept.send("large", *(f"large {number}" for number in range(20)))
    kept.send("small", "small 0", "small 1")
    found = payloads(kept.stream(subscribe="large,small,empty", maxOffsetsPerTrigger=6))
    assert found[0] == [*(f"large {number}" for number in range(4)), "small 0", "small 1"]
    assert [len(batch) for batch in found] == [6, 6, 6, 4]


def test_thousands_of_mailboxes_are_one_stream(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [f"agent.{number:04}" for number in range(3000)]
    with kept.store.transaction() as tx:
        for address in addresses:
            put(tx, add(tx, address), address.encode())
    reader = stream_reader(
        kept.where | {"prefix": "agent.", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "2000"}, MESSAGES
    )
    first, second = payloads(reader)
    assert (len(first), sorted(first + second)) == (2000, addresses), "each once"
    after = end(stream_reader(kept.where | {"prefix": "agent."}, MESSAGES))
    kept.send("agent.2999", "more")
    assert payloads(reader, after) == [["more"]]
    monkeypatch.setattr(mailboxes, "MAX_MAILBOXES", 2999)
    with pytest.raises(BadRequestError, match="subscribe: expected at most 2999 mailboxes in one stream"):
        end(reader)


def test_available_now_leaves_what_comes_later(kept: Kept) -> None:
    kept.create("orders")
    kept.send("orders", "a", "b")
    reader = kept.stream(maxOffsetsPerTrigger=1)
    assert isinstance(reader, SupportsTriggerAvailableNow)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    kept.send("orders", "c")
    assert payloads(reader, start) == [["a"], ["b"]]
    assert payloads(kept.stream(), end(kept.stream(maxOffsetsPerTrigger=2))) == [["c"]]


def test_a_batch_that_is_run_again_is_the_same_msg_ids(kept: Kept) -> None:
    kept.create("orders")
    kept.send("orders", "a", "b")
    start, behind = kept.stream().initialOffset(), end(kept.stream())
    kept.send("orders", "c")
    assert read(kept.stream(), start, behind) == [0, 1]


def test_a_mailbox_made_anew_is_another_one(kept: Kept) -> None:
    kept.create("orders")
    kept.send("orders", "a", "b")
    behind = end(kept.stream())
    kept.delete("orders")
    kept.create("orders")
    kept.send("orders", "new")
    with pytest.raises(LostDataError, match=r"mailbox \d+ was deleted or expired, what it had from msg_id 2 on"):
        kept.stream().latestOffset(behind, kept.stream().getDefaultReadLimit())
    lenient = kept.stream(failOnDataLoss="false")
    assert payloads(lenient, behind) == [["new"]]
    assert end(lenient).keys() != behind.keys()


def test_a_batch_whose_mailbox_went_is_not_run_again_in_silence(kept: Kept) -> None:
    kept.create("orders", "other")
    kept.send("orders", "a", "b")
    kept.send("other", "c")
    both = {"subscribe": "orders,other"}
    start, behind = kept.stream(**both).initialOffset(), end(kept.stream(**both))
    kept.delete("orders")
    with pytest.raises(LostDataError, match="before its msg_ids 0 to 1 were read"):
        kept.stream(**both).partitions(start, behind)
    assert read(kept.stream(**both, failOnDataLoss="false"), start, behind, "payload") == [b"c"]


def test_new_mailboxes_are_read_from_their_first_message(kept: Kept) -> None:
    kept.create("orders.1")
    reader = stream_reader(kept.where | {"prefix": "orders.", "startingOffsets": "latest"}, MESSAGES)
    start = reader.initialOffset()
    kept.create("orders.2", "others")
    for address in ("orders.1", "orders.2", "others"):
        kept.send(address, address)
    assert payloads(reader, start) == [["orders.1", "orders.2"]]


def test_an_older_database_is_not_read_on_in_silence(kept: Kept) -> None:
    kept.create("orders")
    kept.send("orders", "a")
    [number] = end(kept.stream())
    with pytest.raises(LostDataError, match="its database is an older one"):
        kept.stream().latestOffset({number: 7}, kept.stream().getDefaultReadLimit())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subscribe": "nobody"}, 'subscribe: tenant "default" has no mailbox "nobody"'),
        ({"startingOffsets": '{"99": 0}'}, "startingOffsets: no mailbox that is followed has the number 99"),
        ({"startingOffsets": '{"orders": 0}'}, 'startingOffsets: expected {"MAILBOX_NO": MSG_ID}'),
        ({"startingOffsets": '{"1": -1}'}, 'startingOffsets: expected {"MAILBOX_NO": MSG_ID}'),
        ({"maxOffsetsPerTrigger": "-1"}, "maxOffsetsPerTrigger: expected a whole number"),
        ({"startingTimestamp": "0"}, "startingOffsets: expected either it or startingTimestamp"),
        ({"endingTimestamp": "0"}, "endingTimestamp: unknown option, expected one of columns, data.dir"),
        ({"badLines": "skip"}, "badLines: unknown option"),
        ({"journal": ""}, "journal: unknown option"),
    ],
)
def test_wrong_options_are_named(sqlite: Kept, options: dict[str, str], problem: str) -> None:
    sqlite.create("orders")
    with pytest.raises(BadRequestError) as error:
        sqlite.stream(**options).initialOffset()
    assert str(error.value).startswith(problem)
