"""The protocols that every agent speaks: trust ping, discover features, problem reports, the empty message."""

import re
from collections.abc import Sequence

import structlog

from mediator.errors import BadRequestError
from pickup.dispatcher import EMPTY, REPORT_FAMILY, REPORT_NAMES, Dispatcher, InboundRequest, no_reply
from pickup.invitations import GOAL_CODE
from pickup.message import DIDCOMM, OLD, Json, ReplyMessage
from pickup.rules import message_queue
from pickup.rules.records import Generation

TRUST_PING = {Generation.V1: ("trust_ping", 1, "ping_response"), Generation.V2: ("trust-ping", 2, "ping-response")}
DISCOVER_FEATURES = "discover-features"
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
    DISCOVER_FEATURES: ["responder"],
}
"""Our role in a protocol, where it is not obvious."""
NOTIFICATION = "notification"
"""The family name that the examples of RFC 0035 and RFC 0685 use."""
_CODE = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = structlog.get_logger("didcomm.problems")


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers."""
    v1, v2 = {Generation.V1}, {Generation.V2}
    for generation, (family, major, response) in TRUST_PING.items():
        pings = {"ping": ping, response: no_reply}
        dispatcher.register(family, {(major, 0)}, pings, generations={generation}, anonymous=True, once={"ping"})
    dispatcher.register(DISCOVER_FEATURES, {(1, 0)}, {"query": disclose_1}, generations=v1, anonymous=True)
    dispatcher.register(DISCOVER_FEATURES, {(2, 0)}, {"queries": disclose_2}, generations=v1 | v2, anonymous=True)
    reports = dict.fromkeys(REPORT_NAMES, note_report)
    dispatcher.register(REPORT_FAMILY, {(1, 0)}, reports, generations=v1, once=REPORT_NAMES)
    dispatcher.register(REPORT_FAMILY, {(2, 0)}, reports, generations=v2, once=REPORT_NAMES)
    dispatcher.register(NOTIFICATION, {(1, 0)}, reports, generations=v1, once=REPORT_NAMES)
    # The empty message carries headers alone, such as ``ack`` or ``from_prior`` (DIDComm v2.1 §The Empty Message).
    dispatcher.register(EMPTY, {(1, 0)}, {EMPTY: no_reply}, generations=v2, anonymous=True)


async def ping(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Reply, unless no response is requested.

    A holder that requests none, on a WebSocket with return route ``all``, gets its mail pushed from then on.
    """
    message, connection = request.message, request.connection
    if message.fields.flag("response_requested", absent=True):
        return [request.reply(TRUST_PING[message.generation][2])]
    if (
        connection is not None
        and connection.mailbox_id is not None
        and message.return_route == "all"
        and not request.repeated
    ):
        # Stored even on HTTP, where it starts nothing: a replay of it on a WebSocket must not start a session.
        await request.mediation.remember_envelope()
        request.context.sessions.implicit(connection, request.channel, request.after)
    return ()


async def disclose_1(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Disclose the protocols that match one pattern (RFC 0031 §query)."""
    pattern = _pattern(request.message.body.get("query"), "query")
    found = [{"pid": pid, **_roles(family)} for pid, family in _protocols(request, pattern)]
    return [request.reply("disclose", {"protocols": found})]


async def disclose_2(request: InboundRequest) -> Sequence[ReplyMessage]:
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


async def note_report(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Log the code, the only part without free text; a batch that the report is about stays queued (D7)."""
    message, connection = request.message, request.connection
    body = message.body
    description = body.get("description")
    code = description.get("code") if isinstance(description, dict) else body.get("code")
    known = isinstance(code, str) and _CODE.fullmatch(code) is not None
    log.debug(
        "problem report received",
        problem=code if known else None,
        connection=None if connection is None else connection.id,
    )
    if connection is not None and not request.repeated:
        about = [thread for thread in (message.thid, message.pthid) if thread is not None]
        await request.mediation.write(
            lambda tx, _now: message_queue.keep_batch(tx, connection, about),
            connection.mailbox_key,
            even_when_full=True,
        )
    return ()
