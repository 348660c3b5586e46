"""The encoder with a model in a folder: its worker, the file it exports, and what becomes of both when they die."""

import asyncio
import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mediator.errors import BusyError, UnavailableError
from registry.embedding import worker as fast
from registry.embedding.encoder import MAX_QUERY_TEXTS, Encoder
from registry.embedding.local import LocalModel
from registry.embedding.models import DEFAULT_MODEL, EmbeddingSpace, fingerprinted
from registry.embedding.worker import PREFIX, PipeFrame, export, lengths, pack, unpack
from tests.harness.models import copy_model, reference_folder, wants_models
from tests.harness.waiting import until

ROOT = Path(__file__).parents[3]
TEXTS = [
    "Books tables in restaurants and reminds the guests.",
    "tide_table: high and low water for harbours\nSkills: next tide; spring tides; warn of storm surges",
    "Wandelt Rechnungen in Buchungssätze um.",
    "Checks long contracts, clause by clause, for what changed since the last edition. " * 40,
    "",
]
ENDS_WITHIN = 60.0  # seconds
LOADS_WITHIN = 100.0

pytestmark = wants_models


@dataclass
class Prepared:
    """What a first start over a damaged file came to, and what sentence-transformers says by itself."""

    cache_dir: Path
    own: NDArray[np.float32]
    vectors: NDArray[np.float32]
    """Of TEXTS, as soon as there were any."""
    space: EmbeddingSpace | None


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    cache_dir = tmp_path_factory.mktemp("models")
    place = fingerprinted(reference_folder())
    damaged = fast.export_folder(cache_dir, place.fingerprint)
    damaged.mkdir()
    for name in (fast.MODEL, fast.TOKENIZER):
        (damaged / name).write_bytes(b"whole")
    fast.describe(damaged, 256, fast.MIXED)
    (damaged / fast.MODEL).write_bytes(b"broken")
    (cache_dir / ".making-left-by-one-that-was-killed").mkdir()
    script = (
        "import sys, json; from sentence_transformers import SentenceTransformer;"
        " model = SentenceTransformer(sys.argv[1], device='cpu');"
        " print(json.dumps(model.encode(json.load(sys.stdin), normalize_embeddings=True).tolist()))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    (cache_dir / "texts").write_text(json.dumps(TEXTS))
    with (
        (cache_dir / "texts").open() as texts,
        subprocess.Popen(
            [sys.executable, "-c", script, str(place.folder)], stdin=texts, stdout=subprocess.PIPE, env=environment
        ) as own,
    ):
        vectors, space = asyncio.run(_prepare(cache_dir))
        reference = np.array(json.loads(own.communicate()[0]), np.float32)
    return Prepared(cache_dir, reference, vectors, space)


async def _prepare(cache_dir: Path) -> tuple[NDArray[np.float32], EmbeddingSpace | None]:
    encoder = Encoder(LocalModel(str(reference_folder()), cache_dir), "test")
    await encoder.start()
    try:
        async with asyncio.timeout(LOADS_WITHIN):
            return await encoder.cards(TEXTS), encoder.space
    finally:
        await encoder.stop()


async def _asked(encoder: Encoder, texts: list[str]) -> NDArray[np.float32]:
    found = await encoder.query(texts, ENDS_WITHIN)
    assert found is not None
    return found


async def turns() -> None:
    """Let what is ready on the event loop go on: what was asked is then on its way to the worker."""
    for _ in range(10):
        await asyncio.sleep(0)


@contextlib.contextmanager
def watched(pid: int) -> Iterator[int]:
    """A file descriptor that can be read when the process has ended."""
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


def pid_of(encoder: Encoder) -> int | None:
    """The process of the encoder's only model; None while none runs."""
    return next(iter(encoder.pids), None)


def ended(handle: int, within: float) -> bool:
    return bool(select.select([handle], [], [], within)[0])


@pytest.fixture
async def encoder(prepared: Prepared) -> AsyncIterator[Encoder]:
    encoder = Encoder(LocalModel(str(reference_folder()), prepared.cache_dir), "test")
    await encoder.start()
    await encoder.wait_ready()
    yield encoder
    await encoder.stop()


async def test_vectors_of_the_first_minutes_are_those_of_later_ones(prepared: Prepared, encoder: Encoder) -> None:
    assert encoder.model == "onnx"
    assert (await encoder.cards(TEXTS) == prepared.vectors).all()
    assert (await _asked(encoder, TEXTS) == prepared.vectors).all()
    assert encoder.space == prepared.space
    assert [path.name for path in prepared.cache_dir.glob(".making-*")] == []


def test_vectors_are_those_of_sentence_transformers(prepared: Prepared) -> None:
    assert (prepared.vectors * prepared.own).sum(axis=1).min() > 0.98
    assert np.linalg.norm(prepared.vectors, axis=1) == pytest.approx(1, abs=1e-3)


def test_no_processor_overflows_on_the_exported_model(prepared: Prepared) -> None:
    """Without VNNI, two neighbouring products of an unsigned and a signed byte are added in a saturating int16."""
    import onnx

    graph = onnx.load(
        fast.export_folder(prepared.cache_dir, fingerprinted(reference_folder()).fingerprint) / fast.MODEL
    ).graph
    matrices = {matrix.name: onnx.numpy_helper.to_array(matrix) for matrix in graph.initializer}
    multiplied = [matrices[node.input[1]] for node in graph.node if node.op_type == "MatMulInteger"]
    assert multiplied
    for weights in multiplied:
        assert weights.dtype == np.int8
        pairs = weights.astype(int).reshape(-1, 2, weights.shape[1])
        assert 255 * pairs.clip(min=0).sum(axis=1).max() < 2**15
        assert 255 * pairs.clip(max=0).sum(axis=1).min() >= -(2**15)


def test_the_space_names_model_precision_and_dimensions(prepared: Prepared) -> None:
    assert prepared.space._replace(fingerprint="") == (str(reference_folder()), "", fast.MIXED, 384, "test")


async def test_after_a_restart_the_space_is_known_at_once(prepared: Prepared) -> None:
    encoder = Encoder(LocalModel(str(reference_folder()), prepared.cache_dir), "test")
    await encoder.start()
    try:
        assert not encoder.ready
        assert encoder.space == prepared.space
    finally:
        await encoder.stop()


async def test_a_vector_does_not_depend_on_other_texts_of_a_batch(encoder: Encoder) -> None:
    alone = await encoder.cards(TEXTS[:1])
    assert ((await encoder.cards(TEXTS))[:1] == alone).all()
    assert (await _asked(encoder, [*TEXTS[1:], TEXTS[0]]))[-1].tolist() == alone[0].tolist()


async def test_a_query_overtakes_cards(encoder: Encoder) -> None:
    cards = asyncio.create_task(encoder.cards([f"{number} {TEXTS[3]}" for number in range(300)]))
    await turns()
    for number in range(5):
        await _asked(encoder, [f"query {number}"])
        assert not cards.done()
    cards.cancel()


async def test_cancelled_calls_are_not_encoded(encoder: Encoder) -> None:
    gone = asyncio.create_task(encoder.cards([f"{number} {TEXTS[3]}" for number in range(3000)]))
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(ENDS_WITHIN):
        assert (await encoder.cards(["next"])).shape == (1, 384)


async def test_the_same_query_again_is_remembered(encoder: Encoder) -> None:
    first = await _asked(encoder, ["one", "two", "one"])
    assert (first[0] == first[2]).all()
    assert pid_of(encoder) is not None
    os.kill(pid_of(encoder), signal.SIGSTOP)
    again = await _asked(encoder, ["two", "one"])
    assert (again == first[1::-1]).all()
    assert await encoder.query(["two", "three"], 0.05) is None


async def test_a_query_in_no_time_and_one_too_long_are_refused(encoder: Encoder) -> None:
    assert await encoder.query(["never asked"], 0) is None
    assert await encoder.query(["x"] * (MAX_QUERY_TEXTS + 1), ENDS_WITHIN) is None
    assert (await _asked(encoder, [])).shape == (0, 384)
    assert (await encoder.cards([])).shape == (0, 384)


async def test_any_text_has_a_vector(encoder: Encoder) -> None:
    odd = [
        "\ud83d",
        "\udc00 half",
        "\0",
        "\n" * 9,
        "\u202e",
        "e\u0301" * 70_000,
        "x" * 1_000_000,
        "🧭",
        "[PAD] [CLS] </s>",
    ]
    vectors = await encoder.cards(odd)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-3)


async def test_too_many_queries_are_refused_the_others_answered(encoder: Encoder) -> None:
    asked = [asyncio.create_task(encoder.query([f"{number}"], ENDS_WITHIN)) for number in range(200)]
    answers = await asyncio.gather(*asked)
    refused = [answer for answer in answers if answer is None]
    assert 0 < len(refused) < 150


async def test_too_many_cards_are_refused(encoder: Encoder) -> None:
    waiting = asyncio.create_task(encoder.cards(["x"] * 20_000))
    await asyncio.sleep(0)
    with pytest.raises(BusyError):
        await encoder.cards(["x"])
    waiting.cancel()


async def test_a_killed_worker_is_restarted_and_pending_calls_fail(encoder: Encoder) -> None:
    pid = pid_of(encoder)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    under_way = asyncio.create_task(encoder.cards(["in the worker's hands"]))
    await turns()
    behind = asyncio.create_task(encoder.cards(["behind it"]))
    query = asyncio.create_task(encoder.query(["asked"], ENDS_WITHIN))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UnavailableError):
        await under_way
    assert await query is None
    assert (await behind).shape == (1, 384)
    assert pid_of(encoder) not in (None, pid)
    assert (await _asked(encoder, ["asked"])).shape == (1, 384)


async def test_an_unexpected_error_fails_one_request_or_worker(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [ZeroDivisionError(), MemoryError()]
    encode, gone = LocalModel.encode, LocalModel.wait_ended

    async def fails_once(self: LocalModel, texts: list[str], *, urgent: bool) -> NDArray[np.float32]:
        if len(failures) == 2:
            raise failures.pop()
        return await encode(self, texts, urgent=urgent)

    async def fails_when_it_ends(self: LocalModel) -> str:
        said = await gone(self)
        if failures:
            raise failures.pop()
        return said

    monkeypatch.setattr(LocalModel, "encode", fails_once)
    monkeypatch.setattr(LocalModel, "wait_ended", fails_when_it_ends)
    with pytest.raises(UnavailableError, match="the encoder failed: MemoryError"):
        await encoder.cards(["one"])
    assert (await encoder.cards(["one"])).shape[0] == 1
    pid = pid_of(encoder)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pid_of(encoder) not in (pid, None), LOADS_WITHIN)
    os.kill(pid_of(encoder) or 0, signal.SIGKILL)
    await until(lambda: "ZeroDivisionError" in (encoder.problem or ""))
    await asyncio.wait_for(encoder.wait_ready(), LOADS_WITHIN)
    assert (await encoder.cards(["two"])).shape[0] == 1


async def test_stop_kills_a_stuck_worker_and_fails_pending_calls(encoder: Encoder) -> None:
    assert pid_of(encoder) is not None
    with watched(pid_of(encoder)) as worker:
        os.kill(pid_of(encoder), signal.SIGSTOP)
        waiting = [asyncio.create_task(encoder.cards([text])) for text in ("one", "two")]
        query = asyncio.create_task(encoder.query(["asked"], ENDS_WITHIN))
        await turns()
        async with asyncio.timeout(ENDS_WITHIN):
            await encoder.stop()
            for task in waiting:
                with pytest.raises(UnavailableError, match="stopped"):
                    await task
        assert await query is None
        assert ended(worker, 0)
    assert encoder.problem == "the encoder has stopped"
    assert await encoder.query(["asked"], ENDS_WITHIN) is None


def test_the_worker_dies_with_its_parent(prepared: Prepared) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path; from registry.embedding.encoder import Encoder\n"
        "from registry.embedding.local import LocalModel\n"
        "async def main():\n"
        f"    encoder = Encoder(LocalModel({str(reference_folder())!r}, Path(sys.argv[1])), 'test')\n"
        "    await encoder.start(); await encoder.wait_ready(); print('pid', *encoder.pids, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, str(prepared.cache_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        said = next(line.split() for line in parent.stdout if line.startswith("pid "))
        with watched(int(said[1])) as worker:
            # Stopped, so that it cannot notice by itself.
            os.kill(int(said[1]), signal.SIGSTOP)
            parent.kill()
            assert ended(worker, ENDS_WITHIN)


@pytest.mark.parametrize("name", ["/no/such/model", "no-such-model", "nobody/no-such-model"])
async def test_a_model_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    encoder = Encoder(LocalModel(name, tmp_path), "test")
    await encoder.start()
    try:
        assert await encoder.query(["x"], ENDS_WITHIN) is None
        async with asyncio.timeout(ENDS_WITHIN):
            for waits in (encoder.wait_ready(), encoder.cards(["x"])):
                with pytest.raises(UnavailableError, match=name):
                    await waits
        assert not encoder.ready
        assert encoder.problem is not None
        assert name in encoder.problem
        assert await encoder.query(["x"], ENDS_WITHIN) is None
    finally:
        await encoder.stop()


def test_a_model_of_another_kind_is_not_exported(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "model")
    pooling = folder / "1_Pooling" / "config.json"
    pooling.unlink()
    said = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    pooling.write_text(json.dumps(said))
    why = export(folder, tmp_path / "cache" / "target")
    assert "only a Transformer with mean pooling" in why
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_output_of_libraries_is_not_taken_for_an_answer(prepared: Prepared) -> None:
    place = fingerprinted(reference_folder())
    script = (
        "import os, sys; from registry.embedding import worker\n"
        "class Loud(worker.OnnxModel):\n"
        "    def encode(self, texts):\n"
        "        print('printed', flush=True); os.system('echo echoed'); sys.stdin.read()\n"
        "        return super().encode(texts)\n"
        "worker.OnnxModel = Loud\n"
        "sys.exit(worker.main())\n"
    )
    arguments = [str(place.folder), place.fingerprint, "some model", str(prepared.cache_dir), ""]
    said = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        input=pack({"texts": ["one"]}) + pack({"texts": "nonsense"[:0]}) + pack({"no": 1}) + pack({"texts": ["two"]}),
        capture_output=True,
        check=True,
    )
    frames = list(_frames(said.stdout))
    assert frames[0].header["runs"] == "onnx"
    assert [frame.rows.shape for frame in frames[1:]] == [(1, 384), (0, 0), (0, 0), (1, 384)]
    assert ["failed" in frame.header for frame in frames[1:]] == [False, True, True, False]
    assert b"printed" in said.stderr
    assert b"echoed" in said.stderr


def _frames(data: bytes) -> Iterator[PipeFrame]:
    while data:
        found = lengths(data[: PREFIX.size])
        tail = PREFIX.size + found.header
        yield unpack(data[PREFIX.size : tail], data[tail : tail + found.rows])
        data = data[tail + found.rows :]


def test_without_the_libraries_the_problem_says_what_to_install(tmp_path: Path) -> None:
    for name in ("numpy", "structlog"):
        spec = importlib.util.find_spec(name)
        assert spec.origin is not None
        (tmp_path / name).symlink_to(Path(spec.origin).parent)
        libraries = Path(spec.origin).parents[1] / f"{name}.libs"
        if libraries.exists():
            (tmp_path / libraries.name).symlink_to(libraries)
    script = (
        "import asyncio; from pathlib import Path; from registry.embedding.encoder import Encoder\n"
        "from registry.embedding.local import LocalModel\n"
        "async def main():\n"
        f"    encoder = Encoder(LocalModel({DEFAULT_MODEL!r}, Path('unused')), 'test')\n"
        "    await encoder.start()\n"
        "    print(encoder.problem, await encoder.query(['x'], 9), encoder.space)\n"
        "    try: await encoder.cards(['x'])\n"
        "    except Exception as error: print(error)\n"
        "    await encoder.stop()\n"
        "asyncio.run(main())\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PATH": os.environ["PATH"]}
    said = subprocess.run(
        [sys.executable, "-S", "-P", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    why = "agent-mediator[search] is not installed"
    assert said.stdout.splitlines()[-2:] == [f"{why} None None", f"unavailable: {why}"], said.stderr
