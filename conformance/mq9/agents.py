"""Checks of the registry: REGISTER, UNREGISTER, REPORT and DISCOVER (rule G)."""

import json
from typing import Any

from conformance.checks import CheckFailedError, expect
from conformance.mq9.session import BrokerSession, current, equal, own

PAGES = 200
"""Pages of all agents that are searched for ours."""


async def discover(session: BrokerSession, **fields: Any) -> list[dict[str, Any]]:
    """Return the agents that DISCOVER finds: as `agents` beside `error`, or as the bare list of the text's example."""
    reply = await session.request_any("AGENT.DISCOVER", fields)
    if isinstance(reply, dict):
        expect(reply.get("error") == "", f"DISCOVER: expected success, got {reply.get('error')!r}")
        reply = reply.get("agents")
    if not isinstance(reply, list):
        raise CheckFailedError(f"DISCOVER: expected a list of agents, got {reply!r:.200}")
    return reply


async def card(session: BrokerSession, **fields: Any) -> dict[str, Any]:
    """Return an AgentCard of a mailbox that exists, with a name of its own and :func:`word` in its description."""
    mailbox = await session.mailbox()
    return {
        "name": f"agent {mailbox}",
        "mailbox": f"mq9://broker/{mailbox}",
        "description": f"about {word(session)}",
        **fields,
    }


def word(session: BrokerSession) -> str:
    """Return a word that is in no other card."""
    return "zq" + session.prefix.rpartition(".")[2]


def names(agents: list[dict[str, Any]]) -> list[Any]:
    """Return the names of agents."""
    return [agent.get("name") for agent in agents]


async def found_by(session: BrokerSession, wanted: dict[str, Any], **fields: Any) -> None:
    """Expect that DISCOVER finds an agent; an index may need a moment."""

    async def is_found() -> bool:
        return wanted["name"] in names(await discover(session, **fields))

    await session.until(is_found, f"DISCOVER with {json.dumps(fields)} finds {wanted['name']}")


@current(
    "mq9.agent.register",
    "mq9 does not interfere with the body and only requires that it carry a mailbox field as the routing identifier. "
    '… {"error":""}',
)
async def register(session: BrokerSession) -> None:
    agent = await card(session)
    await session.register(agent)
    await found_by(session, agent, text=word(session))


@current("mq9.agent.raw", "Returns the raw list of registered content; mq9 does not transform or wrap it.")
async def cards_come_back_as_they_were(session: BrokerSession) -> None:
    agent = await card(
        session, extra={"z": 1, "a": [1.50, None, "é"]}, skills=[{"id": "s", "name": "S", "tags": ["t"]}]
    )
    await session.register(agent)
    await found_by(session, agent, text=word(session))
    equal(
        "the card",
        [found for found in await discover(session, text=word(session)) if found["name"] == agent["name"]],
        [agent],
    )


@current("mq9.agent.text", "text: Full-text search query (keyword-based).")
async def discover_by_words(session: BrokerSession) -> None:
    payer = await card(session, description=f"pays invoices {word(session)}pay")
    poet = await card(session, description=f"writes poems {word(session)}poem")
    for agent in (payer, poet):
        await session.register(agent)
        await found_by(session, agent, text=f"{word(session)}{'pay' if agent is payer else 'poem'}")
    found = names(await discover(session, text=f"{word(session)}pay"))
    expect(poet["name"] not in found, f"found {poet['name']} by a word that its card does not have")


@current(
    "mq9.agent.semantic",
    "semantic: Semantic search query (natural language, vector-based). Takes priority over text when both are "
    "provided.",
)
async def discover_by_meaning(session: BrokerSession) -> None:
    agent = await card(session, description=f"Translates letters from Polish to Finnish {word(session)}")
    await session.register(agent)
    sentence = f"translate a letter from Polish to Finnish, please: {word(session)}"
    await found_by(session, agent, semantic=sentence)
    await found_by(session, agent, semantic=sentence, text="zzzqqqxxx")


@current(
    "mq9.agent.list", "When neither text nor semantic is provided, all registered Agents for the tenant are returned."
)
async def discover_all(session: BrokerSession) -> None:
    agents = [await card(session) for _ in range(2)]
    for agent in agents:
        await session.register(agent)
        await found_by(session, agent, text=word(session))
    missing = {agent["name"] for agent in agents}
    for page in range(1, PAGES):
        found = await discover(session, limit=1000, page=page)
        missing -= set(names(found))
        if not missing or not found:
            break
    expect(not missing, f"not in the list of all agents: {sorted(missing)}")


@current(
    "mq9.agent.pages",
    "limit: Maximum number of results per page (default 20). page: Page number, starting from 1 (default 1).",
)
async def discover_in_pages(session: BrokerSession) -> None:
    agents = [await card(session, name=f"{word(session)} {number}") for number in range(22)]
    for agent in agents:
        await session.register(agent)
    for agent in (agents[0], agents[-1]):
        await found_by(session, agent, text=word(session), limit=22)
    equal("agents on a page without limit", len(await discover(session, text=word(session))), 20)
    pages = [await discover(session, text=word(session), limit=10, page=page) for page in (1, 2, 3)]
    equal("agents on pages of 10", [len(page) for page in pages], [10, 10, 2])
    equal(
        "agents on all pages",
        sorted(name for page in pages for name in names(page)),
        sorted(agent["name"] for agent in agents),
    )
    expect(len(await discover(session)) <= 20, "more than 20 agents on a page without limit")


@current("mq9.agent.unregister", 'Unregister an Agent. … {"error":""}')
async def unregister(session: BrokerSession) -> None:
    agent = await card(session)
    await session.register(agent)
    await found_by(session, agent, text=word(session))
    await session.ask("AGENT.UNREGISTER", agent)

    async def is_gone() -> bool:
        return agent["name"] not in names(await discover(session, text=word(session)))

    await session.until(is_gone, "the agent is no longer found")


@current(
    "mq9.agent.report",
    'Report Agent status. The body contains upper-layer protocol content; mq9 does not interfere. … {"error":""}',
)
async def report(session: BrokerSession) -> None:
    agent = await card(session)
    await session.register(agent)
    await session.ask("AGENT.REPORT", {"mailbox": agent["mailbox"], "load": 0.5, "any": {"thing": []}})


@own("mq9.agent.replace", "G1", "Registering again replaces what was registered. Both spellings name the same agent.")
async def register_again(session: BrokerSession) -> None:
    agent = await card(session)
    await session.register(agent)
    bare = agent["mailbox"].removeprefix("mq9://broker/")
    changed = {**agent, "mailbox": bare, "name": f"{agent['name']} anew"}
    await session.register(changed)
    await found_by(session, changed, text=word(session))
    equal("agents", await discover(session, text=word(session)), [changed])


@own("mq9.agent.bytes", "G3", "Each agent is the registered object exactly as it came.")
async def cards_keep_their_bytes(session: BrokerSession) -> None:
    agent = await card(session)
    written = json.dumps(agent, indent=3).replace('"about', '"\\u0061bout').encode()
    await session.register(agent)
    await session.ask("AGENT.REGISTER", written)
    answer = await session.client.request(
        "$mq9.AI.AGENT.DISCOVER", json.dumps({"text": word(session)}).encode(), timeout=session.seconds
    )
    session.transcript.came("reply to AGENT.DISCOVER", answer.data)
    expect(written in answer.data, "the reply does not hold the card as it was written")


@own(
    "mq9.agent.cursor",
    "G3",
    "cursor in the request and next in the reply page through a ranked snapshot … total gives the number of results, "
    "and mode says how they were found.",
)
async def discover_by_cursor(session: BrokerSession) -> None:
    for number in range(5):
        skills = [{"id": "s", "name": "S", "tags": ["odd" if number % 2 else "even"]}]
        await session.register(await card(session, name=f"{word(session)} {number}", skills=skills))
    asked = {"text": word(session), "limit": 2, "with_scores": True}
    pages = [await session.ask("AGENT.DISCOVER", asked)]
    equal("mode and total", (pages[0]["mode"], pages[0]["total"]), ("text", 5))
    while pages[-1].get("next") and len(pages) < 4:
        pages.append(await session.ask("AGENT.DISCOVER", {**asked, "cursor": pages[-1]["next"]}))
    equal("agents on pages of 2", [len(page["agents"]) for page in pages], [2, 2, 1])
    found = [name for page in pages for name in names(page["agents"])]
    equal("agents on all pages", sorted(found), [f"{word(session)} {number}" for number in range(5)])
    scores = [score for page in pages for score in page["scores"]]
    equal("scores", scores, sorted(scores, reverse=True))
    odd = await discover(session, text=word(session), filter={"tags": ["odd"]})
    equal("agents with a tag", sorted(names(odd)), [f"{word(session)} {number}" for number in (1, 3)])


@own(
    "mq9.agent.name",
    "G1",
    "An object without a mailbox is identified by its name in the tenant: {name, payload} with a card as JSON text … "
    "or a bare AgentCard of A2A. It is found by the fields of both",
)
async def cards_without_a_mailbox(session: BrokerSession) -> None:
    agent = {"name": session.new_name(), "payload": json.dumps({"description": word(session)})}
    reply = await session.ask("AGENT.REGISTER", agent)
    try:
        equal("mailbox", reply.get("mailbox"), f"name:{agent['name']}")
        expect(reply.get("note"), "the reply has no note that nobody can send to it")
        equal("agents", await discover(session, text=word(session)), [agent])
        await session.ask("AGENT.REPORT", {"name": agent["name"]})
    finally:
        removed = (await session.ask("AGENT.UNREGISTER", {"name": agent["name"]})).get("removed")
    equal("removed", removed, True)


@own(
    "mq9.agent.status",
    "G2",
    "REPORT stores its body, at most 16 KiB and 64 levels, as the latest status and brings last_seen up to now.",
)
async def status(session: BrokerSession) -> None:
    agent = await card(session)
    await session.register(agent)
    await session.ask("AGENT.REPORT", {"name": agent["name"], "load": 0.5})
    reply = await session.ask("AGENT.DISCOVER", {"text": word(session), "with_state": True, "with_scores": True})
    equal("agents and scores", (len(reply["agents"]), len(reply["scores"])), (1, 1))
    [state] = reply["states"]
    equal("state and load", (state["state"], state["status"]["load"]), ("alive", 0.5))


@own(
    "mq9.agent.unknown",
    "G2",
    "If none is found, UNREGISTER succeeds with removed: false, and REPORT says agent X is not registered.",
)
async def unknown_agents(session: BrokerSession) -> None:
    name = session.new_name()
    equal("removed", (await session.ask("AGENT.UNREGISTER", {"mailbox": name})).get("removed"), False)
    error = await session.refused("AGENT.REPORT", {"mailbox": name})
    equal("error", error, f"agent {name} is not registered")


@own(
    "mq9.agent.hidden",
    "G4",
    "A card whose mailbox has a generated address (A1) is shown to others with the mailbox's send-only address (A10) "
    "in its place",
)
async def generated_addresses_are_hidden(session: BrokerSession) -> None:
    made = await session.create(name=None)
    agent = {"name": word(session), "mailbox": made["mail_address"], "description": word(session)}
    await session.register(agent)
    await found_by(session, agent, text=word(session))
    equal("the card", await discover(session, text=word(session)), [{**agent, "mailbox": made["send_address"]}])
    equal("msg_id", await session.send(made["send_address"], b"mail"), 0)


@own("mq9.agent.malformed", "G1", "An object with neither is refused with a clear error.")
async def malformed_cards(session: BrokerSession) -> None:
    for body in (b"", b"[]", b"hello", {"description": "nobody"}, {"mailbox": 1}, {"mailbox": "A-B"}, {"name": 1}):
        await session.refused("AGENT.REGISTER", body)
    for field, value in (
        ("text", 1),
        ("semantic", []),
        ("limit", "many"),
        ("page", -1),
        ("filter", 1),
        ("min_score", "x"),
    ):
        error = await session.refused("AGENT.DISCOVER", {field: value})
        expect(error.startswith(field), f"the error does not name {field}: {error}")
