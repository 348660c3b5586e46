"""The console's page of the audit log: newest first, filtered by operator, operation, outcome and time, in pages."""

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mediator.console.audit import PER_PAGE
from tests.harness.console_site import ConsoleSite, console_site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[ConsoleSite]:
    async with console_site(tmp_path) as made:
        yield made


async def listed(site: ConsoleSite, query: str = "") -> list[tuple[str, ...]]:
    """Return operator, operation and outcome of the acts on the page."""
    rows = (await site.read(f"/console/audit{query}")).partition("<tbody")[2].partition("</tbody>")[0].split("<tr>")[1:]
    return [tuple(re.findall(r"<td[^>]*>([^<]*)</td>", row)[:3]) for row in rows if "colspan" not in row]


async def test_acts_are_filtered_and_their_fields_are_shown(site: ConsoleSite) -> None:
    await site.core.create()
    await site.act("message-send", mail_address="task", payload="between us", lane="urgent")
    site.role = "read"
    await site.act("mailbox-delete", mail_address="task")
    await site.act("mailbox-delete", mail_address="<b>" * 3)
    sent = ("admin", "message-send", "done")
    refused = ("read", "mailbox-delete", "not allowed")
    assert await listed(site) == [refused, refused, sent]
    assert await listed(site, "?actor=admin") == [sent]
    assert await listed(site, "?operation=message-send") == [sent]
    assert await listed(site, "?result=ok") == [sent]
    assert await listed(site, "?result=failed") == [refused, refused]
    now = datetime.fromtimestamp(site.core.clock() / 1000, UTC).isoformat(timespec="minutes")[:16]
    assert len(await listed(site, f"?since={now}")) + len(await listed(site, f"?until={now}")) == 3
    assert await listed(site, "?until=2001-01-01T00:00") == []
    assert await listed(site, "?since=2100-01-01T00:00") == []
    page = await site.read("/console/audit")
    assert '<span class="soft">lane</span> <code>urgent</code>' in page
    assert "between us" not in page
    assert "&lt;b&gt;" in page
    assert "task" not in page
    assert (await site.get("/console/audit?since=soon")).status == 400


async def test_older_acts_are_on_the_next_page(site: ConsoleSite) -> None:
    for _ in range(PER_PAGE + 2):
        await site.act("mailbox-delete", mail_address="none")
    page = await site.read("/console/audit?actor=admin")
    assert len(await listed(site, "?actor=admin")) == PER_PAGE
    (older,) = re.findall(r'href="/console/audit(\?[^"]*)">Older', page)
    assert len(await listed(site, older.replace("&amp;", "&"))) == 2
