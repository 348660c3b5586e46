"""What tracing may observe of the service; by default nothing is traced, and all of this does nothing.

:mod:`mediator.tracing` has the other implementation.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class TraceableMessage(Protocol):
    """A message that is handed to a consumer; :class:`~mediator.mailboxes.message.Message` is one."""

    @property
    def msg_id(self) -> int:
        """Its number in its mailbox."""

    @property
    def size(self) -> int:
        """Bytes of it."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The sender's own headers, which may name a trace."""


class TraceHooks:
    """Observes requests and messages."""

    def request(self, name: str) -> AbstractContextManager[object]:
        """Observe a request that comes neither over NATS nor as a request of HTTP, such as a frame of a WebSocket."""
        return nullcontext()

    def annotate(self, name: str, value: object) -> None:
        """Add to what is recorded of the current request; ``value`` is shown as text."""

    def headers(self) -> Mapping[str, str]:
        """Return the headers with which what comes after the current request can continue its trace."""
        return {}

    def delivered(self, messages: Iterable[TraceableMessage], address: str, way: str) -> None:
        """Observe messages of a mailbox that are handed out; ``way`` is a word of ours."""


NO_TRACE = TraceHooks()
