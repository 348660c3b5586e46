"""An operator at the console in a real browser: looks at two pages live, and visits all the others in turn."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.harness.browser import Tab

LOOK_SECONDS = 2.0
"""On a page, before the next."""
PAGE_SECONDS = 60.0
LINKS = "[...document.querySelectorAll('nav[aria-label=Pages] a')].map(each => each.href)"
INNER = "[...document.querySelectorAll('main table a')].map(each => each.href).find(each => each.includes('/console/'))"
TIMES = """(entry => [entry.responseStatus, entry.responseEnd - entry.requestStart])(
  performance.getEntriesByType('navigation')[0])"""
LIVE = "document.querySelector('[data-live]')?.innerText"


class Operator:
    """Uses the console until it is told to leave."""

    def __init__(self, tabs: Sequence[Tab], origin: str, followed: str) -> None:
        """``followed``: the path of a mailbox's page."""
        self._overview, self._mailbox, self._tour = tabs
        self._tabs = tabs
        self._home = f"{origin}/console"
        self._followed = f"{origin}{followed}"
        self.spent_ms: defaultdict[str, list[float]] = defaultdict(list)
        """From the request for a page to the end of the answer, by path."""
        self.troubles: Counter[str] = Counter()

    async def stay(self, seconds: float) -> None:
        """Have the console open for so long."""
        end = time.monotonic() + seconds
        with self._noting():
            async with asyncio.timeout(seconds + PAGE_SECONDS):
                await self._overview.show(self._home)
                await self._mailbox.show(self._followed)
                while time.monotonic() < end:
                    await self._visit_all(end)
                for tab in (self._overview, self._mailbox):
                    if (said := await tab.evaluate(LIVE)) != "Live.":
                        self.troubles[f"a live page says {said!r}"] += 1
        with self._noting():
            async with asyncio.timeout(PAGE_SECONDS):
                await self._leave()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Count what goes wrong in the browser, whatever it is: the load goes on."""
        try:
            yield
        except Exception as error:
            self.troubles[f"the browser: {error!r:.300}"] += 1

    async def _leave(self) -> None:
        """Close the pages."""
        for tab in self._tabs:
            await tab.show("about:blank")
            self.troubles.update(f"console of the browser: {text:.300}" for text in tab.complaints)
            tab.complaints.clear()

    async def _visit_all(self, end: float) -> None:
        """Visit each page of the navigation, and the first that it leads to."""
        await self._visit(self._home)
        links: list[str] = await self._tour.evaluate(LINKS)
        for link in links:
            if time.monotonic() > end:
                return
            await self._visit(link)
            inner: Any = await self._tour.evaluate(INNER)
            if inner and time.monotonic() < end:
                await self._visit(inner, f"from {link.rpartition('/')[2]}")

    async def _visit(self, url: str, name: str = "") -> None:
        await self._tour.show(url)
        status, spent = await self._tour.evaluate(TIMES)
        self.spent_ms[name or url.rpartition("/")[2]].append(spent)
        if status != 200:
            self.troubles[f"page {url}: {status}"] += 1
        await asyncio.sleep(LOOK_SECONDS)
