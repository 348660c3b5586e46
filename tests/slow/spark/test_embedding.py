"""Catalogs on their way into the registry: what is read, what is encoded once, and what the service is handed."""

import asyncio
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from mediator.errors import BadRequestError, SetupError, UnavailableError
from minilm import pack
from pipeline.embedding import run
from pipeline.embedding.cards import files_of
from pipeline.embedding.model import Model, ModelPart, encode_batches, find_model
from pipeline.embedding.run import RegistryClient as Handed
from pipeline.embedding.run import batch_agents, card_with
from pipeline.lake import BAD_CARDS, VECTORS, no_progress
from pipeline.lake.storage import delta_arguments
from pipeline.source.options import database_options
from registry.api.operations import MAX_TOGETHER
from registry.cards.card import read_card
from registry.embedding import models
from registry.embedding.encoder import Encoder, JointModel
from registry.embedding.local import LocalModel
from registry.embedding.models import DEFAULT_MODEL, PACKED, ModelShare, join_models, split_model
from registry.embedding.texts import TEMPLATE, card_texts
from registry.embedding.worker import OnnxModel
from registry.index.vectors import pack_rows, unpack_rows
from tests.harness.core import make_settings
from tests.harness.models import change, copy_model, exports, mirror, spoil, wants_models
from tests.harness.object_stores import object_store
from tests.harness.service import Service, Services

pytestmark = wants_models


def card(name: str, text: str = "", **more: Any) -> bytes:
    """Return a card that no writer of JSON would write so."""
    said = {"name": name, "mailbox": name, "description": text, "skills": [{"name": f"“{name}” \t\\ {text}"}], **more}
    return b"\t{ " + json.dumps(said, ensure_ascii=False).encode()[1:] + b" \r"


class Place:
    """A service, and the lake beside it."""

    def __init__(self, service: Service, exported: Path) -> None:
        self.service, self.exported = service, exported
        self.lake = service.data_dir / "lake {2}"
        self.handed = Handed(service.data_dir)

    def model(self, name: Path | str = DEFAULT_MODEL) -> Model:
        return find_model(str(name), self.exported, no_progress)

    def put(self, *cards: bytes) -> None:
        """Hand cards over without Spark."""
        model = self.model()
        fast = OnnxModel(PACKED[DEFAULT_MODEL])
        agents = [card_with(card, pack_rows(fast.encode(card_texts(read_card(card))))) for card in cards]
        self.handed.put("default", model.space, iter(agents), lambda _done: None)

    def asked(self, sql: str) -> list[Any]:
        with closing(sqlite3.connect(self.service.data_dir / "mediator.db")) as database:
            return database.execute(sql).fetchall()

    def agents(self, prefix: str) -> dict[str, tuple[bytes, int]]:
        """Return card and edition by address."""
        found = self.asked(
            "SELECT address, card, edition FROM agent JOIN agent_card ON agent_no = no"
            f" WHERE address GLOB '{prefix}*' ORDER BY no"
        )
        return {address: (bytes(card), edition) for address, card, edition in found}

    def rows(self, name: str) -> list[dict[str, Any]]:
        return list(DeltaTable(self.lake / name).to_pyarrow_table().to_pylist())

    def embed(self, spark: SparkSession, *sources: Path, told: Any = no_progress) -> run.EmbedResult:
        files = files_of(list(map(str, sources)))
        return run.embed_catalog(spark, self.lake, files, self.model(), self.handed, "default", told)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Run one service with a model."""
    exported = exports(tmp_path_factory)
    services = Services(tmp_path_factory.mktemp("embedding"))
    try:
        service = services.new(semantic=True)
        shutil.copytree(exported, service.data_dir / "models")
        asyncio.run(service.serve())
        yield Place(service, exported)
    finally:
        services.close()


def test_cards_arrive_unchanged_with_the_services_vectors(place: Place, spark: SparkSession, tmp_path: Path) -> None:
    lines = [card(f"a.{number}", f"books account {number}") for number in range(5)]
    newer = card("a.1", "no longer books")
    bad = [b"\xff{", b'{"description": "nowhere"}', b'{"mailbox": "a.9", "ttl": "soon"}']
    (tmp_path / "odd [name]{1}").mkdir()
    first = tmp_path / "odd [name]{1}" / "1.jsonl"
    first.write_bytes(b"\n".join([*lines, *bad, b" \r", newer]))
    pq.write_table(pa.table({"card": [card("a.json").decode(), None], "x": [1, 2]}), tmp_path / "2.parquet")
    rows = [{"mailbox": "a.row", "name": "row", "tags": ["x", "y"]}, {"mailbox": "a.2", "name": None, "tags": None}]
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows" / "3.parquet")

    done = place.embed(spark, first, tmp_path / "2.parquet")
    assert (done.cards, done.repeated, done.bad, done.encoded) == (6, 1, 4, 6)
    assert (done.added, done.replaced, done.embedded, done.unchanged) == (6, 0, 0, 0)
    wanted = {f"a.{number}": (line.strip(), 1) for number, line in enumerate(lines)}
    wanted |= {"a.1": (newer.strip(), 1), "a.json": (card("a.json").strip(), 1)}
    assert place.agents("a.") == wanted

    # The service would have made the same, and has not.
    model = place.model()
    fast = OnnxModel(PACKED[DEFAULT_MODEL])
    for kept, _ in wanted.values():
        (vectors,) = place.asked(
            "SELECT vectors FROM agent_vectors JOIN agent_card USING (agent_no)"
            f" WHERE space = '{model.space}' AND card = x'{kept.hex()}'"
        )
        assert vectors[0] == pack_rows(fast.encode(card_texts(read_card(kept))))
    assert place.asked("SELECT count(*) FROM agent WHERE revision <> card_revision") == [(0,)]
    reasons = {row["reason"].split(":")[0]: row for row in place.rows(BAD_CARDS) if row["size"]}
    assert set(reasons) == {"card", "mailbox", "ttl"}
    assert reasons["card"]["text"] == "\ufffd{"
    assert reasons["ttl"]["file"].endswith("1.jsonl")

    before = place.asked("SELECT * FROM agent WHERE address <> 'a.2'")
    again = place.embed(spark, first, tmp_path / "rows")
    assert (again.cards, again.repeated, again.bad, again.encoded) == (6, 2, 3, 2)
    assert (again.added, again.replaced, again.embedded, again.unchanged) == (1, 1, 0, 4)
    assert place.asked("SELECT * FROM agent WHERE address NOT IN ('a.2', 'a.row')") == before
    assert place.agents("a.2") == {"a.2": (b'{"mailbox":"a.2"}', 2)}
    assert json.loads(place.agents("a.row")["a.row"][0]) == rows[0]
    assert len(place.rows(BAD_CARDS)) == 4, "what is bad is kept once"


class Killed(Exception):
    """What ends a run in its midst."""


def test_a_second_run_encodes_only_what_is_left(
    place: Place, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "BATCH_CARDS", 4)
    (tmp_path / "1.jsonl").write_bytes(b"\n".join(card(f"b.{number}") for number in range(10)))
    committed = []

    def told(step: str, done: int, of: int | None) -> None:
        if step == "cards encoded" and done:
            committed.append(done)
            raise Killed

    with pytest.raises(Killed):
        place.embed(spark, tmp_path / "*.jsonl", told=told)
    assert 0 < committed[0] < 10
    assert place.agents("b.") == {}
    # What a crash leaves of a batch.
    (place.lake / VECTORS / f"{99:020d}-{VECTORS}.0123abcd").mkdir()
    # Nor what the model makes nothing of.
    odd = card("b.odd").strip()
    (tmp_path / "2.jsonl").write_bytes(odd)
    refused = {"digest": hashlib.sha256(odd).digest(), "space": place.model().space, "problem": "not finite"}
    schema = pa.schema([("digest", "binary"), ("space", "string"), ("vectors", "binary"), ("problem", "string")])
    write_deltalake(place.lake / VECTORS, pa.Table.from_pylist([refused], schema), mode="append")

    done = place.embed(spark, tmp_path / "*.jsonl")
    assert (done.cards, done.encoded, done.added, done.bad) == (11, 10 - committed[0], 10, 1)
    assert len(place.agents("b.")) == 10
    (kept,) = [row for row in place.rows(BAD_CARDS) if row["reason"] == "not finite"]
    assert (kept["text"], kept["file"].rpartition("/")[2]) == (odd.decode(), "2.jsonl")
    assert not list((place.lake / VECTORS).glob("*.0123abcd"))


def test_vectors_may_be_in_an_object_store(place: Place, spark: SparkSession, tmp_path: Path) -> None:
    catalog = tmp_path / "1.jsonl"
    catalog.write_bytes(b"\n".join([*(card(f"s.{number}") for number in range(5)), b"{torn"]))
    with object_store(tmp_path / "log") as store:
        lake = store.new_place()
        for encoded in (5, 0):
            done = run.embed_catalog(spark, lake, [catalog], place.model(), place.handed, "default")
            assert (done.cards, done.encoded, done.bad) == (5, encoded, 1)
        for name, rows in ((VECTORS, 5), (BAD_CARDS, 1)):
            assert DeltaTable(**delta_arguments(lake / name)).to_pyarrow_table().num_rows == rows
    assert len(place.agents("s.")) == 5


def test_registered_agents_are_embedded_for_a_second_model(place: Place, spark: SparkSession, tmp_path: Path) -> None:
    place.put(*(card(f"c.{number}") for number in range(3)))
    tuned = change(copy_model(tmp_path / "other"), Path(pack.__file__).parents[1] / pack.DIFFERENCE)
    other = place.model(mirror(tuned))
    settings = make_settings(data_dir=place.service.data_dir)

    def embed() -> run.EmbedResult:
        return run.embed_registered(spark, place.lake, database_options(settings), other, place.handed)

    done = embed()
    agents = place.asked("SELECT count(*) FROM agent")[0][0]
    assert (done.cards, done.encoded, done.embedded, done.unchanged) == (agents, agents, agents, 0)
    both = place.asked(
        "SELECT a.vectors, b.vectors FROM agent_vectors AS a JOIN agent_vectors AS b USING (agent_no, card_revision)"
        f" WHERE a.space = '{place.model().space}' AND b.space = '{other.space}'"
    )
    assert len(both) == agents
    # The mirrored model is exported by torch, the default one is packed.
    near = [unpack_rows(one).astype("f4") * -unpack_rows(two).astype("f4") for one, two in both]
    assert min(products.sum(axis=1).min() for products in near) > 0.97
    # Only what has changed since.
    place.put(card("c.1", "quite another"))
    assert embed() == run.EmbedResult(cards=1, encoded=1, embedded=1)

    with pytest.raises(BadRequestError, match="model: expected that of the service"):
        run.embed_catalog(spark, place.lake, [], other, place.handed, "default")


# Without Spark.


def test_an_unreadable_card_is_reported_and_others_embedded(tmp_path: Path) -> None:
    folder = spoil(copy_model(tmp_path / "spoiled"), "unicorn")
    place = models.find_model(str(folder))
    # In this precision it needs no export.
    part = ModelPart(str(folder), place.folder, place.fingerprint, tmp_path / "empty", "float32")
    model = Model([ModelShare("x", 1)], [part], "x@y/float32/384/1")
    cards = [card("a", "keeps books").strip(), card("b", "feeds a unicorn").strip()]
    batch = pa.RecordBatch.from_pydict({"digest": [b"a", b"b", b"c"], "card": [*cards, b"{}"]})
    (made,) = encode_batches(model, iter([batch]))
    good, bad, none = made.to_pylist()
    assert (good["digest"], unpack_rows(good["vectors"]).shape, good["problem"]) == (b"a", (2, 384), None)
    assert bad == {"digest": b"b", "vectors": None, "problem": "the model gives vectors that are not finite"}
    assert none["vectors"] is None
    assert none["problem"].startswith("mailbox: ")


def test_two_models_make_the_vectors_of_the_service(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = join_models([f"{copy_model(tmp_path / 'one')}=.3", f"{DEFAULT_MODEL}=.7"])
    exported = exports(tmp_path_factory)
    model = find_model(name, exported, no_progress)
    batch = pa.RecordBatch.from_pydict({"digest": [b"a"], "card": [card("a", "keeps books").strip()]})
    (made,) = encode_batches(model, iter([batch]))

    async def serve() -> tuple[str, Any]:
        shares = split_model(name)
        backends = [LocalModel(share.name, exported) for share in shares]
        encoder = Encoder(JointModel(name, shares, backends), TEMPLATE)
        await encoder.start()
        try:
            return str(encoder.space), await encoder.cards(card_texts(read_card(card("a", "keeps books").strip())))
        finally:
            await encoder.stop()

    space, vectors = asyncio.run(serve())
    assert model.space == space
    assert made.to_pylist()[0]["vectors"] == pack_rows(vectors)


def test_unusable_vectors_are_refused_by_name(place: Place) -> None:
    space = place.model().space
    rows = unpack_rows(pack_rows(OnnxModel(PACKED[DEFAULT_MODEL]).encode(["x", "y"])))
    good = card_with(card("d.1"), pack_rows(rows.astype("f4")))[0]

    def refused(vectors: Any, where: str = space) -> str:
        with pytest.raises((BadRequestError, UnavailableError)) as error:
            place.handed.put("default", where, iter([(good, 1), (card_with(card("d.2"), vectors)[0], 1)]), print)
        assert place.agents("d.") == {}, "not even the good one is kept"
        return str(error.value)

    wide = rows.astype("f4")
    assert refused(pack_rows(wide[:1])).endswith("agents[1]: expected 2 vectors, got 1")
    assert refused(pack_rows(wide[:, :7])).endswith("agents[1]: expected vectors of 384 numbers, got 7")
    assert refused(pack_rows(wide * 2)).endswith("agents[1]: expected vectors of length one")
    assert refused(pack_rows(wide * float("nan"))).endswith("agents[1]: expected vectors of length one")
    assert refused(b"").endswith("agents[1]: expected packed vectors")
    assert refused(pack_rows(wide), f"x{space}").startswith("space: expected that of the configured model, all-MiniLM")
    assert refused(pack_rows(wide), "all").startswith("space: expected that of the configured model")
    with pytest.raises(BadRequestError, match="space: expected MODEL@FINGERPRINT/PRECISION/DIMS/"):
        place.handed.embed("all", iter([([1, 1, good[1]], 1)]), print)


def test_without_a_service_it_is_said_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no service runs on"):
        Handed(tmp_path).space()


def test_requests_have_few_cards_and_few_bytes() -> None:
    large = card_with(b'{"x": "%b"}' % (b'\\"' * 120_000), b"v" * 50_000)
    small = card_with(b"{}", b"v")
    parts = list(batch_agents(iter([small] * (MAX_TOGETHER + 1) + [large] * 10)))
    assert len(parts[0]) == MAX_TOGETHER
    assert sum(map(len, parts)) == MAX_TOGETHER + 11
    assert all(len(json.dumps(part)) <= 4 * 1024 * 1024 - 64 * 1024 for part in parts)
    assert len(parts) < 8


@pytest.mark.parametrize("source", ["none.jsonl", "*.parquet", "cards.csv", "empty"])
def test_a_source_that_is_no_catalog_is_named(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cards.csv").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadRequestError, match="source: ") as error:
        files_of([source])
    assert source in str(error.value)
