"""The console's pages of the DIDComm door, and the operations behind them, with wallets that are real."""

import asyncio
import html
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from mediator.operate.control import send_command
from pickup.client import Holder, Sender
from pickup.client.sender import TRY_STEPS
from pickup.rules.names import base58, verkey
from tests.harness.app import PATIENCE, App, app
from tests.harness.console_site import ROLES as ALL
from tests.harness.console_site import token
from tests.harness.didcomm_service import note, note_v2
from tests.harness.live import Live
from tests.harness.waiting import until

LINKS = re.compile(r'id="/console/connections/default/(\d)"')
OPERATORS = {"tokens": [{"name": role, "token": token(role), "roles": [role]} for role in ALL]}


@dataclass
class Door:
    """A service with its console, and wallets that come to it."""

    app: App
    folder: Path
    stack: AsyncExitStack
    sender: Sender

    async def run(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Run an operation as commands do."""
        answer = await send_command(self.folder, operation, within=PATIENCE, **fields)
        assert answer["error"] == "", answer
        return answer

    async def read(self, path: str, role: str = "admin") -> str:
        answer = await self.app.call("GET", f"/console{path}", token=token(role), Accept="text/html")
        text = answer.data.decode()
        assert answer.status == 200, text
        return text

    async def act(self, operation: str, **fields: str) -> str:
        """Send a form, and return what the page that it leads to will say."""
        return (await self.lead(operation, **fields))[0]

    async def lead(self, operation: str, **fields: str) -> tuple[str, str]:
        """Send a form; return what the page will say, and where that is."""
        headers = {"Authorization": f"Bearer {token('admin')}"}
        url = f"/console/do/{operation}"
        async with self.app.http.post(url, data=fields, headers=headers, allow_redirects=False) as answer:
            assert answer.status == 303
            return unquote(answer.cookies["mediator_notice"].value), answer.headers["Location"]

    async def wallet(self, label: str, mails: int, version: str = "v1") -> tuple[Holder, str]:
        """Connect a wallet for which so many messages wait; return the key or DID that it registered."""
        made = await self.run("invite")
        holder = await self.stack.enter_async_context(await Holder.connect(made[f"{version}_url"], label=label))
        grant, key = await holder.mediate(), await holder.add_key()
        for number in map(str, range(mails)):
            if version == "v1":
                await self.sender.send_v1(key, grant.routing, grant.endpoint, note(number))
            else:
                await self.sender.send_v2(key, grant.routing[0], grant.endpoint, note_v2(number))
        return holder, key


@asynccontextmanager
async def opened(folder: Path, **didcomm: Any) -> AsyncIterator[Door]:
    async with app(folder, operators=OPERATORS, didcomm=didcomm) as service, AsyncExitStack() as stack:
        yield Door(service, folder, stack, await stack.enter_async_context(Sender()))


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async with opened(tmp_path) as made:
        yield made


async def test_connections_are_found_ordered_shown_and_removed(door: Door) -> None:
    keys = [(await door.wallet(*wallet))[1] for wallet in (("<i>Ann", 1), ("Ben", 3), ("", 2, "v2"))]

    async def ranked(**fields: Any) -> list[int]:
        return [each["connection"] for each in (await door.run("connections-rank", **fields))["connections"]]

    assert await ranked() == [3, 2, 1]
    for order, numbers in {"depth": [2, 3, 1], "size": [3, 2, 1], "age": [1, 2, 3], "idle": [1, 2, 3]}.items():
        assert await ranked(order=order) == numbers, order
    assert await ranked(order="depth", skip=1, limit=1) == [3]
    shown = await door.run("connections-show", connection=1)
    assert (shown["policy"], shown["on_list"]) == ("open", None)
    named = {
        "<I>a": [1], keys[0]: [1], keys[0][:30]: [1], keys[0].removeprefix("did:key:")[:30]: [1],
        base58(verkey(keys[1])): [2], keys[2]: [3], keys[2][:40]: [3], shown["callers"][0][:40]: [1],
        shown["mail_address"][:10]: [1], "did:": [3, 2, 1], "nobody": [],
    }  # fmt: skip
    assert {text: await ranked(text=text) for text in named} == named
    # The mailbox of another may begin with this, too.
    assert 2 in await ranked(text="2")
    page = await door.read("/connections?text=%3Ci%3Eann")
    assert "&lt;i&gt;Ann" in page
    assert "<i>" not in page
    assert LINKS.findall(await door.read("/connections?connections.sort=-messages")) == ["2", "3", "1"]
    one = await door.read("/connections/default/1")
    assert keys[0] in one
    assert "/console/do/" not in (await door.read("/connections/default/1", "read")).replace("do/sign-out", "")
    removed = await door.act("connections-remove", connection="1", done="Gone: $connection.")
    assert removed == "Gone: 1."
    assert await ranked() == [3, 2]
    caller = (await door.run("connections-show", connection=2))["callers"][0]
    assert await door.act("access-add", list="deny", name=caller, note="loud") == "Done."
    assert (await door.run("connections-show", connection=2))["on_list"] == "deny"
    assert "On the deny list" in await door.read("/connections/default/2")


async def test_an_invitation_is_made_drawn_and_withdrawn(door: Door) -> None:
    fields = {"tenant": "default", "label": "<b>Ours", "ttl_ms": "3600000", "uses": "1", "done": "Here it is."}
    notice, path = await door.lead("invite", **fields, then="/console/invitations/$tenant/$id")
    assert notice == "Here it is."
    [made] = (await door.run("invitations-list"))["invitations"]
    assert path == f"/console/invitations/default/{made['id']}"
    shown = await door.run("invitations-show", id=made["id"])
    assert (shown["open"], shown["uses"], shown["max_uses"]) == (True, 0, 1)
    page = await door.read(path.removeprefix("/console"))
    assert page.count("data:image/png;base64,") == 4
    assert "<b>" not in page
    assert shown["v2_short_url"] in html.unescape(page)
    async with await Holder.connect(shown["v1_short_url"], label="Ann") as holder:
        await holder.mediate()
    page = await door.read(path.removeprefix("/console"))
    assert "data:image" not in page
    assert "used up" in page
    for _ in range(2):
        await door.run("invite")
    assert [len((await door.run("invitations-list", skip=skip, limit=2))["invitations"]) for skip in (0, 2, 3)] == [
        2,
        1,
        0,
    ]
    assert await door.act("invitations-remove", id=made["id"], done="$id is gone.") == f"{made['id']} is gone."
    assert made["id"] not in await door.read("/invitations")
    refused, path = await door.lead("invite", uses="0", back="/console/invitations", then="/console/mailboxes")
    assert (refused, path) == ("Not done: uses: expected 1 to 1000000000.", "/console/invitations")


async def test_the_door_is_tried_and_nothing_is_left_behind(door: Door) -> None:
    for version in ("v1", "v2"):
        tried = await door.run("didcomm-try", didcomm=version)
        assert [step["step"] for step in tried["steps"]] == [*TRY_STEPS, "cleaned up"]
        assert all(step["ok"] for step in tried["steps"])
        assert (tried["ok"], tried["advice"]) == (True, "")
    assert (await door.run("connections-list", limit=1))["total"] == 0
    assert (await door.run("invitations-list", limit=1))["total"] == 0
    assert (await door.run("mailbox-list", limit=10))["mailboxes"] == []
    assert (await door.act("didcomm-try", didcomm="v1", done="$summary")).startswith("It works: 8 steps")
    assert [each["didcomm"] for each in (await door.run("didcomm-tries"))["tries"]] == ["v1", "v2", "v1"]
    page = await door.read("/try", "read")
    assert page.count("acknowledged") == 3
    assert "Try it now" not in page


async def test_a_door_that_cannot_be_reached_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pickup.operate.trial.TRY_SECONDS", 1.0)
    # The system accepts its connections, and nobody answers.
    silent = socket.create_server(("127.0.0.1", 0))
    async with opened(tmp_path, public_url=f"http://127.0.0.1:{silent.getsockname()[1]}") as door:

        async def refused() -> bool:
            both = (send_command(tmp_path, "didcomm-try", within=PATIENCE, didcomm="v1") for _ in range(2))
            return any("another attempt is running" in answer["error"] for answer in await asyncio.gather(*both))

        await until(refused, what="a second attempt at the same time is refused")
        failed = (await door.run("didcomm-tries"))["tries"][0]
        assert [(step["step"], step["ok"]) for step in failed["steps"]] == [("connected", False), ("cleaned up", True)]
        assert failed["summary"] == "Failed before it was connected."
        assert "didcomm.public_url" in failed["advice"]
        assert "didcomm.public_url" in await door.read("/try")
        assert (await door.run("invitations-list", limit=1))["total"] == 0
    silent.close()


async def test_a_policy_that_refuses_the_attempt_is_named(tmp_path: Path) -> None:
    async with opened(tmp_path, policy="allow") as door:
        failed = await door.run("didcomm-try", didcomm="v2")
        assert failed["summary"] == "Failed before it was granted."
        assert failed["advice"].startswith("didcomm.policy is allow")
        assert (await door.run("connections-list", limit=1))["total"] == 0


async def test_names_are_put_on_the_lists_and_taken_off(door: Door) -> None:
    added = await door.act("access-add", list="deny", name="203.0.113.9/24", note="<b>loud", done="$name: $list")
    assert added == "203.0.113.0/24: deny"
    for number in range(3):
        await door.run("access-add", list="allow", name=f"192.0.2.{number}", note=f"agent {number}")
    page = await door.read("/access")
    assert "203.0.113.0/24" in page
    assert "&lt;b&gt;loud" in page
    assert "192.0.2.0" not in page
    assert "192.0.2.1" in await door.read("/access?list=allow&text=agent+1")
    listed = await door.run("access-list", list="allow", text="AGENT", skip=1, limit=1)
    assert ([each["name"] for each in listed["names"]], listed["total"]) == (["192.0.2.1/32"], 3)
    assert "Remove" not in await door.read("/access", "read")
    assert await door.act("access-remove", list="deny", name="203.0.113.0/24") == "Done."
    assert "No entries." in await door.read("/access")


async def test_sessions_queues_and_totals_are_shown(door: Door) -> None:
    await door.wallet("Ann", 2)
    holder, _ = await door.wallet("Ben", 1)
    await door.wallet("Idle", 0)
    async with Live.of(holder):
        [session] = (await door.run("live-sessions"))["sessions"]
        assert (session["connection"], session["mode"], session["pushed"]) == (2, "live", 0)
        page = await door.read("/sessions", "read")
        assert "<td>live</td>" in page
        assert LINKS.findall(page) == ["2"]
        assert (await door.run("live-sessions", skip=1))["sessions"] == []
        assert (await door.run("live-sessions", tenant="other"))["total"] == 0
    await until(lambda: shows(door, "/sessions", "No live sessions."), what="the session is over")
    assert LINKS.findall(await door.read("/queues")) == ["1", "2"]
    outbound = await door.run("didcomm-outbound")
    assert (outbound["messages"], outbound["bytes"], outbound["servers"]) == (0, 0, [])
    page = await door.read("/statistics")
    assert "Last seen within" in page
    columns = (await door.app.call("GET", "/console/statistics/hours.json", token=token("read"))).json["columns"]
    assert {len(column) for column in columns.values()} == {24}
    # The hour may have ended meanwhile.
    assert sum(columns["queued"]) == 3
    assert sum(columns["size.queued"]) > 1000


async def shows(door: Door, path: str, text: str) -> bool:
    return text in await door.read(path)
