"""Posts copies to a URL, signed by Standard Webhooks; a 2xx confirms (C8).

The request goes through the guard against server-side request forgery, follows no redirect, and nothing of the answer
but its status is read: whoever may add a rule learns nothing of the operator's own network by it.
"""

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import quote

from mediator.errors import AddressRefusedError, UnreachableError
from mediator.forwarding.copy_headers import describe
from mediator.http.guard import Guard
from mediator.mailboxes.copy_rule import COPY_HEADERS, CopyRule, signing_key
from mediator.mailboxes.forwarding import Attempt, Batch, OutgoingCopy

POST_SECONDS: Final = 10.0
"""Time for one attempt, DNS included."""
BATCH_SECONDS: Final = 10.0
"""After which no further copy of a batch is posted: with the last one it stays below the lease."""
MAX_ATTEMPTS: Final = 16
"""With the delays between them about 38 minutes; then the copy is a dead letter."""
MAX_FIELD: Final = 7_500
MAX_HEADERS: Final = 14_000
"""Bytes of one header and of all: a little below what the servers of Apache, Node.js and aiohttp take."""
_TOKEN: Final = "!#$&'*+^`|"
"""What may stand in the name of a header beside letters, digits and ``_.-~``."""
_VALUE: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""Printable ASCII but the percent sign."""


class Webhook:
    """Posts the copies of each rule one after the other."""

    max_batch = 20
    max_delay = 300_000

    def __init__(self, guard: Guard, clock: Callable[[], int]) -> None:
        """``clock`` gives milliseconds since the epoch."""
        self._guard = guard
        self._clock = clock

    async def send(self, rule: CopyRule, batch: Batch) -> Attempt:
        """Post one copy after the other, until one fails or the time of a batch is over."""
        ids = [copy.message.msg_id for copy in batch.copies]
        confirmed, refused = list[int](), list[int]()
        until = time.monotonic() + BATCH_SECONDS
        for number, copy in enumerate(batch.copies):
            headers = _headers(copy)
            if not _are_taken(headers):
                # Else any sender could stop what comes behind for as long as it is tried again.
                refused.append(ids[number])
            elif number and time.monotonic() > until:
                return Attempt(confirmed, refused, ids[number:])
            elif problem := await self._post(rule, copy, headers):
                if copy.message.deliveries >= MAX_ATTEMPTS:
                    refused.append(ids[number])
                return Attempt(confirmed, refused, ids[number + 1 :], problem)
            else:
                confirmed.append(ids[number])
        return Attempt(confirmed, refused)

    async def _post(self, rule: CopyRule, copy: OutgoingCopy, headers: dict[str, str]) -> str:
        """Make one attempt; return what went wrong, an empty text for a confirmation."""
        headers |= _sign(rule.secret, copy, self._clock() // 1000)
        try:
            status = await self._guard.post_once(rule.to_url, copy.message.payload, headers, POST_SECONDS)
        except (AddressRefusedError, UnreachableError) as error:
            return str(error)
        return "" if 200 <= status < 300 else f"the URL answers with status {status}"


def _are_taken(headers: Mapping[str, str]) -> bool:
    """Return whether usual servers take these headers."""
    sizes = [len(name) + len(value) for name, value in headers.items()]
    return max(sizes) <= MAX_FIELD and sum(sizes) <= MAX_HEADERS


def _sign(secret: str, copy: OutgoingCopy, now: int) -> dict[str, str]:
    """Return the three headers of Standard Webhooks, version v1."""
    signed = f"{copy.id}.{now}.".encode() + copy.message.payload
    signature = base64.b64encode(hmac.digest(signing_key(secret), signed, hashlib.sha256)).decode()
    return {"webhook-id": copy.id, "webhook-timestamp": str(now), "webhook-signature": f"v1,{signature}"}


def _headers(copy: OutgoingCopy) -> dict[str, str]:
    """Return what tells of the message; a sender's header cannot pass for one of the service."""
    message = copy.message
    told = describe(message)
    for name, value in message.headers.items():
        told[name if name in COPY_HEADERS else f"mq9-header-{quote(name, _TOKEN)}"] = value
    told["Content-Type"] = "application/octet-stream"
    return {name: quote(value, _VALUE) for name, value in told.items()}
