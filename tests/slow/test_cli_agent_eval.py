"""The command `agent eval`, and what the other commands for agents say when no service answers."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.harness import outside
from tests.harness.outside import OutsideServer, outside_server
from tests.integration.test_cli import Result, alone, environment, program

__all__ = ["alone"]

WHERE = (("within", 2000), ("beyond", 2048))
"""Words of four characters before what is asked: DISCOVER reads 8 192."""
OWN = Path(__file__).parents[1] / "data"


def evaluate(folder: Path, *options: object, **settings: str) -> Result:
    """Run the command in a process of its own, since it sets up logging; with ``registry.`` settings."""
    variables = {f"MEDIATOR_REGISTRY__{name.upper()}": value for name, value in settings.items()}
    command = program("agent", "eval", OWN / "catalog.jsonl", OWN / "queries.jsonl", *options)
    ended = subprocess.run(
        command, cwd=folder, env=environment(COLUMNS="400", **variables), capture_output=True, text=True, check=False
    )
    return Result(ended.returncode, ended.stdout, ended.stderr)


def test_a_catalog_is_judged_without_a_service(tmp_path):
    result = evaluate(tmp_path, "--mode", "text", "--json", "--save", "run.jsonl")
    assert result.code == 0
    found = result.json
    assert (found["cards"], found["requests"], found["model"]) == (20, 20, None)
    figures = found["modes"]["text"]
    assert figures["nDCG@10"]["low"] <= figures["nDCG@10"]["mean"] <= figures["nDCG@10"]["high"]
    assert figures["hit@1"]["mean"] > 0.4
    run = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert len(run) == 20
    assert {line["mode"] for line in run} == {"text"}

    again = evaluate(tmp_path, "--mode", "text", "--against", "run.jsonl")
    assert again.code == 0
    assert "text - text saved   +0.000 [+0.000, +0.000]" in again.out
    few = evaluate(tmp_path, "--mode", "text", "--limit-queries", "5").out
    assert few.startswith("20 cards, 5 requests, no model\n")


@pytest.mark.rule("G3")
def test_a_request_counts_as_far_as_discover_reads_it(tmp_path):
    right = "When is the next high water at the old harbour?"
    requests = [{"qid": at, "query": f"{'the ' * count}{right}", "relevant": ["tide-table"]} for at, count in WHERE]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, requests)))
    command = program("agent", "eval", OWN / "catalog.jsonl", tmp_path / "requests.jsonl", "--save", "run.jsonl")
    subprocess.run([*command, "--mode", "text"], cwd=tmp_path, env=environment(), capture_output=True, check=True)
    run = {line["qid"]: line["ranked"] for line in map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())}
    assert run["within"][0] == "tide-table"
    assert run["beyond"] == []


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ('{"qid": "1", "query": "x", "relevant": ["nobody"]}', "requests.jsonl:1: relevant: no card of the catalog"),
        ("", "requests.jsonl: expected one request at least"),
        (None, "requests.jsonl: No such file"),
    ],
)
def test_requests_that_cannot_be_judged_are_refused(alone, tmp_path, requests, said):
    if requests is not None:
        (tmp_path / "requests.jsonl").write_text(requests)
    result = alone("agent", "eval", OWN / "catalog.jsonl", tmp_path / "requests.jsonl", "--mode", "text")
    assert (result.code, result.out) == (1, "")
    assert said in result.err


def test_invalid_run_is_refused_before_measuring(alone, tmp_path):
    (tmp_path / "run.jsonl").write_text('{"qid": "1"}\n')
    command = ("agent", "eval", OWN / "catalog.jsonl", OWN / "queries.jsonl", "--against", tmp_path / "run.jsonl")
    result = alone(*command)
    assert (result.code, result.out) == (1, "")
    assert "run.jsonl:1: expected" in result.err


async def test_models_of_a_server_are_judged_by_name(tmp_path):
    async with outside_server() as server:
        result = await asyncio.to_thread(
            evaluate, tmp_path, "--embeddings-url", server.url, "--model", "its-model", "--mode", "vectors", "--json"
        )
    assert result.code == 0, result.err
    assert result.json["model"] == "its-model"
    assert result.json["costs"]["vectors"]["memory_mb"] == 0
    assert any("high water" in text for text in server.texts)


async def re_ranked(folder: Path, embedder: OutsideServer, judge: OutsideServer) -> Result:
    options = ("--embeddings-url", embedder.url, "--mode", "semantic", "--mode", "reranked", "--save", "run.jsonl")
    settings = {"rerank_url": judge.rerank_url, "rerank_ms": "10000", "rerank_depth": "12"}
    return await asyncio.to_thread(evaluate, folder, *options, "--json", **settings)


@pytest.mark.rule("G3")
async def test_a_re_ranking_server_has_a_row_of_its_own(tmp_path):
    async with outside_server() as embedder, outside_server() as judge:
        judge.behave = outside.rerank_texts
        result = await re_ranked(tmp_path, embedder, judge)
    assert result.code == 0, result.err
    assert result.json["modes"].keys() == result.json["costs"].keys() == {"semantic", "reranked"}
    assert result.json["not_reranked"] == {"reranked": {}}
    lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    ranked = {(line["mode"], line["qid"]): line["ranked"] for line in lines}
    asked = [request for request in judge.requests if len(request.get("texts", ())) > 1]
    assert len(asked) == 20, "each request once: the row without it asks nothing"
    assert {len(request["texts"]) for request in asked} == {12}
    assert any(ranked["semantic", qid] != found for (mode, qid), found in ranked.items() if mode == "reranked")


@pytest.mark.rule("G3")
async def test_requests_that_were_not_re_ranked_are_counted(tmp_path):
    async def fails(request: web.Request, body: Any) -> web.StreamResponse:
        return await (outside.rerank if len(body["documents"]) == 1 else outside.status(500))(request, body)

    async with outside_server() as embedder, outside_server() as judge:
        judge.behave = fails
        result = await re_ranked(tmp_path, embedder, judge)
        judge.behave = outside.status(500)
        away = await re_ranked(tmp_path, embedder, judge)
    assert result.code == 0, result.err
    (why,) = result.json["not_reranked"].values()
    assert sum(why.values()) == 20
    assert all(problem.startswith("not re-ranked: the re-ranking server ") for problem in why)
    assert result.json["differences"]["reranked - semantic"]["nDCG@10"]["mean"] == 0
    assert away.code == 1
    assert "the re-ranking server" in away.err


def test_without_its_server_nothing_is_re_ranked(alone):
    result = alone("agent", "eval", OWN / "catalog.jsonl", OWN / "queries.jsonl", "--mode", "reranked")
    assert (result.code, result.out) == (1, "")
    assert "set registry.rerank_url" in result.err


@pytest.mark.parametrize("options", [("--model", "A=1+A=2"), ("--model", "A=0+B=1"), ("--embeddings-url", "nowhere")])
def test_wrong_models_are_refused_with_their_option(alone, options):
    result = alone("agent", "eval", OWN / "catalog.jsonl", OWN / "queries.jsonl", *options)
    assert result.code == 2
    assert options[0] in result.err


@pytest.mark.parametrize("command", [("import", OWN / "catalog.jsonl"), ("list",), ("discover", "anybody there?")])
def test_without_a_service_nothing_is_begun(alone, command):
    result = alone("agent", *command, "--server", "nats://127.0.0.1:9")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("mediator: cannot connect to nats://127.0.0.1:9")
