"""Routing 1.0 (RFC 0094) and 2.0: queues forwards for each recipient, and never replies to them (D4, D9)."""

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from mediator.errors import BadRequestError, EnvelopeError, UnsupportedMessageError
from mediator.fields import whole_number
from pickup.dispatcher import DidcommContext, Dispatcher, InboundRequest
from pickup.envelope.reading import read_object
from pickup.message import MAX_ATTACHMENTS, DidcommMessage, ReplyMessage, attachments, parse_time
from pickup.rules.forwarding import Forward, ForwardOutcome, recipients_in
from pickup.rules.names import MAX_NAME, canonical
from pickup.rules.records import Generation
from pickup.rules.replays import CLOCK_SKEW

FAMILY = "routing"
FORWARD = "forward"
MAX_RECIPIENTS = 64
"""Recipients of one forward."""
MAX_COPIES = 64
"""Messages queued by one forward: its attachments times its recipients."""
MAX_COPIED = 32 * 1024 * 1024
"""Bytes of those messages, when there are several recipients: one request is written many times."""
MAX_INSIDE = 16
"""Recipients of an envelope that are looked up where the forward names one that is unknown."""
MAX_SECONDS = 10**11
"""Unix seconds above this are milliseconds by mistake (N5)."""
_MAJOR = {Generation.V1: 1, Generation.V2: 2}


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers."""
    names = {FORWARD: handle}
    dispatcher.register(FAMILY, {(1, 0)}, names, generations={Generation.V1}, anonymous=True)
    dispatcher.register(FAMILY, {(2, 0)}, names, generations={Generation.V2}, anonymous=True)


async def handle(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Queue a forward; no reply, even with ``please_ack`` or a return route, since both would identify its sender."""
    # Of v2, no other keys of ours open an envelope; of v1, those of invitations do.
    envelope = request.envelope
    if envelope.generation is Generation.V1 and request.context.identities.find(envelope.recipient) is None:
        raise EnvelopeError("expected a forward to be sealed for the routing key")
    await forward(request.context, request.tenant, request.message)
    return ()


async def forward(context: DidcommContext, tenant: str, message: DidcommMessage) -> ForwardOutcome:
    """Queue the payloads of a forward for its recipients, known or not, and count the outcome.

    Payloads are not opened. One that is sealed for this mediator is refused: relayed to a holder's endpoint it could
    come back and multiply. Returns after the commit. Raises :class:`BadRequestError` when the forward itself is
    malformed, never because of its recipients.
    """
    if message.type.major != _MAJOR[message.generation]:
        raise UnsupportedMessageError(str(message.type))
    named, envelopes = _read(context, message)
    payloads = [payload for payload, _ in envelopes]
    if len(named) > 1:
        _check_copies(len(named), payloads)
    # What is neither key nor DID is a recipient that nobody knows.
    recipients = [key for text in named if (key := canonical(text)) is not None] or [""]
    request = Forward(
        tenant=tenant,
        keys=recipients,
        payloads=payloads,
        # Senders may name a recipient otherwise than it registered itself, but they sealed for a key of its.
        inside=[inside for _, inside in envelopes],
        expire_at=parse_expiry(message, context.mediation.clock()),
        delay=parse_delay(message, context.mediation.rules.keep),
        headers=context.mediation.broker.trace.headers(),
    )
    outcome = await context.mediation.forward(request)
    malformed = (len(named) - len(recipients)) * len(payloads)
    context.metrics.forwarded(outcome.queued, outcome.unroutable + malformed, outcome.full)
    if outcome.full:
        context.metrics.dropped.record(outcome.full, outcome.full_keys)
    return outcome


def _read(context: DidcommContext, message: DidcommMessage) -> tuple[list[str], list[tuple[bytes, list[str]]]]:
    """Return the recipients as written, and the payloads, each with the canonical recipients of its envelope."""
    if message.generation is Generation.V1:
        return parse_recipients(message.body.get("to"), "to"), [_envelope(context, message.body.get("msg"), "msg")]
    named = parse_recipients(message.body.get("next"), "next")
    attached = [_envelope(context, attachment.data, "attachments") for attachment in attachments(message)]
    if not attached:
        raise BadRequestError("attachments", f"expected 1 to {MAX_ATTACHMENTS} envelopes")
    return named, attached


def _check_copies(recipients: int, payloads: Sequence[bytes]) -> None:
    """Bound what one forward for several recipients makes, before any of them is looked up (D9)."""
    if recipients * len(payloads) > MAX_COPIES:
        raise BadRequestError("attachments", f"expected at most {MAX_COPIES} times a recipient")
    if recipients * sum(map(len, payloads)) > MAX_COPIED:
        raise BadRequestError("attachments", f"expected at most {MAX_COPIED} bytes for all recipients")


def parse_recipients(value: object, where: str) -> list[str]:
    """Return the recipients of a forward, one or a list; ``where`` names the field in errors."""
    named = [value] if isinstance(value, str) else value
    if (
        not isinstance(named, list)
        or not 1 <= len(named) <= MAX_RECIPIENTS
        or not all(isinstance(text, str) and 1 <= len(text) <= MAX_NAME for text in named)
    ):
        raise BadRequestError(where, f"expected a key or a DID, or a list of 1 to {MAX_RECIPIENTS}")
    return named


def _envelope(context: DidcommContext, value: Any, where: str) -> tuple[bytes, list[str]]:
    """Return the bytes to queue, and the canonical names of the first of those for whom they are sealed.

    A JSON object is written compactly, other payloads stay as they are.
    """
    payload = value.encode("utf-8", "replace") if isinstance(value, str) else value
    recipients = None
    # Pickup 1.0 writes it inside other JSON, so the bounds of any JSON hold for it. orjson raises TypeError for
    # surrogates and for numbers beyond 64 bits.
    with suppress(EnvelopeError, TypeError):
        if isinstance(payload, dict):
            recipients, payload = recipients_in(payload), orjson.dumps(payload)
        elif isinstance(payload, bytes):
            recipients = recipients_in(read_object(payload))
    if recipients is None or not isinstance(payload, bytes):
        raise BadRequestError(where, "expected a DIDComm encrypted envelope")
    if any(context.identities.find(kid) is not None for kid in recipients):
        raise BadRequestError(where, "the envelope is sealed for this mediator itself")
    return payload, [name for kid in recipients[:MAX_INSIDE] if (name := canonical(kid)) is not None]


def parse_expiry(message: DidcommMessage, now: int) -> int | None:
    """Return the expiry in milliseconds: the earlier one of header and body.

    One that is just past stands for a sender whose clock is late, so the message has as long again.
    """
    if message.generation is Generation.V1:
        return None
    times = [message.expires_time, parse_time(message.body, "expires_time")]
    given = [seconds for seconds in times if seconds is not None]
    if any(abs(seconds) > MAX_SECONDS for seconds in given):
        raise BadRequestError("expires_time", "expected Unix seconds")
    if not given:
        return None
    expires = min(given) * 1000
    return expires + CLOCK_SKEW if expires <= now < expires + CLOCK_SKEW else expires


def parse_delay(message: DidcommMessage, longest: int) -> int | None:
    """Return ``delay_milli``; a negative one stands for a random delay up to its absolute value."""
    value = None if message.generation is Generation.V1 else message.body.get("delay_milli")
    if value is None:
        return None
    delay = whole_number(value)
    if delay is None or abs(delay) > longest:
        raise BadRequestError("delay_milli", f"expected a whole number of at most {longest} milliseconds")
    return delay if delay >= 0 else random.randint(0, -delay)
