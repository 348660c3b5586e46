"""The console's page of the audit log: newest first, filtered by operator, operation, outcome and time, in pages."""

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mediator.console.tables import PER_PAGE
from mediator.mailboxes.address import redact
from mediator.mailboxes.bounds import DAY
from mediator.operate.audit import MAX_REFUSED
from tests.harness.console_site import ConsoleSite, console_site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[ConsoleSite]:
    async with console_site(tmp_path) as made:
        yield made


async def listed(site: ConsoleSite, query: str = "") -> list[tuple[str, ...]]:
    """Return operator, operation and result of the acts on the page."""
    rows = (await site.read(f"/console/audit{query}")).partition("<tbody")[2].partition("</tbody>")[0].split("<tr>")[1:]
    cells = [re.findall(r"<td[^>]*>(?:<span[^>]*>)?([^<]*)<", row) for row in rows if "colspan" not in row]
    return [(operator, operation, result) for operator, operation, result, *_ in cells]


async def test_acts_are_filtered_and_their_fields_are_shown(site: ConsoleSite) -> None:
    await site.core.create()
    await site.act("message-send", mail_address="task", payload="between us", lane="urgent")
    site.role = "read"
    await site.act("mailbox-delete", mail_address="task")
    await site.act("mailbox-delete", mail_address="task")
    sent = ("admin", "message-send", "ok")
    refused = ("read", "mailbox-delete", "not allowed")
    often = refused
    assert await listed(site) == [often, sent]
    assert await listed(site, "?actor=admin") == [sent]
    assert await listed(site, "?operation=message-send") == [sent]
    assert await listed(site, "?result=ok") == [sent]
    assert await listed(site, "?result=failed") == [often]
    now = datetime.fromtimestamp(site.core.clock() / 1000, UTC).isoformat(timespec="minutes")[:16]
    assert len(await listed(site, f"?since={now}")) + len(await listed(site, f"?until={now}")) == 2
    assert await listed(site, "?until=2001-01-01T00:00") == []
    assert await listed(site, "?since=2100-01-01T00:00") == []
    page = await site.read("/console/audit")
    assert "<div>lane <code>urgent</code></div>" in page
    assert "between us" not in page
    assert "task" not in page
    assert (await site.get("/console/audit?since=soon")).status == 400


async def test_older_acts_are_on_the_next_page(site: ConsoleSite) -> None:
    for number in range(PER_PAGE + 2):
        await site.act("mailbox-delete", mail_address=f"none{number}")
    page = await site.read("/console/audit?actor=admin")
    assert len(await listed(site, "?actor=admin")) == PER_PAGE
    (older,) = re.findall(r'href="/console/audit(\?[^"]*)">Older', page)
    assert len(await listed(site, older.replace("&amp;", "&"))) == 2


async def test_who_may_not_act_pushes_out_no_entry(site: ConsoleSite) -> None:
    await site.core.create()
    await site.act("message-send", mail_address="task", payload="x")
    site.role = "read"
    for number in range(30):
        await site.act("mailbox-delete", mail_address=f"task{number}", tenant=f"t{number}")
        await site.act("mailbox-set", mail_address="task", ack_wait_ms=number)
    site.role = "operate"
    for _ in range(3):
        await site.act("mailbox-delete", mail_address="none")
    found = (await site.core.ask("audit-list"))["entries"]
    assert [(each["operation"], each["result"], each["times"]) for each in found] == [
        ("mailbox-delete", "mailbox_not_found", 3),
        ("mailbox-set", "not_allowed", 30 - MAX_REFUSED // 2),
        ("mailbox-delete", "not_allowed", 30 - MAX_REFUSED // 2),
        *[("mailbox-set", "not_allowed", 1), ("mailbox-delete", "not_allowed", 1)] * (MAX_REFUSED // 2),
        ("message-send", "ok", 1),
    ]
    # The first different ones are kept as they were asked for.
    assert [each["tenant"] for each in found if each["operation"] == "mailbox-delete"][2:] == [
        f"t{number}" for number in reversed(range(MAX_REFUSED // 2))
    ]
    assert all(each["last_at"] >= each["at"] for each in found)
    site.core.clock.ahead += DAY
    await site.act("mailbox-delete", mail_address="none")
    assert [each["times"] for each in (await site.core.ask("audit-list", limit=2))["entries"]] == [1, 3]


async def test_a_refused_act_names_what_it_asked_for(site: ConsoleSite) -> None:
    site.role = "read"
    await site.act("message-send", tenant="acme", mail_address="task", payload="between us", delay="soon")
    assert (await site.get("/console/mailboxes/acme/task/messages/7")).status == 403
    refused = {"mail_address": redact("task")}
    found = (await site.core.ask("audit-list"))["entries"]
    assert [(each["operation"], each["tenant"], each["fields"], each["result"]) for each in found] == [
        ("message-show", "acme", refused | {"msg_id": 7}, "not_allowed"),
        ("message-send", "acme", refused | {"delay": "soon"}, "not_allowed"),
    ]


@pytest.mark.parametrize("value", ["9" * 30, "9" * 5000, "[" * 9_000, "[" * 300 + "]" * 300, "\ud7ff\0", "1e999"])
async def test_a_field_that_nothing_can_hold_is_refused(site: ConsoleSite, value: str) -> None:
    await site.core.create()
    for role, status in (("operate", 400), ("read", 403)):
        site.role = role
        answer = await site.act("message-send", mail_address="task", payload="x", delay=value, tenant=value[:50])
        assert answer.status in {status, 400}, await answer.text()
    deep = await site.act("dead-drop", mail_address="task", msg_ids=["9" * 30, "[" * 300 + "]" * 300])
    assert deep.status in {400, 403}
    site.role = "operate"
    await site.act("message-send", mail_address="task", payload="x", delay="9" * 30)
    [last] = (await site.core.ask("audit-list", limit=1))["entries"]
    assert (last["result"], last["fields"]["delay"]) == ("bad_request", "int that is too large")
