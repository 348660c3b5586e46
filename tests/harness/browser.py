"""A real browser without a window: Chromium, driven over its DevTools protocol.

Where there is no Chromium the tests are skipped, but fail where CI is set.
"""

import asyncio
import base64
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from tests.harness.didcomm_service import missing
from tests.harness.waiting import until

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
LOADED = (
    """new Promise(resolve => document.readyState === "complete" ? resolve() : addEventListener("load", resolve))"""
)
GREY = """(async () => {
  const image = new Image();
  image.src = "data:image/png;base64,%s";
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const drawing = canvas.getContext("2d");
  drawing.drawImage(image, 0, 0);
  const data = drawing.getImageData(0, 0, image.width, image.height).data;
  const grey = Array.from({length: data.length / 4}, (_, i) => data[4 * i] + data[4 * i + 1] + data[4 * i + 2]);
  return {width: image.width, grey: grey.map(value => Math.round(value / 3))};
})()"""


class Tab:
    """One page; use :func:`open_tab`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.complaints: list[str] = []
        """What the browser wrote to its console: what the page's policy stopped, and errors of scripts."""

    async def attach(self) -> None:
        """Make the page that this drives."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send_str(
            orjson.dumps({"id": number, "method": method, "params": parameters, **session}).decode()
        )
        while True:
            said = orjson.loads(await self._socket.receive_str())
            if said.get("method") in {"Log.entryAdded", "Runtime.exceptionThrown"} or _is_error(said):
                self.complaints.append(str(said["params"]))
            if said.get("id") == number:
                assert "error" not in said, said
                result: dict[str, Any] = said["result"]
                return result

    async def close_browser(self) -> None:
        """End the browser with all its pages."""
        await self._socket.send_str('{"id": 0, "method": "Browser.close"}')

    async def show(self, url: str) -> None:
        """Open a URL and wait until it is loaded."""
        assert "errorText" not in await self.call("Page.navigate", url=url)
        await self.evaluate(LOADED)

    async def evaluate(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives, as a user's click would run it."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key of the keyboard; ``code`` is its Windows key code."""
        for type in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=type, key=key, code=key, windowsVirtualKeyCode=code, text=text
            )

    async def picture(self, selector: str | None = None, width: float | None = None) -> bytes:
        """Return a PNG of the page, or of an element, at most so many pixels wide."""
        rectangle = "document.documentElement" if selector is None else f"document.querySelector({selector!r})"
        box = await self.evaluate(
            f"(r => ({{x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height}}))"
            f"({rectangle}.getBoundingClientRect())"
        )
        scale = 1 if width is None else width / box["width"]
        shot = await self.call(
            "Page.captureScreenshot", format="png", clip={**box, "scale": scale}, captureBeyondViewport=True
        )
        return base64.b64decode(shot["data"])

    async def grey(self, png: bytes) -> Any:
        """Return the grey values of a picture, an array of height by width; leaves the page for an empty one."""
        await self.show("about:blank")
        found = await self.evaluate(GREY % base64.b64encode(png).decode())
        return np.array(found["grey"], np.uint8).reshape(-1, found["width"])


@asynccontextmanager
async def open_tab() -> AsyncIterator[Tab]:
    """Start the browser with a profile of its own, and end it afterwards."""
    async with open_tabs(1) as (tab,):
        yield tab


@asynccontextmanager
async def open_tabs(count: int, *before: str) -> AsyncIterator[list[Tab]]:
    """Do the same with several pages, each of which counts as looked at; ``before`` is a command that runs it."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        missing("needs Chromium")
    assert program is not None
    nowhere = asyncio.subprocess.DEVNULL
    with tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *before, program, *OPTIONS, f"--user-data-dir={folder}", stdout=nowhere, stderr=nowhere
        )
        try:
            url = await until(lambda: _listening(Path(folder)), what="the browser listens")
            async with aiohttp.ClientSession() as session, AsyncExitStack() as sockets:
                tabs = []
                for _ in range(count):
                    tabs.append(Tab(await sockets.enter_async_context(session.ws_connect(url, max_msg_size=0))))
                    await tabs[-1].attach()
                yield tabs
                await tabs[0].close_browser()
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _is_error(said: dict[str, Any]) -> bool:
    """Return whether a script of the page wrote an error or a warning."""
    return said.get("method") == "Runtime.consoleAPICalled" and said["params"]["type"] in {"error", "warning"}


def _listening(folder: Path) -> str | None:
    """Return the WebSocket of the browser, once it has written its port and its path."""
    file = folder / "DevToolsActivePort"
    lines = file.read_text().split() if file.exists() else []
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}" if len(lines) == 2 else None
