"""Writes replies: every one a JSON object with ``error``, complete also when it failed (N1, N6, N9)."""

from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from mediator.errors import MediatorError
from mediator.mailboxes.creating import Created
from mediator.mailboxes.lanes import SHOWN
from mediator.mailboxes.message import HIDDEN_ID, Message

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


def message_limit(max_payload: int) -> int:
    """Return the bytes of the largest message that a server with this ``max_payload`` can return in base64 (N7)."""
    return max(0, (max_payload - 64 * 1024) * 3 // 4)


def payload_limit(max_message: int) -> int:
    """Return the ``max_payload`` that lets a server carry messages of this size both ways (N7)."""
    return -(-max_message * 4 // 3) + 64 * 1024 + 4


def success(**fields: Any) -> bytes:
    """Write the reply to a request that succeeded."""
    return orjson.dumps({"error": "", **fields})


def failure(error: MediatorError, empty: Mapping[str, Any]) -> bytes:
    """Write the reply to a request that changed nothing: the text, its code, and the verb's other fields (N1)."""
    return orjson.dumps({"error": str(error), "error_code": error.code, **empty})


def created(result: Created) -> bytes:
    """Write the reply to CREATE (M3)."""
    address = result.mailbox.address
    return success(
        mail_address=address,
        mail_id=address,
        send_address=result.send_only,
        inbox=f"$mq9.AI.INBOX.{address}",
        created=result.token is not None,
        token=result.token or "",
    )


def batch(outcomes: Sequence[int | MediatorError]) -> bytes:
    """Write the reply to BATCH: the msg_id of each message, and by its number why one was refused (S8)."""
    refused = {no: outcome for no, outcome in enumerate(outcomes) if isinstance(outcome, MediatorError)}
    codes = {str(no): error.code for no, error in refused.items()}
    return success(
        msg_ids=[HIDDEN_ID if no in refused else outcome for no, outcome in enumerate(outcomes)],
        errors={str(no): str(error)[:MAX_WORDS] for no, error in refused.items()},
        **({"error_codes": codes} if codes else {}),
    )


def messages(found: Sequence[Message], *, text: bool = False, headers_only: bool = False, **more: str) -> bytes:
    """Write the reply to FETCH and QUERY, with ``more`` fields; ``text``: payloads as they are where that fits (N6)."""
    return success(messages=[item(message, text=text, headers_only=headers_only) for message in found], **more)


def item(
    message: Message, *, text: bool = False, headers_only: bool = False, words: Sequence[str] = SHOWN
) -> dict[str, Any]:
    """Show one message (N9); ``words`` are those for its lane."""
    item: dict[str, Any] = {
        "msg_id": message.msg_id,
        "payload": "",
        "priority": words[message.lane],
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
    if message.tags:
        item["tags"] = message.tags
    if message.reply_to is not None:
        # SDKs look for it among the headers.
        item["headers"] = {**message.headers, REPLY_TO: message.reply_to}
    elif message.headers:
        item["headers"] = message.headers
    if message.expire_at is not None:
        item["expire_at"] = message.expire_at // 1000
    if message.dedup_id is not None:
        item["dedup_id"] = message.dedup_id
    if message.reply_to is not None:
        item["reply_to"] = message.reply_to
    if message.sent_at // 1000 != message.created_at // 1000:
        item["sent_time"] = message.sent_at // 1000
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
