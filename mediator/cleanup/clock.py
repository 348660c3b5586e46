"""Watches the wall clock: after a jump forward expiry is paused until an operator confirms the time."""

import os
from contextlib import suppress
from pathlib import Path

import orjson
import structlog

from mediator.system.private_files import open_file

FILE = "clock.json"
"""The file of the data directory with the offset of the clocks, for the next start."""
JUMP = 3600 * 1000
"""Milliseconds the wall clock may run ahead of the time that has passed before expiry is paused."""
_DRIFT = 60 * 1000
"""Milliseconds that the clocks may drift apart before the offset is saved again."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = structlog.get_logger("cleanup")


class ClockWatch:
    """Compares the wall clock with a steady one. All times are milliseconds.

    While paused it remembers the offset from before the jump, so setting the clock back resumes by itself.
    """

    def __init__(self, wall: int, steady: int, offset: int | None = None) -> None:
        """``offset`` is by how much the wall clock was ahead when it was last trusted; None accepts it as it is."""
        self._offset = wall - steady if offset is None else offset
        self.ahead = 0
        """By how much the clock jumped ahead; 0 while expiry is not paused."""
        self.compare(wall, steady)

    @property
    def offset(self) -> int:
        """By how much the wall clock was ahead of the steady one when it was last trusted."""
        return self._offset

    @property
    def paused(self) -> bool:
        """Whether expiry is paused."""
        return self.ahead > 0

    def compare(self, wall: int, steady: int) -> None:
        """Compare the clocks: pause if the wall clock jumped ahead, resume if it was set back."""
        offset = wall - steady
        if self._jumped(offset):
            self.ahead = offset - self._offset
        else:
            self.ahead = 0
            self._offset = offset

    def trusts(self, wall: int, steady: int) -> bool:
        """Whether mail may expire at this time; from any thread, even before :meth:`compare` noticed a jump."""
        return not self.paused and not self._jumped(wall - steady)

    def confirm(self, wall: int, steady: int) -> None:
        """Accept the wall clock as right from now on."""
        self._offset = wall - steady
        self.ahead = 0

    def _jumped(self, offset: int) -> bool:
        return offset - self._offset > JUMP


class ClockRecord:
    """Saves the offset of the clocks, as it was last trusted, in the data directory.

    The steady clock starts again with each boot of the machine, so an offset saved before the boot is ignored.
    """

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE
        self._boot = ""
        with suppress(OSError):
            self._boot = _BOOT_ID.read_text().strip()
        self.offset = self._read()
        """As :attr:`ClockWatch.offset`; None where nothing was written since the machine started."""

    def _read(self) -> int | None:
        try:
            found = orjson.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or not self._boot or found.get("boot") != self._boot:
            return None
        offset = found.get("offset")
        return offset if type(offset) is int else None

    def write(self, offset: int) -> None:
        """Save the offset if it changed; without a writable directory, log that and go on."""
        known = self.offset is not None and abs(offset - self.offset) < _DRIFT
        if known or not self._boot or not self._path.parent.is_dir():
            return
        self.offset = offset
        draft = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            with os.fdopen(open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(orjson.dumps({"boot": self._boot, "offset": offset}))
            draft.replace(self._path)
        except OSError as error:
            _log.warning("cannot save the clock offset", reason=str(error))
