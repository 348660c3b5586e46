"""The console's page of the settings in force: where each value is from, what it means, and no secret."""

import re
from pathlib import Path

from tests.harness.console_site import console_site, token


async def test_settings_are_searched_and_secrets_masked(tmp_path: Path) -> None:
    async with console_site(tmp_path) as site:
        site.role = "read"
        page = await site.read("/console/settings")
        assert '<div id="quotas.mailbox_rate">' in page
        assert "<code>MEDIATOR_QUOTAS__MAILBOX_RATE</code>" in page
        assert token("admin") not in page
        assert "**********" in page
        page = await site.read("/console/settings?text=AUDIT+entries")
        assert re.findall(r'<div id="(\w+\.[^"]*)">', page) == ["operators.audit_days"]
        assert "No option matches." in await site.read("/console/settings?text=<b>")
