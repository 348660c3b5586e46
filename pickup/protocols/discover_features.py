"""Discover features 1.0 (RFC 0031) and 2.0: which protocols are spoken here, and the size of what is taken."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mediator.errors import BadRequestError
from mediator.mediation.records import Generation
from pickup.dispatch import Call
from pickup.fields import items
from pickup.message import DIDCOMM, OLD, Json, Reply

if TYPE_CHECKING:
    from pickup.dispatch import Dispatcher

FAMILY = "discover-features"
MAX_QUERIES = 64
MAX_PATTERN = 1024
"""Characters of one query."""
MAX_BYTES = "max_receive_bytes"
ROLES = {
    "coordinate-mediation": ["mediator"],
    "messagepickup": ["mediator"],
    "message-pickup": ["mediator"],
    "routing": ["mediator"],
    FAMILY: ["responder"],
}
"""What we are in a protocol, where that is not plain."""


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher."""
    both = {Generation.V1, Generation.V2}
    dispatcher.register(FAMILY, {(1, 0)}, {"query": query}, generations={Generation.V1}, anonymous=True)
    dispatcher.register(FAMILY, {(2, 0)}, {"queries": queries}, generations=both, anonymous=True)


async def query(call: Call) -> Sequence[Reply]:
    """Disclose the protocols that match one pattern (1.0)."""
    pattern = _pattern(call.message.body.get("query"), "query")
    found = [{"pid": pid, **_roles(family)} for pid, family in _protocols(call, pattern)]
    return [Reply(call.message.type.named("disclose"), {"protocols": found}, thid=call.message.thread)]


async def queries(call: Call) -> Sequence[Reply]:
    """Disclose what matches any of several patterns, by kind of feature (2.0); of kinds we do not have, nothing."""
    found: dict[tuple[str, str], Json] = {}
    for one in items(call.message.body, "queries", MAX_QUERIES):
        if not isinstance(one, dict):
            raise BadRequestError("queries", "expected objects with feature-type and match")
        pattern = _pattern(one.get("match"), "match")
        match one.get("feature-type"):
            case "protocol":
                for pid, family in _protocols(call, pattern):
                    found["protocol", pid] = {"feature-type": "protocol", "id": pid, **_roles(family)}
            case "constraint" if matches(pattern, MAX_BYTES):
                limit = str(call.office.max_envelope)
                found["constraint", MAX_BYTES] = {"feature-type": "constraint", "id": MAX_BYTES, MAX_BYTES: limit}
    # RFC 0557 and the v2 specification name the answer differently.
    name = "disclosures" if call.message.generation is Generation.V1 else "disclose"
    return [Reply(call.message.type.named(name), {"disclosures": list(found.values())}, thid=call.message.thread)]


def _pattern(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_PATTERN:
        raise BadRequestError(where, f"expected text of at most {MAX_PATTERN} characters")
    # Several stars say what one says, but each is looked for.
    return re.sub(r"\*+", "*", value)


def _protocols(call: Call, pattern: str) -> list[tuple[str, str]]:
    """Return URIs of protocols, with their families; in the prefix of the message if the pattern lets it."""
    prefixes = dict.fromkeys((call.message.type.prefix, DIDCOMM, OLD))
    found = []
    for spoken in call.office.dispatcher.protocols():
        pid = next((pid for prefix in prefixes if matches(pattern, pid := f"{prefix}{spoken}")), None)
        if pid is not None:
            found.append((pid, spoken.family))
    return found


def _roles(family: str) -> Json:
    return {"roles": ROLES[family]} if family in ROLES else {}


def matches(pattern: str, text: str) -> bool:
    """Whether a text is what a pattern says, in which ``*`` stands for anything; in one pass, whatever the pattern."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == text
    *middle, last = rest
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
