"""The console's pages of the registry, and the operations on agents behind them (G3, G4)."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from mediator.mailboxes.address import redact
from mediator.operate.control import send_command
from tests.harness.app import PATIENCE, App, app, card
from tests.harness.console_site import ROLES as ALL
from tests.harness.console_site import token

OPERATORS = {"tokens": [{"name": role, "token": token(role), "roles": [role]} for role in ALL]}
SKILLS = [{"id": "translate", "name": "<b>Translate", "tags": ["Letters"]}]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[App]:
    async with app(tmp_path, operators=OPERATORS) as made:
        yield made


async def run(folder: Path, operation: str, **fields: Any) -> dict[str, Any]:
    answer = await send_command(folder, operation, within=PATIENCE, **fields)
    assert answer["error"] == "", answer
    return answer


async def read(service: App, path: str, role: str = "admin", status: int = 200) -> str:
    answer = await service.call("GET", f"/console{path}", token=token(role), Accept="text/html")
    text = answer.data.decode()
    assert answer.status == status, text
    return text


async def test_agents_are_searched_and_the_order_is_explained(service: App) -> None:
    for no in range(25):
        await service.done(
            "AGENT.REGISTER", card(f"a{no}", f"Agent {no}", description="Writes letters " * (no % 5 + 1))
        )
    await service.done("AGENT.REGISTER", card("ann", "<i>Ann", description="Writes in Polish", skills=SKILLS))
    page = await read(service, "/agents?by=words&request=letters+in+polish")
    assert re.search(r"<title>.*Agents", page)
    assert re.findall(r'id="agent-\d+"[^>]*>(\d+)\. ', page) == [str(no) for no in range(1, 21)]
    first = page.partition('id="agent-2"')[0]
    assert "&lt;i&gt;Ann" in first
    assert "Words 1.000: polish, letters" in first
    assert '<rect class="keywords" x="0.00" width="100.00"' in first
    [following] = re.findall(r'id="turn-next" href="/console([^"]*)"', page)
    following = following.replace("&amp;", "&")
    rest = await read(service, following)
    assert re.findall(r'id="agent-\d+"[^>]*>(\d+)\. ', rest) == [str(no) for no in range(21, 27)]
    assert 'id="turn-first"' in rest
    assert "turn-next" not in rest
    late = await read(service, re.sub(r"cursor=[^&]*", "cursor=gone", following))
    assert "this is the first page of a new one" in late
    assert ">1. " in late
    tagged = await read(service, "/agents?tags=letters,+")
    assert re.findall(r'id="agent-\d+"', tagged) == ['id="agent-1"']
    assert "No agent is registered" in await read(service, "/agents?state=gone")
    assert "No agent was found" in await read(service, "/agents?by=words&request=zeppelin")
    assert "Search by meaning is turned off" in await read(service, "/agents")
    page = await read(service, "/agents?request=letters")
    assert "Answered by keywords: search by meaning is turned off." in page
    assert "found by words." in page
    assert "Search by meaning is turned off." not in page, "it is said once"
    await read(service, f"/agents?tags={'x' * 200}", status=400)


async def test_an_agent_is_shown_and_removed_under_either_address(service: App, tmp_path: Path) -> None:
    made = await service.done("MAILBOX.CREATE", {})
    own, to = made["mail_address"], made["send_address"]
    await service.done(
        "AGENT.REGISTER", card(own, "Ann", description="Pays", skills=SKILLS, protocolVersion="0.3.0", url="x")
    )
    await service.done("AGENT.REPORT", {"mailbox": own, "load": "<u>"})
    await service.done("AGENT.REGISTER", card("elsewhere", "Bea"))
    listed = await run(tmp_path, "agent-list", text="pays", explain=True, tags=["letters"])
    assert [(each["mailbox"], each["explanation"]["keywords"]["words"]) for each in listed["agents"]] == [
        (to, ["pays"])
    ]
    assert [each["explanation"] for each in (await run(tmp_path, "agent-list"))["agents"]] == [None, None]
    for address in (own, to):
        shown = await run(tmp_path, "agent-show", mailbox=address)
        assert (shown["mailbox"], shown["send_address"]) == (own, to)
        assert (shown["embedding"], shown["vectors"]) == ("off", 0)
        page = await read(service, f"/agents/default/{address}", "read-payload")
        assert f'href="/console/mailboxes/default/id:{shown["mailbox_number"]}">{own}</a>' in page
        for text in ("&lt;b&gt;Translate", "&lt;u&gt;", "Problems of its card", "As it was sent", "alive"):
            assert text in page, text
        assert "agent-unregister" not in page
    page = await read(service, f"/agents/default/id:{shown['number']}", "read")
    assert f'href="/console/mailboxes/default/id:{shown["mailbox_number"]}">{redact(own)}</a>' in page
    for secret in (own, to, "As it was sent"):
        assert secret not in page
    page = await read(service, "/agents", "read")
    assert redact(to) in page
    assert to not in page
    assert "which does not exist here" in await read(service, "/agents/default/elsewhere")
    assert "agent-unregister" in await read(service, f"/agents/default/{to}", "operate")
    headers = {"Authorization": f"Bearer {token('operate')}"}
    fields = {"mailbox": to, "done": "Agent $mailbox is gone."}
    url = "/console/do/agent-unregister"
    async with service.http.post(url, data=fields, headers=headers, allow_redirects=False) as answer:
        assert unquote(answer.cookies["mediator_notice"].value) == f"Agent {redact(own)} is gone."
    assert [each["name"] for each in (await run(tmp_path, "agent-list"))["agents"]] == ["Bea"]
    await read(service, f"/agents/default/{to}", status=404)
