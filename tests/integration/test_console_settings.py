"""The console's page of the settings in force: where each value is from, what it means, and no secret."""

import io
import logging
import re
from pathlib import Path

import structlog

from mediator.operate import logs
from tests.harness.console_site import console_site, token

ADDRESS = "kx7fsecretaddressofsomebody"


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


async def test_the_log_is_for_operators_alone(tmp_path: Path) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        logs.setup("info", "json", io.StringIO())
        structlog.get_logger("push").warning("read marks not stored", mail_address=ADDRESS, token="hidden-one")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        structlog.reset_defaults()
    async with console_site(tmp_path) as site:
        for role in ("operate", "admin"):
            site.role = role
            page = await site.read("/console/log?level=warning")
            assert "read marks not stored" in page
            assert not any(secret in page for secret in (ADDRESS, "hidden-one"))
            assert 'href="/console/log"' in await site.read("/console")
        assert (await site.get("/console/log?level=x")).status == 400
        for role in ("read", "read-payload"):
            site.role = role
            assert (await site.get("/console/log")).status == 403
            assert 'href="/console/log"' not in await site.read("/console")
        answer = await site.session.get(site.server.make_url("/console/log"), allow_redirects=False)
        assert (answer.status, answer.headers.get("Location", "")[:16]) == (303, "/console/sign-in")
