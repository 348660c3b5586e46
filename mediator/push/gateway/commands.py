"""Counts the commands of a verbose client, whose every command the server answers with +OK or -ERR."""

from collections import deque


class CommandCounter:
    """Tells which of these answers are for commands of the gateway, which the client must not see."""

    def __init__(self) -> None:
        self.verbose = True
        """As nats-server has it until CONNECT says otherwise."""
        self._sent = 0
        self._answered = 0
        self._own: deque[int] = deque()

    def note(self, frame: bytes) -> bytes:
        """Count a command that the server answers."""
        self._sent += 1
        return frame

    def note_own(self, frame: bytes) -> bytes:
        """Count a command of the gateway."""
        if self.verbose:
            self._own.append(self._sent)
        return self.note(frame)

    def answers_own(self) -> bool:
        """Count an answer; return whether it answers a command of the gateway."""
        number = self._answered
        self._answered += 1
        if self._own and self._own[0] == number:
            self._own.popleft()
            return True
        return False
