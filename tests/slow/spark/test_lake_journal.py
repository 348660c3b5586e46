"""Lines of the journal, judged by Spark as they are by plain Python: what is bad is kept apart, and nothing else is."""

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from deltalake import DeltaTable
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from mediator.journal.segments import COLUMNS, expand
from mediator.mailboxes.events import EventType
from pipeline.lake.ingest import TEXT_BYTES, ingest
from pipeline.source.schema import MAX_SEQ, MAX_TIME
from tests.slow.spark.journals import Row, event, held, line, row, write

SHOWN = (Phase.explicit, Phase.reuse, Phase.generate)
"""A smaller seed is no simpler a journal."""
GOOD = line(5, [event(1), event(2, type=EventType.MAILBOX_CREATED, msg_id=-1, created_at=0)])
BAD = {
    b"": "not a line of JSON",
    b"null": "a field is missing or of another type",
    b"[1]": "a field is missing or of another type",
    b"\x00\xff\xfe": "not UTF-8",
    GOOD[:40]: "not a line of JSON",
    GOOD[:-1] + GOOD[:-1]: "not a line of JSON",
    GOOD[:-1] + b"}" + GOOD[:-1]: "not a line of JSON",
    GOOD[:-1] + b"]" + GOOD[:-1]: "not a line of JSON",
    GOOD[:-1] + b"," + GOOD[:-1]: "not a line of JSON",
    b"\xef\xbb\xbf" + GOOD[:-1]: "not a line of JSON",
    GOOD[:-1].replace(b'"', b"'"): "not a line of JSON",
    GOOD[:-1].replace(b'"default"', b'"def\xe4ult"'): "not UTF-8",
    GOOD[:-1].replace(b'"default"', b"7"): "a field is missing or of another type",
    GOOD[:-1].replace(b'"default"', b"null"): "a field is missing or of another type",
    GOOD[:-1].replace(b'"host-1"', b'["host-1"]'): "a field is missing or of another type",
    GOOD[:-1].replace(b'"group"', b'"groop"'): "a field is missing or of another type",
    GOOD[:-1].replace(b'"seq":5', b'"seq":"5"'): "a field is missing or of another type",
    GOOD[:-1].replace(b'"seq":5', b'"seq":5.5'): "a field is missing or of another type",
    GOOD[:-1].replace(b'"seq":5', b'"seq":123456789012345678901'): "a field is missing or of another type",
    GOOD[:-1].replace(b'"lane":[2', b'"lane":["2"'): "a field is missing or of another type",
    GOOD[:-1].replace(b'"lane":[2,', b'"lane":['): "lists of different lengths",
    GOOD[:-1].replace(b'"lane":[2', b'"lane":[null'): "a number is out of range",
    GOOD[:-1].replace(b'"lane":[2', b'"lane":[128'): "a number is out of range",
    GOOD[:-1].replace(b'"seq":5', b'"seq":-5'): "a number is out of range",
    GOOD[:-1].replace(b'"at":[1', b'"at":[999991'): "a number is out of range",
    GOOD[:-1].replace(b'"seq":5', b'"seq":5,"version":2'): "of another version",
}
FINE = [
    GOOD,
    line(6, []),
    line(7, [event(3, type=99)]),
    GOOD.replace(b'"seq":5', b'"seq":8,"version":1,"more":{"at":[1,{}]}'),
    GOOD.replace(b'"seq":5', b' "seq" : 9 ').replace(b"\n", b"\r\n"),
    GOOD.replace(b'"seq":5', b'"seq":10').replace(b"default", "мир\\n\\u00e4".encode()),
]


def quarantined(lake: Path) -> list[dict[str, Any]]:
    rows = DeltaTable(lake / "quarantine").to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda each: (each["file"], each["line"]))


def test_each_fault_has_its_reason_and_its_place(spark: SparkSession, tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    first = write(journal, 1, [raw + b"\n" for raw in BAD])
    second = write(journal, 2, [*FINE, b"x" * 5000 + b"\n", GOOD[:-20]])
    summary = ingest(spark, journal, lake)
    found = quarantined(lake)
    assert [(each["file"], each["line"], each["reason"]) for each in found] == [
        *((first.name, number, reason) for number, reason in enumerate(BAD.values(), 1)),
        *((second.name, len(FINE) + number, "not a line of JSON") for number in (1, 2)),
    ]
    assert [each["text"] for each in found[:2]] == ["", "null"]
    assert (found[-2]["text"], found[-2]["size"]) == ("x" * TEXT_BYTES, 5000)
    assert summary.quarantined == len(found)
    assert set(held(lake)) == {row(told) for raw in FINE for told in expand(orjson.loads(raw))}


def judged(raw: bytes) -> list[Row]:
    """Return the rows of a line; ValueError for one that is not as docs/journal.md says."""
    told = orjson.loads(raw)
    lists = [told[name] for name in COLUMNS] if isinstance(told, dict) and set(COLUMNS) <= set(told) else None
    if lists is None or not all(isinstance(told.get(name), str) for name in ("instance", "tenant")):
        raise ValueError
    numbers = [told.get("seq"), *(each for values in lists if isinstance(values, list) for each in values)]
    if any(type(number) is not int or abs(number) >= 2**63 for number in numbers):
        raise ValueError
    if {type(values) for values in lists} != {list} or len({len(values) for values in lists}) != 1:
        raise ValueError
    for each in expand(told):
        times = 0 <= each["at"] <= MAX_TIME and 0 <= each["created_at"] <= MAX_TIME
        small = 0 <= each["what"] <= 127 and -1 <= each["lane"] <= 127
        if not (times and small and each["msg_id"] >= -1 and each["bytes"] >= 0):
            raise ValueError
    if not 0 <= told["seq"] <= MAX_SEQ:
        raise ValueError
    return [row(each) for each in expand(told)]


def damaged(random: Random, lines: list[bytes]) -> bytes:
    """Return lines as a disk may give them back: out of order, again, not at all, cut, with other bytes."""
    kept = [each for each in lines if random.random() < 0.9]
    kept += random.choices(lines, k=random.randrange(4))
    if random.random() < 0.5:
        random.shuffle(kept)
    data = bytearray(b"".join(kept))
    for _ in range(random.choice((0, 0, 1, 5))):
        if data:
            data[random.randrange(len(data))] = random.randrange(256)
    cut = (random.random() < 0.3 and len(data)) or 0
    return bytes(data[: random.randrange(cut)] if cut else data)


@settings(max_examples=3, deadline=None, phases=SHOWN)
@given(seed=st.integers(0, 2**32))
@pytest.mark.timeout(240)
def test_whatever_is_in_the_files_every_good_line_is_taken_once(spark: SparkSession, seed: int) -> None:
    random = Random(seed)
    lines = [
        line(seq, [event(seq * 10 + at) for at in range(random.randrange(4))], instance)
        for seq in range(1, 40)
        for instance in ("host-1", "höst-2")
    ]
    good: dict[tuple[str, int], list[list[Row]]] = {}
    bad = 0
    with TemporaryDirectory() as folder:
        journal, lake = Path(folder) / "journal", Path(folder) / "lake"
        summaries = []
        for number in range(1, 13):
            data = damaged(random, random.sample(lines, 30)) if number % 5 else b""
            write(journal, number, [data])
            for raw in data.removesuffix(b"\n").split(b"\n") if data else []:
                try:
                    rows = judged(raw)
                except ValueError:
                    bad += 1
                else:
                    told = orjson.loads(raw)
                    good.setdefault((told["instance"], told["seq"]), []).append(rows)
            if number % 6 == 0:
                summaries.append(ingest(spark, journal, lake))
        found = held(lake)
        assert sum(summary.quarantined for summary in summaries) == len(quarantined(lake)) == bad
    assert sum(summary.events for summary in summaries) == len(found)
    assert len({each[:3] for each in found}) == len(found)
    for name, copies in good.items():
        # Copies differ only where a byte does; one of them is the one that was taken.
        assert sorted(each for each in found if each[:2] == name) in copies
    assert {each[:2] for each in found} <= set(good)
