"""Cards that come in bulk with their vectors: found as others are, and refused by name where they are wrong."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from mediator.errors import BadRequestError
from mediator.operate.control import send_command
from registry.api.operations import MAX_TOGETHER
from registry.embedding.texts import TEMPLATE
from registry.index.vectors import pack_rows
from tests.harness.app import app, card
from tests.harness.directory import instance
from tests.harness.stores import ram_store

SPACE = f"test@1/2/{TEMPLATE}"
VECTORS = pack_rows(np.array([[1, 0]], np.float32))


def cards(*names: str) -> list[bytes]:
    return [orjson.dumps({"mailbox": f"agent.{name}", "name": name, "description": f"knows {name}"}) for name in names]


@pytest.mark.rule("G1", "G3")
async def test_they_are_found_as_soon_as_they_are_taken() -> None:
    async with instance(ram_store(), SPACE) as made:
        await made.register("tide", "knows water")
        taken = await made.directory.register_many("default", SPACE, cards("tide", "bread"), lambda _at, _card: VECTORS)
        assert (taken.added, taken.replaced) == (1, 1)
        assert sorted(await made.found(text="knows")) == ["bread", "tide"]
        assert await made.found(text="water") == []
        assert made.updater.embedded == 2


@pytest.mark.rule("G1")
async def test_one_that_is_no_card_leaves_nothing_of_the_others() -> None:
    async with instance(ram_store(), SPACE) as made:
        with pytest.raises(BadRequestError, match="mailbox"):
            await made.directory.register_many("default", SPACE, [*cards("tide"), b"{}"], lambda _at, _card: VECTORS)
        assert await made.found() == []


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"agents": [["{}", ""]]}, "space: expected none, registry.semantic is turned off"),
        ({"space": 7}, "space: expected string"),
    ],
)
async def test_without_a_model_no_cards_are_taken(tmp_path: Path, fields: dict[str, Any], error: str) -> None:
    async with app(tmp_path):
        assert await send_command(tmp_path, "agents-put", **fields) == {"error": error}


@pytest.mark.parametrize(
    ("agents", "error"),
    [
        (None, "agents: expected array"),
        ([], f"agents: expected a list of 1 to {MAX_TOGETHER}"),
        ([[1, 1, ""]] * (MAX_TOGETHER + 1), f"agents: expected a list of 1 to {MAX_TOGETHER}"),
        ([[1, 1]], "agents[0]: expected [int, int, str]"),
        ([[1, True, ""]], "agents[0]: expected [int, int, str]"),
        ([[1, 1, "é"]], "agents[0]: expected vectors in base64"),
        ([[1, 1, "AAAA"]], "agents[0]: expected packed vectors"),
        ([[2**63, 1, base64.b64encode(VECTORS).decode()]], "agents[0]: expected numbers from 0 to 2**63 - 1"),
        ([[1, -1, base64.b64encode(VECTORS).decode()]], "agents[0]: expected numbers from 0 to 2**63 - 1"),
    ],
)
async def test_an_invalid_list_of_vectors_is_refused(tmp_path: Path, agents: Any, error: str) -> None:
    async with app(tmp_path):
        assert await send_command(tmp_path, "agents-embed", space=SPACE, agents=agents) == {"error": error}


async def test_vectors_of_a_future_model_are_kept_for_same_cards(tmp_path: Path) -> None:
    told = base64.b64encode(VECTORS).decode()
    async with app(tmp_path) as made:
        for name in ("a", "b"):
            await made.done("AGENT.REGISTER", card(name))
        agents = [[1, 1, told], [2, 1, told], [3, 1, told]]
        assert await send_command(tmp_path, "agents-embed", space=SPACE, agents=agents) == {"error": "", "embedded": 1}
