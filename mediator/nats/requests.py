"""Reads the bodies and headers of the current protocol into requests to the broker (M, S, F, K, Q)."""

from collections.abc import Mapping

from mediator.errors import BadRequestError, NoSuchMessageError
from mediator.fields import MAX_NUMBER, Fields, has_controls, milliseconds, parse_words, printable, whole_number
from mediator.mailboxes.address import bare_address, parse_address, writable_address
from mediator.mailboxes.bounds import (
    DEFAULT_FETCH,
    DEFAULT_WAIT,
    MAX_ACK_WAIT,
    MAX_DEDUP_ID,
    MAX_DELIVER,
    MAX_DESC,
    MAX_FETCH,
    MAX_GROUP_NAME,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_IDS,
    MAX_KEY,
    MAX_TAG,
    MAX_TAGS,
    MAX_WAIT,
    MIN_ACK_WAIT,
)
from mediator.mailboxes.creating import Create, Update
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.lanes import parse_lane
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.mailboxes.message import Draft, Filter
from mediator.mailboxes.querying import Query
from mediator.mailboxes.settling import Ack, Extend, Nack
from mediator.nats.subjects import Edition, split_word

MAX_SECONDS = 100 * 366 * 24 * 3600
"""A century; longer times to live and delays are clamped to it."""
ENCODINGS = ("base64", "utf8")
KINDS = (Kind.STANDARD, Kind.LATEST)
"""The kinds that CREATE accepts; others are the service's own (D1, E9)."""
SEND_HEADERS = frozenset(
    {
        "mq9-key",
        "mq9-delay",
        "mq9-ttl",
        "mq9-tags",
        "mq9-priority",
        "mq9-dedup-id",
        "nats-msg-id",
        "mq9-send-at",
        "mq9-expire-at",
        "mq9-reply-to",
        "mq9-storage",
    }
)
"""The headers of SEND that mean something to the service; all others are the sender's own."""


def create(tenant: str, fields: Fields) -> Create:
    """Read MAILBOX.CREATE (M1); older editions may not create names that they could not write to (E2)."""
    ttl = fields.number("ttl", 0, MAX_SECONDS)
    name = fields.text("name", 4096)
    older = fields.has("public") or fields.has("type")
    if name is not None and older and (word := lane_word(name)):
        raise BadRequestError("name", f"expected no lane word at the end of a name with public or type, got {word}")
    return Create(
        tenant=tenant,
        name=name,
        ttl=None if ttl is None else ttl * 1000,
        desc=fields.text("desc", MAX_DESC, lines=True) or "",
        tags=fields.words("tags", MAX_TAGS, MAX_TAG) or (),
        public=bool(fields.flag("public")) if fields.has("public") else None,
        kind=Kind(fields.choice("type", KINDS) or Kind.STANDARD),
        retention=Retention(fields.choice("retention", tuple(Retention)) or Retention.KEEP),
        archive=fields.flag("archive") or False,
        ack_wait=_ack_wait(fields, "ack_wait_ms"),
    )


def lane_word(address: str) -> str:
    """Return the lane word that an older edition would read at the end of an address, empty if there is none (E2)."""
    return next((word for edition in Edition if (word := split_word(edition, address)[1])), "")


def update(tenant: str, address: str, fields: Fields) -> Update:
    """Read MAILBOX.UPDATE (M4): an empty ``desc`` or ``tags`` removes the old one."""
    return Update(
        tenant=tenant,
        address=address,
        token=fields.text("token", 256) or "",
        desc=(fields.text("desc", MAX_DESC, lines=True) or "") if fields.has("desc") else None,
        tags=(fields.words("tags", MAX_TAGS, MAX_TAG) or ()) if fields.has("tags") else None,
    )


def fetch(tenant: str, address: str, fields: Fields, budget: int, connection: str = "") -> Fetch:
    """Read MSG.FETCH (F1–F7) that came over a connection (F9)."""
    config = fields.fields("config")
    group = fields.text("group_name", MAX_GROUP_NAME)
    deliver = Deliver(fields.choice("deliver", tuple(Deliver)) or Deliver.LATEST)
    from_time = fields.time("from_time")
    from_id = fields.number("from_id", 0, None)
    if deliver is Deliver.FROM_TIME and from_time is None:
        raise BadRequestError("from_time", 'expected Unix seconds with deliver "from_time"')
    if deliver is Deliver.FROM_ID and from_id is None:
        raise BadRequestError("from_id", 'expected a msg_id with deliver "from_id"')
    ack_wait = _ack_wait(config, "ack_wait_ms")
    max_deliver = config.number("max_deliver", 1, MAX_DELIVER)
    if group is None and (ack_wait or max_deliver):
        raise BadRequestError("group_name", "expected one with config.ack_wait_ms or config.max_deliver")
    num_msgs = config.number("num_msgs", 1, MAX_FETCH, zero_is_absent=True)
    max_wait = config.number("max_wait_ms", 0, MAX_WAIT)
    return Fetch(
        tenant=tenant,
        address=address,
        group=group,
        deliver=deliver,
        from_time=from_time or 0,
        from_id=from_id or 0,
        force_deliver=fields.flag("force_deliver") or False,
        num_msgs=DEFAULT_FETCH if num_msgs is None else num_msgs,
        max_wait=DEFAULT_WAIT if max_wait is None else max_wait,
        ack_wait=ack_wait,
        max_deliver=max_deliver,
        budget=budget,
        connection=connection,
    )


def ack(tenant: str, address: str, fields: Fields, connection: str = "") -> Ack:
    """Read MSG.ACK (K1, K4) that came over a connection (F9)."""
    return Ack(tenant, address, _group(fields, address), _ids(fields), connection)


def nack(tenant: str, address: str, fields: Fields, _connection: str = "") -> Nack:
    """Read MSG.NACK (F6)."""
    delay = fields.number("delay_ms", 0, MAX_ACK_WAIT)
    return Nack(tenant, address, _group(fields, address), _ids(fields), delay or 0)


def extend(tenant: str, address: str, fields: Fields, _connection: str = "") -> Extend:
    """Read MSG.EXTEND (F6)."""
    ack_wait = _ack_wait(fields, "ack_wait_ms")
    if not ack_wait:
        raise BadRequestError("ack_wait_ms", f"expected {MIN_ACK_WAIT} to {MAX_ACK_WAIT}")
    return Extend(tenant, address, _group(fields, address), _ids(fields), ack_wait)


def query(tenant: str, address: str, fields: Fields, budget: int) -> Query:
    """Read MSG.QUERY (Q1, F7)."""
    limit = fields.number("limit", 1, MAX_FETCH, zero_is_absent=True)
    dead_for = None
    if fields.flag("dead"):
        dead_for = fields.text("group_name", MAX_GROUP_NAME)
        if dead_for is None:
            raise BadRequestError("group_name", 'expected one with "dead": true')
    tags = (*(fields.words("tags", MAX_TAGS, MAX_TAG) or ()), *(fields.words("tag", MAX_TAGS, MAX_TAG) or ()))
    wanted = Filter(
        key=fields.text("key", MAX_KEY),
        tags=tuple(dict.fromkeys(tags)),
        since=fields.time("since"),
        before_id=fields.number("before_id", 0, None),
    )
    headers_only = fields.flag("headers_only") or False
    return Query(tenant, address, wanted, DEFAULT_FETCH if limit is None else limit, budget, dead_for, headers_only)


def message_id(text: str) -> int | None:
    """Read the msg_id at the end of DELETE's subject: canonical decimal; None for anything else (Q2)."""
    if not (text.isascii() and text.isdigit()) or (text != "0" and text[0] == "0") or len(text) > 19:
        return None
    msg_id = int(text)
    return msg_id if msg_id <= MAX_NUMBER else None


def address_and_id(tail: str, field: str = "mail_address") -> tuple[str, int]:
    """Read the address and the msg_id at the end of DELETE's subject; raises :class:`NoSuchMessageError` (Q2)."""
    address, _, last = tail.rpartition(".")
    msg_id = message_id(last)
    if msg_id is None or not address:
        parse_address(tail, field)
        raise NoSuchMessageError
    return writable_address(address, field), msg_id


def _group(fields: Fields, address: str) -> str:
    """Read the group; an empty name is a group that does not exist (K4)."""
    named = fields.text("mail_address", 4096)
    if named is not None and bare_address(named) != address:
        raise BadRequestError("mail_address", f"expected {address} as in the subject, got {named[:128]}")
    return fields.text("group_name", MAX_GROUP_NAME) or ""


def _ids(fields: Fields) -> list[int]:
    ids = fields.numbers("msg_ids", MAX_IDS) or []
    one = fields.number("msg_id", 0, None)
    if one is not None:
        ids = [one, *ids]
    if not ids:
        raise BadRequestError("msg_id", "expected a msg_id, or msg_ids with at least one")
    return ids


def _ack_wait(fields: Fields, name: str) -> int | None:
    """Read a lease in milliseconds; 0: none."""
    ack_wait = fields.number(name, 0, MAX_ACK_WAIT)
    if ack_wait is not None and 0 < ack_wait < MIN_ACK_WAIT:
        raise BadRequestError(fields.path(name), f"expected 0, or {MIN_ACK_WAIT} to {MAX_ACK_WAIT}, got {ack_wait}")
    return ack_wait


def draft(payload: bytes, headers: Mapping[str, str] | None) -> Draft:
    """Read a message of SEND (S1); names of headers match in any case."""
    if not headers:
        return Draft(payload)
    ours: dict[str, str] = {}
    own: dict[str, str] = {}
    for name, value in headers.items():
        known = name.lower()
        if known in SEND_HEADERS:
            if value:
                ours[known] = value
        elif known != "nats-request-info":
            own[name] = value
    if own:
        _check_own(own)
    for known, value in ours.items():
        if has_controls(value):
            raise BadRequestError(known, "expected UTF-8 without control characters")
    if not ours:
        return Draft(payload, headers=own)
    return Draft(
        payload,
        lane=parse_lane(ours.get("mq9-priority", ""), "mq9-priority"),
        key=_short(ours, "mq9-key", MAX_KEY),
        tags=parse_words(ours["mq9-tags"], "mq9-tags", MAX_TAGS, MAX_TAG) if "mq9-tags" in ours else (),
        headers=own,
        ttl=_seconds(ours, "mq9-ttl"),
        expire_at=_time(ours, "mq9-expire-at"),
        delay=_seconds(ours, "mq9-delay"),
        send_at=_time(ours, "mq9-send-at"),
        dedup_id=_short(ours, "mq9-dedup-id", MAX_DEDUP_ID) or _short(ours, "nats-msg-id", MAX_DEDUP_ID),
        reply_to=parse_address(ours["mq9-reply-to"], "mq9-reply-to") if "mq9-reply-to" in ours else None,
        archive=_archive(ours.get("mq9-storage")),
    )


def _check_own(own: Mapping[str, str]) -> None:
    if len(own) > MAX_HEADERS:
        raise BadRequestError("headers", f"expected at most {MAX_HEADERS} of the sender's own, got {len(own)}")
    size = sum(len(text.encode(errors="replace")) for header in own.items() for text in header)
    if size > MAX_HEADER_BYTES:
        raise BadRequestError("headers", f"expected at most {MAX_HEADER_BYTES} bytes of the sender's own, got {size}")
    for name, value in own.items():
        if has_controls(name) or has_controls(value):
            raise BadRequestError(printable(name), "expected UTF-8 without control characters")


def _short(ours: Mapping[str, str], name: str, longest: int) -> str | None:
    value = ours.get(name)
    if value is not None and len(value) > longest:
        raise BadRequestError(name, f"expected at most {longest} characters, got {len(value)}")
    return value


def _whole(ours: Mapping[str, str], name: str, expected: str) -> int | None:
    value = ours.get(name)
    if value is None:
        return None
    value = value.strip()
    number = whole_number(value)
    if number is None or not 0 <= number <= MAX_NUMBER:
        raise BadRequestError(name, f'expected {expected}, got "{printable(value)}"')
    return number


def _seconds(ours: Mapping[str, str], name: str) -> int | None:
    seconds = _whole(ours, name, "whole seconds")
    return None if seconds is None else min(seconds, MAX_SECONDS) * 1000


def _time(ours: Mapping[str, str], name: str) -> int | None:
    seconds = _whole(ours, name, "Unix seconds")
    return None if seconds is None else milliseconds(seconds, name)


def _archive(word: str | None) -> bool:
    if word is not None and word.lower() != "archive":
        raise BadRequestError("mq9-storage", f'expected archive, got "{printable(word)}"')
    return word is not None
