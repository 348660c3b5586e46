"""Takes the pictures of the documentation in a real browser: ``python docs/pictures.py``. Needs Chromium."""

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
SETTINGS = {"MEDIATOR_DIDCOMM__PUBLIC_URL": "https://mediator.example.org"}


async def invitation() -> bytes:
    """Return the page of an invitation as it looks behind a proxy."""
    from tests.harness.browser import open_tab
    from tests.harness.didcomm_service import Door
    from tests.harness.service import Services

    with tempfile.TemporaryDirectory() as folder:
        services = Services(Path(folder))
        try:
            async with AsyncExitStack() as stack, open_tab() as tab:
                door = await Door.opened(services, stack, settings=SETTINGS)
                short = (await door.invite("--label", "Our mediator", "--ttl", "7d")).v1_short
                await tab.call(
                    "Emulation.setDeviceMetricsOverride", width=800, height=600, deviceScaleFactor=1, mobile=False
                )
                await tab.show(f"http://127.0.0.1:{door.service.http_port}{urlsplit(short).path}")
                return await tab.picture()
        finally:
            services.close()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    (PICTURES / "invitation.png").write_bytes(asyncio.run(invitation()))
