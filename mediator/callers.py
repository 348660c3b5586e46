"""Who makes a request to a part's verb: a credential that the server vouches for, never a name that a client gives."""

from collections.abc import Hashable
from contextvars import ContextVar

current: ContextVar[str] = ContextVar("caller", default="")
"""The credential of the request that is being handled: ``user NAME`` or ``token NAME``; "" for an anonymous one.

A token of the settings has no name; the SHA-256 of its text stands for it.
"""
connection: ContextVar[Hashable] = ContextVar("connection", default="")
"""The NATS connection that it came over; "" for one over HTTP."""
