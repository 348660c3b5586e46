"""Watches the wall clock: after a jump forward expiry is paused until an operator confirms the time."""

JUMP = 3600 * 1000
"""Milliseconds the wall clock may run ahead of the time that has passed before expiry is paused."""


class ClockWatch:
    """Compares the wall clock with a steady one. All times are milliseconds.

    While paused it remembers the offset from before the jump, so setting the clock back resumes by itself.
    """

    def __init__(self, wall: int, steady: int) -> None:
        self._offset = wall - steady
        self.ahead = 0
        """By how much the clock jumped ahead; 0 while expiry is not paused."""

    @property
    def paused(self) -> bool:
        """Whether expiry is paused."""
        return self.ahead > 0

    def look(self, wall: int, steady: int) -> None:
        """Compare the clocks: pause if the wall clock jumped ahead, resume if it was set back."""
        offset = wall - steady
        if self._jumped(offset):
            self.ahead = offset - self._offset
        else:
            self.ahead = 0
            self._offset = offset

    def trusts(self, wall: int, steady: int) -> bool:
        """Whether mail may expire at this time; from any thread, also before the next :meth:`look` noticed a jump."""
        return not self.paused and not self._jumped(wall - steady)

    def confirm(self, wall: int, steady: int) -> None:
        """Accept the wall clock as right from now on."""
        self._offset = wall - steady
        self.ahead = 0

    def _jumped(self, offset: int) -> bool:
        return offset - self._offset > JUMP
