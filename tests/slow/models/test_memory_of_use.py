"""The memory of use with the packed model, through the NATS door and REST (G5–G8)."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.app import App, app, card
from tests.harness.waiting import until

CARDS = (
    card("agent.tides", "Tide Table", description="Tells high and low water for harbours."),
    card("agent.pilots", "Harbour Pilots", description="Guides ships into the harbour."),
    card("agent.soup", "Soup Kitchen", description="Cooks soup for parties."),
)
REQUEST, ALIKE = "When can I leave the port with my boat?", "When may my boat leave the harbour?"


async def search(service: App, text: str, user: str = "") -> dict[str, Any]:
    return await service.done("AGENT.DISCOVER", {"semantic": text, "explain": True}, user)


async def lifted(service: App, text: str) -> set[str]:
    """Return which agents were lifted for a request because they had served others."""
    found = await search(service, text)
    said = zip(found["agents"], found["explanations"], strict=True)
    most = max((why.get("memory", {}).get("score", 0) for why in found["explanations"]), default=0)
    return {agent["mailbox"] for agent, why in said if most and why.get("memory", {}).get("score", 0) == most}


async def ready(service: App) -> None:
    for one in CARDS:
        await service.done("AGENT.REGISTER", one)
        await service.done("MAILBOX.CREATE", {"name": one["mailbox"]})

    async def embedded(description: str) -> bool:
        found = await search(service, description)
        return "card" in found["explanations"][0].get("vectors", {})

    for one in CARDS:
        await until(lambda one=one: embedded(one["description"]), 60, "the card has vectors")


@pytest.mark.rule("G5", "G7")
@pytest.mark.parametrize("door", ["NATS", "REST"])
async def test_who_served_is_found_earlier_for_requests_alike(tmp_path: Path, door: str) -> None:
    async with app(tmp_path, registry={}) as service:
        await ready(service)
        assert await lifted(service, ALIKE) == set()
        said = {"query_id": (await search(service, REQUEST))["query_id"], "useful": True}
        if door == "NATS":
            reply = await service.done("AGENT.FEEDBACK", said | {"mailbox": "agent.pilots"})
        else:
            answer = await service.call("POST", "/agents/agent.pilots/feedback", said)
            assert answer.status == 200
            reply = answer.json
        assert reply["counted"]
        assert await lifted(service, ALIKE) == {"agent.pilots"}
        assert await lifted(service, "Who cooks?") == set()
        await service.done("AGENT.UNREGISTER", {"mailbox": "agent.pilots"})
        assert await lifted(service, ALIKE) == set()


@pytest.mark.rule("G8")
@pytest.mark.parametrize("signs", [True, False])
async def test_a_message_to_a_found_agent_is_a_sign(tmp_path: Path, signs: bool) -> None:
    async with app(tmp_path, registry={"memory_signs": ["default"] if signs else []}) as service:
        await ready(service)
        await service.done("MSG.SEND.agent.soup", b"unasked")
        await search(service, REQUEST)
        await service.done("MSG.SEND.agent.pilots", b"hello")
        if signs:
            await until(lambda: lifted(service, ALIKE), 30, "the sign is remembered")
        assert await lifted(service, ALIKE) == ({"agent.pilots"} if signs else set())
