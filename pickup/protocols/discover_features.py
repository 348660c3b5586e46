"""Discover features 1.0 (RFC 0031) and 2.0 (RFC 0557): the supported protocols, and the largest envelope."""

import re
from collections.abc import Sequence

from mediator.errors import BadRequestError
from pickup.dispatcher import Dispatcher, InboundRequest
from pickup.invitations import GOAL_CODE
from pickup.message import DIDCOMM, OLD, Json, ReplyMessage
from pickup.rules.records import Generation

FAMILY = "discover-features"
MAX_QUERIES = 64
MAX_PATTERN = 1024
"""Characters of one query."""
MAX_BYTES = "max_receive_bytes"
RETURN_ROUTE = "return_route"
ROLES = {
    "coordinate-mediation": ["mediator"],
    "messagepickup": ["mediator"],
    "message-pickup": ["mediator"],
    "routing": ["mediator"],
    FAMILY: ["responder"],
}
"""Our role in a protocol, where it is not obvious."""


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers."""
    both = {Generation.V1, Generation.V2}
    dispatcher.register(FAMILY, {(1, 0)}, {"query": query}, generations={Generation.V1}, anonymous=True)
    dispatcher.register(FAMILY, {(2, 0)}, {"queries": queries}, generations=both, anonymous=True)


async def query(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Disclose the protocols that match one pattern (RFC 0031 §query)."""
    pattern = _pattern(request.message.body.get("query"), "query")
    found = [{"pid": pid, **_roles(family)} for pid, family in _protocols(request, pattern)]
    return [request.reply("disclose", {"protocols": found})]


async def queries(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Disclose the features that match any of several queries (RFC 0557 §queries); unknown types match nothing."""
    found: dict[tuple[str, str], Json] = {}
    for one in request.message.fields.items("queries", MAX_QUERIES):
        if not isinstance(one, dict):
            raise BadRequestError("queries", "expected objects with feature-type and match")
        pattern = _pattern(one.get("match"), "match")
        match one.get("feature-type"):
            case "protocol":
                for pid, family in _protocols(request, pattern):
                    found["protocol", pid] = {"feature-type": "protocol", "id": pid, **_roles(family)}
            case "constraint" if matches(pattern, MAX_BYTES):
                limit = str(request.context.max_envelope)
                found["constraint", MAX_BYTES] = {"feature-type": "constraint", "id": MAX_BYTES, MAX_BYTES: limit}
            case "header" if matches(pattern, RETURN_ROUTE):
                found["header", RETURN_ROUTE] = {"feature-type": "header", "id": RETURN_ROUTE}
            case "goal-code" if matches(pattern, GOAL_CODE):
                found["goal-code", GOAL_CODE] = {"feature-type": "goal-code", "id": GOAL_CODE}
    # RFC 0557 and the v2 specification name the reply differently.
    name = "disclosures" if request.message.generation is Generation.V1 else "disclose"
    return [request.reply(name, {"disclosures": list(found.values())})]


def _pattern(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_PATTERN:
        raise BadRequestError(where, f"expected text of at most {MAX_PATTERN} characters")
    # Several stars match the same as one, but cost a search each.
    return re.sub(r"\*+", "*", value)


def _protocols(request: InboundRequest, pattern: str) -> list[tuple[str, str]]:
    """Return matching protocol URIs with their families, with the prefix of the message where it matches."""
    prefixes = dict.fromkeys((request.message.type.prefix, DIDCOMM, OLD))
    found = []
    for spoken in request.context.dispatcher.protocols():
        pid = next((pid for prefix in prefixes if matches(pattern, pid := f"{prefix}{spoken}")), None)
        if pid is not None:
            found.append((pid, spoken.family))
    return found


def _roles(family: str) -> Json:
    return {"roles": ROLES[family]} if family in ROLES else {}


def matches(pattern: str, text: str) -> bool:
    """Whether a text matches a pattern with ``*`` as wildcard; one pass, whatever the pattern."""
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
