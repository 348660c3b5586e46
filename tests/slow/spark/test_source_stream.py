"""The journal as a stream, followed by Spark and, where that is enough, by the questions that Spark asks."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError, DamagedError, LostDataError
from mediator.journal.segments import mark_read
from pipeline.source.datasource import stream_reader
from pipeline.source.journal import read_lines, split_lines
from pipeline.source.schema import EVENTS
from tests.slow.spark.streams import Batches, Written, ask, follow, read


@pytest.fixture
def journal(tmp_path: Path) -> Written:
    return Written(tmp_path / "journal")


def reader_of(journal: Written, schema: StructType = EVENTS, **options: object) -> DataSourceStreamReader:
    return stream_reader({"journal": str(journal.folder), **{k: str(v) for k, v in options.items()}}, schema)


def all_of(reader: DataSourceStreamReader) -> list[object]:
    return [value for values, _ in ask(reader, reader.initialOffset()) for value in values]


def test_journal_is_followed_over_open_and_closed_files(spark: SparkSession, journal: Written, tmp_path: Path) -> None:
    batches = Batches()
    journal.line()
    query = follow(spark, batches, tmp_path / "checkpoint", journal=journal.folder).start()
    try:
        query.processAllAvailable()
        journal.line(3)
        query.processAllAvailable()
        journal.rotate()
        journal.line(5)
        journal.rotate()
        journal.line(1)
        query.processAllAvailable()
    finally:
        query.stop()
    assert batches.column("msg_id") == journal.msg_ids
    assert batches.sizes[:2] == [10, 3]
    first = min(batches.rows[0], key=lambda row: row["msg_id"])
    assert first.asDict() == {
        "instance": "host-1", "seq": 1000, "position": 0, "tenant": "default", "what": 4, "mailbox": 7, "lane": 2,
        "msg_id": 0, "bytes": 100, "created_at": None, "group": 0, "at": first["at"], "date": first["date"],
    }  # fmt: skip
    assert f"{first['at']:%F %T} {first['date']}" == "2026-01-01 00:00:00 2026-01-01"


def test_a_batch_that_is_run_again_has_the_same_lines(journal: Written) -> None:
    for _ in range(3):
        journal.line()
    reader = reader_of(journal, maxOffsetsPerTrigger=10)
    (_, first), (values, second), _ = ask(reader, reader.initialOffset())
    journal.line()
    journal.rotate()
    journal.line()
    # Another process, which knows of the checkpoint alone.
    again = reader_of(journal, maxOffsetsPerTrigger=10)
    start, end = json.loads(json.dumps([first, second]))
    assert read(again, start, end) == values == journal.msg_ids[10:20]
    assert [values for values, _ in ask(again, end)] == [journal.msg_ids[at : at + 10] for at in (20, 30, 40)]


def test_a_line_is_taken_when_it_is_whole(journal: Written) -> None:
    journal.line(2)
    path = journal.files()[0]
    whole = path.read_bytes()
    reader = reader_of(journal)
    path.write_bytes(whole + whole[:-1])
    values, offset = next(ask(reader, reader.initialOffset()))
    assert values == [0, 1]
    assert list(ask(reader, offset)) == []
    path.write_bytes(whole + whole)
    assert [values for values, _ in ask(reader, offset)] == [[0, 1]]


def test_a_growing_file_may_be_truncated_and_rewritten(journal: Written) -> None:
    journal.line(2)
    path = journal.files()[0]
    first = path.read_bytes()
    journal.line(2)
    both = path.read_bytes()
    reader = reader_of(journal)
    _, offset = next(ask(reader, reader.initialOffset()))
    path.write_bytes(first)
    assert list(ask(reader, offset)) == []
    path.write_bytes(both + first)
    assert [values for values, _ in ask(reader, offset)] == [[0, 1]]


@pytest.mark.parametrize("most", [1, 5, 10, 12, 25, 1000])
def test_a_batch_has_whole_lines_up_to_the_limit(journal: Written, most: int) -> None:
    for line in range(9):
        journal.line(line + 1)
        if line % 3 == 2:
            journal.rotate()
    reader = reader_of(journal, maxOffsetsPerTrigger=most)
    batches = [values for values, _ in ask(reader, reader.initialOffset())]
    assert [value for values in batches for value in values] == journal.msg_ids
    assert all(len(values) <= max(most, 9) for values in batches)
    if most >= 9:
        assert all(len(one) + len(following) > most for one, following in pairwise(batches))


def test_available_now_ends_where_the_journal_ended(journal: Written) -> None:
    journal.line()
    reader = reader_of(journal)
    assert isinstance(reader, SupportsTriggerAvailableNow)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    journal.line()
    journal.rotate()
    journal.line()
    batches = list(ask(reader, start))
    assert [values for values, _ in batches] == [journal.msg_ids[:10]]
    assert [values for values, _ in ask(reader_of(journal), batches[-1][1])] == [journal.msg_ids[10:]]


def test_an_empty_journal_is_one_that_has_yet_to_begin(tmp_path: Path) -> None:
    journal = Written(tmp_path / "journal")
    journal.segments.close(True)
    reader = reader_of(journal)
    start = reader.initialOffset()
    assert list(ask(reader, start)) == []
    journal.segments.open(2000)
    journal.line()
    assert [values for values, _ in ask(reader, start)] == [journal.msg_ids]


def test_a_stream_may_begin_at_the_end_or_at_a_line(journal: Written) -> None:
    journal.line()
    everything = reader_of(journal)
    _, offset = next(ask(everything, everything.initialOffset()))
    latest = reader_of(journal, startingOffsets="latest")
    assert latest.initialOffset() == offset
    journal.line()
    text = json.dumps(offset)
    assert all_of(reader_of(journal, startingOffsets=text)) == journal.msg_ids[10:]
    wrong = json.dumps(offset | {"byte": offset["byte"] + 1})
    with pytest.raises(BadRequestError, match=r"no line of .* begins at byte"):
        reader_of(journal, startingOffsets=wrong).initialOffset()


def test_files_that_went_unread_end_the_query_or_are_counted(tmp_path: Path) -> None:
    journal = Written(tmp_path / "journal", total_bytes=400)
    journal.line(1)
    reader, lenient = reader_of(journal), reader_of(journal, failOnDataLoss="false")
    values, offset = next(ask(reader, reader.initialOffset()))
    assert values == [0]
    for events in (2, 3, 4, 5):
        journal.line(events)
        journal.rotate()
    left = all_of(reader)
    assert 0 not in left
    assert left
    with pytest.raises(LostDataError, match=r"0{16}1000-host-1 is gone"):
        reader.latestOffset(offset, reader.getDefaultReadLimit())
    [(values, end)] = ask(lenient, offset)
    assert values == left
    # The file that was read in part is counted as a whole: gaps.jsonl does not know how far.
    assert end["lost"] == {"holes": 1, "events": len(journal.msg_ids) - len(left)}


def test_a_batch_whose_file_is_gone_is_not_run_again_in_silence(journal: Written) -> None:
    journal.line(1)
    journal.rotate()
    journal.line(2)
    reader, lenient = reader_of(journal), reader_of(journal, failOnDataLoss="false")
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    shares = reader.partitions(start, end)
    journal.files()[0].unlink()
    with pytest.raises(LostDataError):
        reader.partitions(start, end)
    with pytest.raises(LostDataError):
        [list(reader.read(share)) for share in shares]
    assert read(lenient, start, end) == [1, 2]


@pytest.mark.parametrize("starting", ["earliest", "latest"])
def test_an_empty_open_file_is_dropped_by_the_next(journal: Written, starting: str) -> None:
    reader = reader_of(journal, startingOffsets=starting)
    begin = reader.initialOffset()
    journal.rotate()
    assert list(ask(reader, begin)) == []
    journal.line(1)
    journal.rotate()
    *_, (_, offset) = ask(reader, begin)
    empty = journal.files()[-1]
    journal.rotate()
    assert not empty.exists()
    assert read(reader, begin, offset) == [0]
    assert not any(values for values, _ in ask(reader, offset))
    journal.line(2)
    [(values, end)] = ask(reader, offset)
    assert values == read(reader_of(journal), offset, end) == [1, 2]


def test_what_was_read_to_its_end_may_go(journal: Written) -> None:
    journal.line(1)
    journal.rotate()
    reader = reader_of(journal)
    *_, (_, offset) = ask(reader, reader.initialOffset())
    mark_read(journal.folder, journal.files()[0].name)
    journal.files()[0].unlink()
    journal.line(2)
    assert [values for values, _ in ask(reader, offset)] == [[1, 2]]


BAD = {
    "no JSON": b'{"instance":"host-1",\n',
    "no object": b"[]\n",
    "a field lacks": b'{"instance":"host-1","seq":1,"tenant":""}\n',
    "columns differ in length": b'{"instance":"a","seq":1,"tenant":"t","at":[1],"what":[4],"mailbox":[7],"lane":[2],'
    b'"msg_id":[0],"bytes":[1],"created_at":[1],"group":[]}\n',
    "a number is a text": b'{"instance":"a","seq":1,"tenant":"t","at":[1],"what":[4],"mailbox":["7"],"lane":[2],'
    b'"msg_id":[0],"bytes":[1],"created_at":[1],"group":[0]}\n',
    "a number is none": b'{"instance":"a","seq":1,"tenant":"t","at":[1],"what":[4],"mailbox":[7],"lane":[2],'
    b'"msg_id":[null],"bytes":[1],"created_at":[1],"group":[0]}\n',
    "a code is too large": b'{"instance":"a","seq":1,"tenant":"t","at":[1],"what":[400],"mailbox":[7],"lane":[2],'
    b'"msg_id":[0],"bytes":[1],"created_at":[1],"group":[0]}\n',
    "a time is too large": b'{"instance":"a","seq":1,"tenant":"t","at":[9000000000000000000],"what":[4],"mailbox":[7],'
    b'"lane":[2],"msg_id":[0],"bytes":[1],"created_at":[1],"group":[0]}\n',
    "a time is negative": b'{"instance":"a","seq":1,"tenant":"t","at":[-1],"what":[4],"mailbox":[7],"lane":[2],'
    b'"msg_id":[0],"bytes":[1],"created_at":[1],"group":[0]}\n',
    "another version": b'{"version":2,"instance":"a","seq":1,"tenant":"t","at":[1],"what":[4],"mailbox":[7],"lane":[2],'
    b'"msg_id":[0],"bytes":[1],"created_at":[1],"group":[0]}\n',
    "a flipped byte": b'{"instance":"h\xffst","seq":1,"tenant":""}\n',
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_named_or_left_out(journal: Written, bad: bytes) -> None:
    journal.line(2)
    path = journal.files()[0]
    byte = path.stat().st_size
    journal.segments.append(bad)
    journal.line(3)
    reader = reader_of(journal)
    with pytest.raises(DamagedError, match=rf"{re.escape(path.name.split('.')[0])}, byte {byte}: "):
        all_of(reader)
    for most in (1, 1000):
        assert all_of(reader_of(journal, badLines="skip", maxOffsetsPerTrigger=most)) == journal.msg_ids


def test_a_closed_file_that_ends_in_half_a_line_is_bad(journal: Written) -> None:
    journal.line(2)
    journal.segments.append(b'{"instance":')
    journal.rotate()
    journal.line(1)
    with pytest.raises(DamagedError, match="cut off"):
        all_of(reader_of(journal))
    assert all_of(reader_of(journal, badLines="skip")) == journal.msg_ids


@pytest.mark.parametrize("names", [("msg_id", "bytes"), ("msg_id", "date", "tenant")])
def test_a_narrower_schema_is_read(journal: Written, names: tuple[str, ...]) -> None:
    journal.line()
    reader = reader_of(journal, StructType([EVENTS[name] for name in names]))
    [share] = reader.partitions(reader.initialOffset(), reader.reportLatestOffset())
    [batch] = reader.read(share)
    assert tuple(batch.schema.names) == names
    assert batch["msg_id"].to_pylist() == journal.msg_ids


@given(
    lengths=st.lists(st.lists(st.integers(1, 40), max_size=8), max_size=4),
    size=st.integers(1, 60),
    skipped=st.integers(0, 8),
)
def test_pieces_have_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], size: int, skipped: int
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    ranges, expected = [], []
    for number, file in enumerate(lengths):
        data = [b"x" * (length - 1) + b"\n" for length in file]
        (folder / f"{number}.jsonl").write_bytes(b"".join(data))
        begin = sum(file[:skipped])
        ranges.append((str(number), begin, sum(file)))
        expected += [(str(number), sum(file[:place]), data[place]) for place in range(len(file)) if place >= skipped]
    cut = split_lines(ranges, size)
    assert [line for group in cut for piece in group for line in read_lines(folder, piece)] == expected
    assert all(sum(piece.stop - piece.start for piece in group) <= size for group in cut)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"group": "workers"}, "journal: unknown option"),
        ({"startingOffsets": "first"}, "startingOffsets: expected earliest, latest or an offset"),
        ({"startingOffsets": "[1]"}, "startingOffsets: "),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger: expected a whole number from 1 to"),
        ({"maxOffsetsPerTrigger": "many"}, 'maxOffsetsPerTrigger: .*got "many"'),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss: expected true or false"),
        ({"badLines": "drop"}, "badLines: expected fail or skip"),
        ({"subscribe": "a"}, "subscribe: unknown option, expected one of badLines"),
    ],
)
def test_wrong_options_are_named(journal: Written, options: dict[str, str], problem: str) -> None:
    with pytest.raises(BadRequestError, match=problem):
        reader_of(journal, **options)


def test_a_journal_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="journal: expected the folder of a journal"):
        stream_reader({"journal": str(tmp_path / "nowhere")}, EVENTS).initialOffset()
    with pytest.raises(BadRequestError, match="schema: payload: expected one of instance"):
        stream_reader({"journal": str(tmp_path)}, StructType().add("payload", "binary"))
