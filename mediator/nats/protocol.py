"""The bodies of the current protocol: reads requests by tables of their fields, and writes replies (M, S, F, K, Q).

A reply is a JSON object with ``error``, complete also when the request failed (N1, N6, N9).
"""

from binascii import b2a_base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import orjson

from mediator.errors import BadRequestError, MediatorError, NoSuchMessageError
from mediator.fields import (
    MAX_NUMBER,
    Fields,
    FieldTable,
    has_controls,
    milliseconds,
    parse_words,
    printable,
    whole_number,
)
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
from mediator.mailboxes.copy_rule import COPY_HEADERS
from mediator.mailboxes.creating import Create, Created, Update
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.lanes import SHOWN, parse_lane
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.mailboxes.message import HIDDEN_ID, Draft, Filter
from mediator.mailboxes.querying import Query
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.settling import Ack, Extend, Nack
from mediator.nats.frames import VERSION, ProtocolViolationError, decode_bodies, decode_headers
from mediator.nats.subjects import Edition, split_word

MAX_SECONDS = 100 * 366 * 24 * 3600
"""A century; longer times to live and delays are clamped to it."""
ENCODINGS = ("base64", "utf8")
KINDS = (Kind.STANDARD, Kind.LATEST)
"""The kinds that CREATE accepts; others are the service's own (D1, E9)."""
RETENTIONS = tuple(Retention)
DELIVERIES = tuple(Deliver)
MAX_BATCH = 1000
"""Messages in one BATCH."""
BATCH_REPLY_BYTES = 1024
"""Bytes that the reply may need for one message; a server that takes only small messages takes fewer of them."""
NOT_CREATED: Mapping[str, Any] = {
    "mail_address": "",
    "mail_id": "",
    "send_address": "",
    "inbox": "",
    "created": False,
    "token": "",
}
"""The fields of CREATE's reply when it failed."""
REPLY_TO = "mq9-reply-to"
"""The header in which the sender gave an address for the reply."""
MAX_WORDS = 200
"""Characters of each error in a reply that may hold many."""


# The fields of requests.


def _read_ack_wait(fields: Fields, name: str) -> int | None:
    """Read a lease in milliseconds; 0: none."""
    ack_wait = fields.number(name, 0, MAX_ACK_WAIT)
    if ack_wait is not None and 0 < ack_wait < MIN_ACK_WAIT:
        raise BadRequestError(fields.path(name), f"expected 0, or {MIN_ACK_WAIT} to {MAX_ACK_WAIT}, got {ack_wait}")
    return ack_wait


def _read_tags(fields: Fields, name: str) -> tuple[str, ...] | None:
    return fields.words(name, MAX_TAGS, MAX_TAG)


CREATE: Final[FieldTable] = {
    "name": lambda fields, name: fields.text(name, 4096),
    "ttl": lambda fields, name: fields.number(name, 0, MAX_SECONDS),
    "desc": lambda fields, name: fields.text(name, MAX_DESC, lines=True),
    "tags": _read_tags,
    "public": lambda fields, name: fields.flag(name),
    "type": lambda fields, name: fields.choice(name, KINDS),
    "retention": lambda fields, name: fields.choice(name, RETENTIONS),
    "archive": lambda fields, name: fields.flag(name),
    "ack_wait_ms": _read_ack_wait,
}
UPDATE: Final[FieldTable] = {
    "token": lambda fields, name: fields.text(name, 256),
    "desc": lambda fields, name: fields.text(name, MAX_DESC, lines=True),
    "tags": _read_tags,
}
FETCH: Final[FieldTable] = {
    "group_name": lambda fields, name: fields.text(name, MAX_GROUP_NAME),
    "deliver": lambda fields, name: fields.choice(name, DELIVERIES),
    "from_time": lambda fields, name: fields.time(name),
    "from_id": lambda fields, name: fields.number(name, 0, None),
    "force_deliver": lambda fields, name: fields.flag(name),
    "encoding": lambda fields, name: fields.choice(name, ENCODINGS),
}
FETCH_CONFIG: Final[FieldTable] = {
    "num_msgs": lambda fields, name: fields.number(name, 1, MAX_FETCH, zero_is_absent=True),
    "max_wait_ms": lambda fields, name: fields.number(name, 0, MAX_WAIT),
    "ack_wait_ms": _read_ack_wait,
    "max_deliver": lambda fields, name: fields.number(name, 1, MAX_DELIVER),
}
ACK: Final[FieldTable] = {
    "group_name": lambda fields, name: fields.text(name, MAX_GROUP_NAME),
    "mail_address": lambda fields, name: fields.text(name, 4096),
    "msg_id": lambda fields, name: fields.number(name, 0, None),
    "msg_ids": lambda fields, name: fields.numbers(name, MAX_IDS),
}
NACK: Final[FieldTable] = {**ACK, "delay_ms": lambda fields, name: fields.number(name, 0, MAX_ACK_WAIT)}
EXTEND: Final[FieldTable] = {**ACK, "ack_wait_ms": _read_ack_wait}
QUERY: Final[FieldTable] = {
    "limit": lambda fields, name: fields.number(name, 1, MAX_FETCH, zero_is_absent=True),
    "key": lambda fields, name: fields.text(name, MAX_KEY),
    "tags": _read_tags,
    "tag": _read_tags,
    "since": lambda fields, name: fields.time(name),
    "before_id": lambda fields, name: fields.number(name, 0, None),
    "dead": lambda fields, name: fields.flag(name),
    "headers_only": lambda fields, name: fields.flag(name),
    "encoding": lambda fields, name: fields.choice(name, ENCODINGS),
}


# Requests.


def read_create(tenant: str, fields: Fields) -> Create:
    """Read MAILBOX.CREATE (M1); older editions may not create names that they could not write to (E2)."""
    given = fields.read(CREATE)
    name, ttl = given["name"], given["ttl"]
    older = fields.has("public") or fields.has("type")
    if name is not None and older and (word := find_lane_word(name)):
        raise BadRequestError("name", f"expected no lane word at the end of a name with public or type, got {word}")
    return Create(
        tenant=tenant,
        name=name,
        ttl=None if ttl is None else ttl * 1000,
        desc=given["desc"] or "",
        tags=given["tags"] or (),
        public=bool(given["public"]) if fields.has("public") else None,
        kind=Kind(given["type"] or Kind.STANDARD),
        retention=Retention(given["retention"] or Retention.KEEP),
        archive=given["archive"] or False,
        ack_wait=given["ack_wait_ms"],
    )


def find_lane_word(address: str) -> str:
    """Return the lane word that an older edition would read at the end of an address, empty if there is none (E2)."""
    return next((word for edition in Edition if (word := split_word(edition, address)[1])), "")


def read_update(tenant: str, address: str, fields: Fields) -> Update:
    """Read MAILBOX.UPDATE (M4): an empty ``desc`` or ``tags`` removes the old one."""
    given = fields.read(UPDATE)
    return Update(
        tenant=tenant,
        address=address,
        token=given["token"] or "",
        desc=(given["desc"] or "") if fields.has("desc") else None,
        tags=(given["tags"] or ()) if fields.has("tags") else None,
    )


def read_fetch(tenant: str, address: str, fields: Fields, budget: int, connection: str = "") -> tuple[Fetch, bool]:
    """Read MSG.FETCH (F1–F7) that came over a connection (F9), and whether it wants payloads as text (N6)."""
    given, config = fields.read(FETCH), fields.fields("config").read(FETCH_CONFIG)
    deliver = Deliver(given["deliver"] or Deliver.LATEST)
    if deliver is Deliver.FROM_TIME and given["from_time"] is None:
        raise BadRequestError("from_time", 'expected Unix seconds with deliver "from_time"')
    if deliver is Deliver.FROM_ID and given["from_id"] is None:
        raise BadRequestError("from_id", 'expected a msg_id with deliver "from_id"')
    if given["group_name"] is None and (config["ack_wait_ms"] or config["max_deliver"]):
        raise BadRequestError("group_name", "expected one with config.ack_wait_ms or config.max_deliver")
    request = Fetch(
        tenant=tenant,
        address=address,
        group=given["group_name"],
        deliver=deliver,
        from_time=given["from_time"] or 0,
        from_id=given["from_id"] or 0,
        force_deliver=given["force_deliver"] or False,
        num_msgs=config["num_msgs"] or DEFAULT_FETCH,
        max_wait=DEFAULT_WAIT if config["max_wait_ms"] is None else config["max_wait_ms"],
        ack_wait=config["ack_wait_ms"],
        max_deliver=config["max_deliver"],
        budget=budget,
        connection=connection,
    )
    return request, given["encoding"] == "utf8"


def read_ack(tenant: str, address: str, fields: Fields, connection: str = "") -> Ack:
    """Read MSG.ACK (K1, K4) that came over a connection (F9)."""
    given = fields.read(ACK)
    return Ack(tenant, address, _group(given, address), _ids(given), connection)


def read_nack(tenant: str, address: str, fields: Fields) -> Nack:
    """Read MSG.NACK (F6)."""
    given = fields.read(NACK)
    return Nack(tenant, address, _group(given, address), _ids(given), given["delay_ms"] or 0)


def read_extend(tenant: str, address: str, fields: Fields) -> Extend:
    """Read MSG.EXTEND (F6)."""
    given = fields.read(EXTEND)
    if not given["ack_wait_ms"]:
        raise BadRequestError("ack_wait_ms", f"expected {MIN_ACK_WAIT} to {MAX_ACK_WAIT}")
    return Extend(tenant, address, _group(given, address), _ids(given), given["ack_wait_ms"])


def _group(given: Mapping[str, Any], address: str) -> str:
    """Return the group; an empty name is a group that does not exist (K4)."""
    named = given["mail_address"]
    if named is not None and bare_address(named) != address:
        raise BadRequestError("mail_address", f"expected {address} as in the subject, got {named[:128]}")
    return given["group_name"] or ""


def _ids(given: Mapping[str, Any]) -> list[int]:
    ids = given["msg_ids"] or []
    if given["msg_id"] is not None:
        ids = [given["msg_id"], *ids]
    if not ids:
        raise BadRequestError("msg_id", "expected a msg_id, or msg_ids with at least one")
    return ids


def read_query(tenant: str, address: str, fields: Fields, budget: int) -> tuple[Query, bool]:
    """Read MSG.QUERY (Q1, F7), and whether it wants payloads as text (N6)."""
    given = fields.read(QUERY)
    dead_for = None
    if given["dead"]:
        dead_for = fields.text("group_name", MAX_GROUP_NAME)
        if dead_for is None:
            raise BadRequestError("group_name", 'expected one with "dead": true')
    wanted = Filter(
        key=given["key"],
        tags=tuple(dict.fromkeys((*(given["tags"] or ()), *(given["tag"] or ())))),
        since=given["since"],
        before_id=given["before_id"],
    )
    limit = given["limit"] or DEFAULT_FETCH
    request = Query(tenant, address, wanted, limit, budget, dead_for, given["headers_only"] or False)
    return request, given["encoding"] == "utf8"


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


# Messages.


def _short(value: str, name: str, max_length: int) -> str:
    if len(value) > max_length:
        raise BadRequestError(name, f"expected at most {max_length} characters, got {len(value)}")
    return value


def _whole(value: str, name: str, expected: str) -> int:
    value = value.strip()
    number = whole_number(value)
    if number is None or not 0 <= number <= MAX_NUMBER:
        raise BadRequestError(name, f'expected {expected}, got "{printable(value)}"')
    return number


def _seconds(value: str, name: str) -> int:
    return min(_whole(value, name, "whole seconds"), MAX_SECONDS) * 1000


def _time(value: str, name: str) -> int:
    return milliseconds(_whole(value, name, "Unix seconds"), name)


def _archive(word: str, name: str) -> bool:
    if word.lower() != "archive":
        raise BadRequestError(name, f'expected archive, got "{printable(word)}"')
    return True


SEND_HEADERS: Final[Mapping[str, tuple[str, Callable[[str, str], Any]]]] = {
    "mq9-priority": ("lane", parse_lane),
    "mq9-key": ("key", partial(_short, max_length=MAX_KEY)),
    "mq9-tags": ("tags", partial(parse_words, max_count=MAX_TAGS, max_length=MAX_TAG)),
    "mq9-ttl": ("ttl", _seconds),
    "mq9-expire-at": ("expire_at", _time),
    "mq9-delay": ("delay", _seconds),
    "mq9-send-at": ("send_at", _time),
    "mq9-dedup-id": ("dedup_id", partial(_short, max_length=MAX_DEDUP_ID)),
    "nats-msg-id": ("dedup_id", partial(_short, max_length=MAX_DEDUP_ID)),
    REPLY_TO: ("reply_to", parse_address),
    "mq9-storage": ("archive", _archive),
}
"""The headers of SEND that mean something to the service: for which field of a draft, and what reads them.

All others are the sender's own.
"""


def read_draft(payload: bytes, headers: Mapping[str, str] | None) -> Draft:
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
        elif known in COPY_HEADERS:
            raise BadRequestError(known, "expected none: the service alone writes it, on copies that a rule makes")
        elif known != "nats-request-info":
            own[name] = value
    if own:
        _check_own(own)
    given: dict[str, Any] = {}
    for name, value in ours.items():
        if has_controls(value):
            raise BadRequestError(name, "expected UTF-8 without control characters")
        if name != "nats-msg-id" or "mq9-dedup-id" not in ours:
            field, read = SEND_HEADERS[name]
            given[field] = read(value, name)
    return Draft(payload, headers=own, **given)


def _check_own(own: Mapping[str, str]) -> None:
    if len(own) > MAX_HEADERS:
        raise BadRequestError("headers", f"expected at most {MAX_HEADERS} of the sender's own, got {len(own)}")
    size = sum(len(text.encode(errors="replace")) for header in own.items() for text in header)
    if size > MAX_HEADER_BYTES:
        raise BadRequestError("headers", f"expected at most {MAX_HEADER_BYTES} bytes of the sender's own, got {size}")
    for name, value in own.items():
        if has_controls(name) or has_controls(value):
            raise BadRequestError(printable(name), "expected UTF-8 without control characters")


def read_batch(body: bytes, budget: int) -> list[Draft | BadRequestError]:
    """Read MSG.BATCH: each message as SEND would, or why it is refused; ``budget`` is that of the reply, in bytes (S8).

    Raises :class:`BadRequestError`, which names the message by its number, when the body is malformed.
    """
    found: list[Draft | BadRequestError] = []
    try:
        for headers, payload in decode_bodies(body, min(MAX_BATCH, budget // BATCH_REPLY_BYTES)):
            try:
                found.append(read_draft(payload, decode_headers(headers.removeprefix(VERSION))))
            except BadRequestError as error:
                found.append(error)
    except ProtocolViolationError as error:
        raise BadRequestError(f"message {len(found)}", str(error)) from error
    return found


# Replies.


def message_limit(max_payload: int) -> int:
    """Return the bytes of the largest message that a server with this ``max_payload`` can return in base64 (N7)."""
    return max(0, (max_payload - 64 * 1024) * 3 // 4)


def payload_limit(max_message: int) -> int:
    """Return the ``max_payload`` that lets a server carry messages of this size both ways (N7)."""
    return -(-max_message * 4 // 3) + 64 * 1024 + 4


def encode_success(**fields: Any) -> bytes:
    """Write the reply to a request that succeeded."""
    return orjson.dumps({"error": "", **fields})


def encode_failure(error: MediatorError, empty: Mapping[str, Any]) -> bytes:
    """Write the reply to a request that changed nothing: the text, its code, and the verb's other fields (N1)."""
    return orjson.dumps({"error": str(error), "error_code": error.code, **empty})


def encode_created(result: Created) -> bytes:
    """Write the reply to CREATE (M3)."""
    address = result.mailbox.address
    return encode_success(
        mail_address=address,
        mail_id=address,
        send_address=result.send_only,
        inbox=f"$mq9.AI.INBOX.{address}",
        created=result.token is not None,
        token=result.token or "",
    )


def encode_batch(outcomes: Sequence[int | MediatorError]) -> bytes:
    """Write the reply to BATCH: the msg_id of each message, and by its number why one was refused (S8)."""
    refused = {position: outcome for position, outcome in enumerate(outcomes) if isinstance(outcome, MediatorError)}
    codes = {str(position): error.code for position, error in refused.items()}
    return encode_success(
        msg_ids=[HIDDEN_ID if position in refused else outcome for position, outcome in enumerate(outcomes)],
        errors={str(position): str(error)[:MAX_WORDS] for position, error in refused.items()},
        **({"error_codes": codes} if codes else {}),
    )


def encode_messages(
    found: Sequence[StoredMessage], *, text: bool = False, headers_only: bool = False, **more: str
) -> bytes:
    """Write the reply to FETCH and QUERY, with ``more`` fields; ``text``: payloads as they are where that fits (N6)."""
    messages = [message_fields(message, text=text, headers_only=headers_only) for message in found]
    return orjson.dumps({"error": "", "messages": messages, **more})


def message_fields(
    message: StoredMessage, *, text: bool = False, headers_only: bool = False, words: Sequence[str] = SHOWN
) -> dict[str, Any]:
    """Show one message (N9); ``words`` are those for its lane."""
    item: dict[str, Any] = {
        "msg_id": message.msg_id,
        "payload": "",
        "priority": words[message.lane_number],
        "create_time": message.created_at // 1000,
    }
    if headers_only:
        item["size"] = message.payload_size
    else:
        encoded = _as_text(message.payload) if text else None
        if encoded is None:
            item["payload"] = b2a_base64(message.payload, newline=False).decode("ascii")
            if text:
                item["encoding"] = "base64"
        else:
            item["payload"] = encoded
    if message.key is not None:
        item["key"] = message.key
    if message.tag_list:
        item["tags"] = message.tags
    if message.expire_at is not None:
        item["expire_at"] = message.expire_at // 1000
    if message.extra is not None:
        headers, reply_to, dedup_id, sent_time = (
            message.headers,
            message.reply_to,
            message.dedup_id,
            message.sent_at // 1000,
        )
        if reply_to is not None:
            # SDKs look for it among the headers.
            headers = {**headers, REPLY_TO: reply_to}
            item["reply_to"] = reply_to
        if headers:
            item["headers"] = headers
        if dedup_id is not None:
            item["dedup_id"] = dedup_id
        if sent_time != item["create_time"]:
            item["sent_time"] = sent_time
    if message.deliveries:
        item["deliveries"] = message.deliveries
    return item


def _as_text(payload: bytes) -> str | None:
    """Return the payload as text if it is UTF-8 and no longer in JSON than in base64 (N6, N7)."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return None
    return text if len(orjson.dumps(text)) <= 4 * len(payload) // 3 + 8 else None
