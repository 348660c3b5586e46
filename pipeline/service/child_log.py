"""The output of a child of the service: the first lines go to the log, and the last ones are kept."""

import asyncio
import contextlib
from collections import deque
from typing import Final

import structlog

MAX_LINES: Final = 200
"""Lines of one child that reach the log."""
MAX_LINE: Final = 500
"""Bytes of one line."""

_TAIL: Final = 20
_log = structlog.get_logger("pipeline")


class ChildLog:
    """Reads the output of one child."""

    def __init__(self) -> None:
        self.last_lines: deque[str] = deque(maxlen=_TAIL)

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read until the output ends."""
        rest, count = b"", 0
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[:MAX_LINE]
            for line in lines:
                count += self._note(line, quiet=count >= MAX_LINES)
        count += self._note(rest, quiet=count >= MAX_LINES)
        if count > MAX_LINES:
            _log.info("more output of the pipeline", lines=count - MAX_LINES)

    def _note(self, line: bytes, *, quiet: bool) -> int:
        text = line[:MAX_LINE].decode(errors="replace").strip()
        if text:
            self.last_lines.append(text)
            if not quiet:
                with contextlib.suppress(Exception):
                    _log.info("pipeline output", text=text)
        return 1 if text else 0
