"""What the console does to mailboxes and messages: each form, several rows at once, and who may."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.lanes import Lane
from mediator.operate.operations import ROLES as RIGHTS
from mediator.operate.operations import Actor
from tests.harness.console_site import ROLES, ConsoleSite, console_site

ADMIN = Actor("test", RIGHTS["admin"], "socket")
BOX = "/console/mailboxes/default/task"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[ConsoleSite]:
    async with console_site(tmp_path) as made:
        yield made


async def act(site: ConsoleSite, operation: str, **fields: Any) -> str:
    """Send a form; return the page that it leads to."""
    answer = await site.act(operation, **{"back": BOX} | fields)
    assert answer.status == 303
    return await site.read(answer.headers["Location"])


async def payloads(site: ConsoleSite, address: str = "task") -> list[bytes]:
    return [message.payload for message in await site.core.shown(address)]


async def test_a_mailbox_is_created_and_shown(site: ConsoleSite) -> None:
    assert 'action="/console/do/mailbox-create"' in await site.read("/console/mailboxes")
    form = {"name": "orders.eu", "tenant": "", "retention": "until_ack", "desc": "Orders"}
    then = "/console/mailboxes/$tenant/id:$number"
    page = await act(site, "mailbox-create", **form, then=then, done="Mailbox $mail_address is created.")
    assert "Mailbox orders.eu is created." in page
    assert '<h1 class="address">orders.eu</h1>' in page
    assert "until ack" in page
    assert "already exists" in await act(site, "mailbox-create", **form, then=then, back="/console/mailboxes")


async def test_the_lease_of_a_mailbox_is_changed(site: ConsoleSite) -> None:
    await site.core.create()
    page = await act(site, "mailbox-set", mail_address="task", ack_wait_ms="30000", done="The lease is changed.")
    assert "Now: 30s." in page
    page = await act(site, "mailbox-set", mail_address="task", ack_wait_ms="")
    assert "Now: no lease, the default." in page
    assert "expected 0, or 1000" in await act(site, "mailbox-set", mail_address="task", ack_wait_ms="7")


async def test_selected_messages_are_moved_copied_and_deleted(site: ConsoleSite) -> None:
    for address in ("task", "parked"):
        await site.core.create(address)
    for text in (b"a", b"b", b"c", b"d"):
        await site.core.send(text)
    page = await site.read(BOX)
    assert '<input type="checkbox" form="messages-selected" name="msg_ids" value="3" aria-label="Select 3">' in page
    chosen = {"mail_address": "task", "msg_ids": ["", "0", "1"]}
    page = await act(site, "message-move", **chosen, to_address="parked", done="Messages moved: $moved. $stopped")
    assert "Messages moved: 2." in page
    await act(site, "message-copy", mail_address="task", msg_ids=["", "2"], to_address="parked")
    assert (await payloads(site), await payloads(site, "parked")) == ([b"c", b"d"], [b"a", b"b", b"c"])
    await act(site, "mailbox-purge", mail_address="task", msg_ids=["", "3"])
    assert await payloads(site) == [b"c"]
    assert "there is none" in await act(site, "message-move", mail_address="task", to_address="parked")


async def test_no_box_selected_removes_nothing(site: ConsoleSite) -> None:
    await site.core.create()
    await site.core.send(b"a")
    page = await act(site, "mailbox-purge", mail_address="task", msg_ids="", done="Messages deleted: $purged.")
    assert "Messages deleted: 0." in page
    assert await payloads(site) == [b"a"]
    assert 'name="msg_ids" value=""' in await site.read(BOX)


async def test_selected_mailboxes_are_purged_and_deleted(site: ConsoleSite) -> None:
    for address in ("one", "two", "three"):
        await site.core.create(address)
        await site.core.send(b"x", to=address)
    page = await site.read("/console/mailboxes")
    boxes = [f"tenant=default&mail_address=id:{number}" for number in (1, 2)]
    assert all(box.replace("&", "&amp;") in page for box in boxes)
    lists = "/console/mailboxes"
    done = "Mailboxes purged: $count.$failed"
    assert "Mailboxes purged: 2." in await act(site, "mailbox-purge", chosen=boxes, done=done, back=lists)
    assert [len(await payloads(site, each)) for each in ("one", "two", "three")] == [0, 0, 1]
    gone = "tenant=default&mail_address=id:99"
    page = await act(site, "mailbox-delete", chosen=[gone, *boxes], done="Deleted: $count.$failed", back=lists)
    assert "Deleted: 2. Not done: mailbox id:99 does not exist." in page
    assert "select rows of the table first" in await act(site, "mailbox-delete", chosen="", back=lists)
    entries = await site.core.operations.run(ADMIN, "audit-list", {"operation": "mailbox-delete"})
    assert [each["result"] for each in entries["entries"]] == ["ok", "ok", "mailbox_not_found"]


async def lease(site: ConsoleSite, ack_wait: int, **options: Any) -> None:
    fetch = Fetch("default", "task", "workers", Deliver.EARLIEST, max_wait=0, ack_wait=ack_wait, **options)
    assert (await site.core.broker.fetch(fetch)).messages


async def die(site: ConsoleSite) -> None:
    await lease(site, 1000, max_deliver=1)
    site.core.clock.ahead += 1000


@pytest.mark.rule("F7")
async def test_a_dead_message_is_edited_and_sent_again(site: ConsoleSite) -> None:
    await site.core.create()
    await site.core.send(b'{"price": "x"}\n<b>')
    await die(site)
    listed = await site.read(f"{BOX}/dead/workers")
    assert "delivered as often as the group allows (1)" in listed
    assert f"{BOX}/messages/0?dead_for=workers" in listed
    page = await site.read(f"{BOX}/messages/0?dead_for=workers")
    assert "1 time, as often as the group allows (max deliveries 1)" in page
    assert "{&#34;price&#34;: &#34;x&#34;}\n&lt;b&gt;</textarea>" in page
    form = {"mail_address": "task", "group_name": "workers", "msg_id": "0", "lane": "urgent"}
    text = '{"price": 1}\r\nsecond line'
    assert "Sent again as message 1." in await act(
        site, "dead-resend", **form, payload=text, done="Sent again as message $msg_id."
    )
    assert (await payloads(site))[-1] == b'{"price": 1}\nsecond line'
    assert "No dead messages." in await site.read(f"{BOX}/dead/workers")
    assert "Why it died" not in await site.read(f"{BOX}/messages/1?dead_for=workers")


@pytest.mark.parametrize("payload", [b"two\r\nlines", b"a\0b", b"\xff"])
async def test_what_a_browser_would_change_is_not_edited(site: ConsoleSite, payload: bytes) -> None:
    await site.core.create()
    await site.core.send(payload)
    await die(site)
    page = await site.read(f"{BOX}/messages/0?dead_for=workers")
    assert "It can be sent again as it is, not edited here" in page
    assert "<textarea" not in page
    await act(site, "dead-resend", mail_address="task", group_name="workers", msg_id="0")
    assert (await payloads(site))[-1] == payload


async def test_a_selected_row_wins_over_a_field_of_the_form(site: ConsoleSite) -> None:
    for address in ("task", "other"):
        await site.core.create(address)
        await site.core.send(b"x", to=address)
    fields = {"mail_address": "task", "chosen": "mail_address=other", "done": "$count.$failed"}
    assert "1." in await act(site, "mailbox-purge", **fields)
    assert (await payloads(site), await payloads(site, "other")) == ([b"x"], [])


@pytest.mark.rule("F6")
async def test_leases_are_shown_and_given_back(site: ConsoleSite) -> None:
    await site.core.create()
    for text in (b"a", b"b"):
        await site.core.send(text)
    await lease(site, 60_000)
    assert f'href="{BOX}/leases/workers"' in await site.read(BOX)
    page = await site.read(f"{BOX}/leases/workers")
    assert 'aria-label="Select 1"' in page
    form = {"mail_address": "task", "group_name": "workers", "back": f"{BOX}/leases/workers"}
    assert "Back: 1." in await act(site, "lease-release", **form, msg_ids=["", "1"], done="Back: $released.")
    assert "Back: 1." in await act(site, "lease-release", **form, done="Back: $released.")
    page = await site.read(f"{BOX}/leases/workers")
    assert "No worker holds a message." in page
    assert 'action="/console/do/group-drop"' in page
    del form["back"]
    assert "Group workers is dropped." in await act(site, "group-drop", **form, done="Group $group_name is dropped.")
    assert "No group has fetched from it." in await site.read(BOX)


@pytest.mark.rule("C1")
async def test_a_rule_is_added_shown_and_ended(site: ConsoleSite) -> None:
    for address in ("task", "parked"):
        await site.core.create(address)
    assert "No mail is copied." in await site.read("/console/copies")
    form = {"back": "/console/copies", "done": "Rule $name is there.", "tenant": "", "address": "", "tags": ""}
    chosen = {"priorities": ["urgent", "low"], "when_full": "drop", "ttl_seconds": ""}
    page = await act(site, "copy-rule-add", **form, **chosen, name="some", to_address="parked")
    assert "Rule some is there." in page
    assert 'action="/console/do/copy-rule-remove"' in page
    await site.core.send(b"plain")
    await site.core.send(b"urgent", lane=Lane.URGENT)
    assert await payloads(site, "parked") == [b"urgent"]
    page = await act(site, "copy-rule-remove", back="/console/copies", name="some", done="Rule $name is ended.")
    assert "Rule some is ended." in page
    assert "there is a rule" not in page


ACTS: dict[str, dict[str, Any]] = {
    "mailbox-create": {"name": "mine"},
    "mailbox-set": {"mail_address": "task", "ack_wait_ms": "1000"},
    "mailbox-purge": {"mail_address": "task"},
    "mailbox-delete": {"chosen": "tenant=default&mail_address=task"},
    "message-move": {"mail_address": "task", "to_address": "parked", "msg_ids": "0"},
    "message-copy": {"mail_address": "task", "to_address": "parked", "msg_ids": "0"},
    "copy-rule-add": {"name": "spy", "to_address": "parked"},
    "lease-release": {"mail_address": "task", "group_name": "workers"},
    "dead-resend": {"mail_address": "task", "group_name": "workers", "msg_id": "0"},
    "group-drop": {"mail_address": "task", "group_name": "workers"},
}


@pytest.mark.parametrize("role", [role for role in ROLES if role != "admin"])
async def test_who_may_not_act_is_offered_nothing_and_refused(site: ConsoleSite, role: str) -> None:
    for address in ("task", "parked"):
        await site.core.create(address)
    await site.core.send(b"between us")
    await die(site)
    site.role = role
    pages = [
        await site.read(path)
        for path in ("/console/mailboxes", BOX, f"{BOX}/dead/workers", f"{BOX}/leases/workers", "/console/copies")
    ]
    mayless = ACTS if role != "operate" else ("message-move", "message-copy", "copy-rule-add")
    for name in mayless:
        assert not any(f"/console/do/{name}" in page for page in pages), name
        needed = "read-payload" if role == "operate" else "operate"
        assert f"Not done: this needs the right {needed}." in await act(site, name, **ACTS[name]), name
    assert await payloads(site) == [b"between us"]
    assert await payloads(site, "parked") == []
    if role != "read-payload":
        assert not any("between us" in page for page in pages)
        assert (await site.get(f"{BOX}/messages/0?dead_for=workers")).status == 403


async def test_nobody_acts_without_a_session(site: ConsoleSite) -> None:
    await site.core.create()
    await site.core.send(b"x")
    for name, fields in ACTS.items():
        url = site.server.make_url(f"/console/do/{name}")
        asked = await site.session.post(url, data=fields, allow_redirects=False)
        assert (asked.status, "sign-in" in asked.headers.get("Location", "")) in ((303, True), (401, False)), name
    assert await payloads(site) == [b"x"]
