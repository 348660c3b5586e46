"""Takes the pictures of the documentation in a real browser: ``python docs/pictures.py``. Needs Chromium."""

import asyncio
import base64
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from tests.harness.browser import Tab
    from tests.harness.service import Services

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
SETTINGS = {"MEDIATOR_DIDCOMM__PUBLIC_URL": "https://mediator.example.org"}
CONSOLE = {
    "console-overview": ("overview", 1280, "light"),
    "console-mailboxes": ("mailboxes", 1280, "light"),
    "console-mailbox": ("mailbox", 1280, "dark"),
    "console-connections": ("connections", 1280, "light"),
    "console-agents": ("agents", 1280, "light"),
    "console-alarms": ("alarms", 1280, "light"),
    "console-tenants": ("tenants", 1280, "light"),
    "console-invitation": ("invitation", 1280, "light"),
    "console-checks": ("checks", 1280, "light"),
    "console-phone": ("overview", 375, "dark"),
}
"""Names of pictures, with the page of :mod:`tests.harness.console_tour`, the window's width and its colours."""


@asynccontextmanager
async def opened() -> "AsyncIterator[tuple[Services, AsyncExitStack, Tab]]":
    """Offer services, which end with the block, and a browser."""
    from tests.harness.browser import open_tab
    from tests.harness.service import Services

    with tempfile.TemporaryDirectory() as folder:
        services = Services(Path(folder))
        try:
            async with AsyncExitStack() as stack, open_tab() as tab:
                yield services, stack, tab
        finally:
            services.close()


async def invitation() -> bytes:
    """Return the page of an invitation as it looks behind a proxy."""
    from tests.harness.didcomm_service import Door

    async with opened() as (services, stack, tab):
        door = await Door.opened(services, stack, settings=SETTINGS)
        short = (await door.invite("--label", "Our mediator", "--ttl", "7d")).v1_short
        await tab.call("Emulation.setDeviceMetricsOverride", width=800, height=600, deviceScaleFactor=1, mobile=False)
        await tab.show(f"http://127.0.0.1:{door.service.http_port}{urlsplit(short).path}")
        return await tab.picture()


async def console() -> dict[str, bytes]:
    """Return the console's pages after two minutes of some traffic."""
    from tests.harness import console_tour as tour

    async with opened() as (services, stack, tab):
        service = services.new(semantic=True)
        service.environment |= tour.settings(service) | {"MEDIATOR_INSTANCE": "mediator-1"}
        await service.serve()
        await tour.fill(service)
        await tour.run_tasks(service)
        await stack.enter_async_context(tour.wallets(service))
        origin = f"http://127.0.0.1:{service.http_port}"
        await tour.sign_in(tab, origin)
        await tour.work(service, 120)
        taken = {}
        for name, (page, width, scheme) in CONSOLE.items():
            await tour.resize(tab, width, scheme)
            await tab.show(f"{origin}{tour.PAGES[page]}")
            # A folder as operators have it, instead of a temporary one.
            folder = json.dumps(str(service.data_dir.parent))
            change = f"each.textContent = each.textContent.replace({folder}, '/var')"
            await tab.evaluate(f"for (const each of document.querySelectorAll('.tools span')) {change}")
            await tab.evaluate("new Promise(done => setTimeout(done, 500))")
            shot = await tab.call("Page.captureScreenshot", format="png")
            taken[name] = base64.b64decode(shot["data"])
        return taken


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for name, picture in {"invitation": asyncio.run(invitation()), **asyncio.run(console())}.items():
        (PICTURES / f"{name}.png").write_bytes(picture)
