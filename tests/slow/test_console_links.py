"""Every link on the console's pages leads somewhere: orders of tables, downloads, ranges, guides."""

import html
import re
from urllib.parse import urljoin

import aiohttp

from tests.harness.console_tour import PAGES, TOKENS, fill, run_tasks, settings, wallets
from tests.harness.service import Services

_LINK = re.compile(r'(?:href|hx-get|src)="([^"#:][^":]*)"')


async def test_every_link_on_a_page_leads_somewhere(services: Services) -> None:
    service = services.new()
    service.environment |= settings(service)
    await service.serve()
    await fill(service)
    headers = {"Authorization": f"Bearer {TOKENS['ada'][0]}"}
    links, failed = set[str](), {}
    async with (
        wallets(service),
        aiohttp.ClientSession(f"http://127.0.0.1:{service.http_port}", headers=headers) as session,
    ):
        await run_tasks(service)

        async def read(path: str) -> str:
            async with session.get(path) as response:
                if response.status != 200:
                    failed[path] = response.status
                return await response.text(errors="replace")

        for name, path in PAGES.items():
            if name != "nothing":
                found = map(html.unescape, _LINK.findall(await read(path)))
                links |= {urljoin(path, link).partition("#")[0] for link in found}
        for link in sorted(links):
            await read(link)
    assert {"/console/mailboxes?mailboxes.sort=-rate", "/console/mailboxes?download=mailboxes.csv"} <= links
    assert failed == {}
    assert service.complaints() == []
