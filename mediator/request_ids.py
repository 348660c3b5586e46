"""The id of a request: it stands in every log line that the request causes, and in the answer where that helps.

Ids are made when something is logged, not for every request: most requests log nothing.
"""

import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

HEADER: Final = "X-Request-Id"
"""The header in which a caller names its request, and in which HTTP answers name it."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

trace_id: ContextVar[str | None] = ContextVar("trace_id", default=None)
"""The W3C trace that is being recorded, in 32 hexadecimal digits."""


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
            given, parent = named.get(HEADER.lower(), ""), _TRACEPARENT.fullmatch(named.get("traceparent", ""))
            if _ID.fullmatch(given):
                self._id = given
            else:
                self._id = (parent[1] if parent else trace_id.get()) or secrets.token_hex(8)
        return self._id


current: ContextVar[RequestScope | None] = ContextVar("request", default=None)
"""The request that is being handled."""
