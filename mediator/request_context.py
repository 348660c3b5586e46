"""What accompanies a request while it is handled: its id, its caller, and what traces it.

The id stands in every log line that the request causes, and in the answer where that helps. It is made when something
is logged, not for every request: most requests log nothing.
"""

import re
import secrets
from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Final, Protocol

REQUEST_ID_HEADER: Final = "X-Request-Id"
"""The header in which a caller names its request, and in which HTTP answers name it."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

trace_id: ContextVar[str | None] = ContextVar("trace_id", default=None)
"""The W3C trace that is being recorded, in 32 hexadecimal digits."""
caller: ContextVar[str] = ContextVar("caller", default="")
"""The credential of a request to a part's verb, ``user NAME`` or ``token NAME``; empty for an anonymous one.

The server vouches for it: it is never a name that a client gives itself. A token of the settings has no name; the
SHA-256 of its text stands for it.
"""
connection: ContextVar[Hashable] = ContextVar("connection", default="")
"""The NATS connection of a request to a part's verb; empty for one over HTTP."""


class RequestScope:
    """One request."""

    __slots__ = ("_headers", "_id")

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        """``headers`` may name the request, or the trace that it belongs to."""
        self._headers = headers
        self._id = ""

    @property
    def id(self) -> str:
        """The id: the one in X-Request-Id, else the trace's, else a random one."""
        if not self._id:
            named = {name.lower(): value for name, value in (self._headers or {}).items()}
            given, parent = (
                named.get(REQUEST_ID_HEADER.lower(), ""),
                _TRACEPARENT.fullmatch(named.get("traceparent", "")),
            )
            if _ID.fullmatch(given):
                self._id = given
            else:
                self._id = (parent[1] if parent else trace_id.get()) or secrets.token_hex(8)
        return self._id


scope: ContextVar[RequestScope | None] = ContextVar("request", default=None)
"""The request that is being handled."""


class TraceableMessage(Protocol):
    """A message that is handed to a consumer; :class:`~mediator.mailboxes.rows.StoredMessage` is one."""

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
    """What tracing may observe of the service; this one observes nothing, and :mod:`mediator.tracing` has the other."""

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
