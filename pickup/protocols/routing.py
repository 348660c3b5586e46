"""Routing 1.0 (RFC 0094) and 2.0: forwards, queued for each recipient; answered only when malformed (D4, D9)."""

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from mediator.errors import BadRequestError, EnvelopeError, UnresolvedDidError, UnsupportedMessageError
from mediator.mailboxes.envelope import recipients_in
from mediator.mediation.forwarding import Forward, Outcome
from mediator.mediation.names import MAX_NAME, canonical
from mediator.mediation.records import Generation
from pickup.dispatch import Call
from pickup.envelope.reading import read_object
from pickup.message import MAX_ATTACHMENTS, Message, Reply, attachments

if TYPE_CHECKING:
    from pickup.dispatch import Dispatcher
    from pickup.office import Office

FAMILY = "routing"
FORWARD = "forward"
MAX_RECIPIENTS = 64
"""Recipients of one forward."""
MAX_COPIES = 64
"""Messages that one forward makes: each of what it carries, for each of its recipients."""
MAX_COPIED = 32 * 1024 * 1024
"""Bytes of them, unless there is one recipient only: what is sent once is written many times."""
MAX_SECONDS = 10**11
"""Unix seconds above this are milliseconds by mistake."""
_MAJOR = {Generation.V1: 1, Generation.V2: 2}


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher."""
    names = {FORWARD: handle}
    dispatcher.register(FAMILY, {(1, 0)}, names, generations={Generation.V1}, anonymous=True)
    dispatcher.register(FAMILY, {(2, 0)}, names, generations={Generation.V2}, anonymous=True)


async def handle(call: Call) -> Sequence[Reply]:
    """Forward, and answer nothing: ``please_ack`` must not be honoured on a forward, nor a return route."""
    if not _is_ours(call.office, call.me):
        raise EnvelopeError("expected a forward to be sealed for the routing key")
    await forward(call.office, call.tenant, call.message)
    return ()


async def forward(office: "Office", tenant: str, message: Message) -> Outcome:
    """Queue what is forwarded for all its recipients, whoever they are, and count what became of it.

    Nothing forwarded is opened, and what is sealed for ourselves is refused: by way of a holder's endpoint it would
    come round, and become more each time. Returns after the commit. Raises :class:`BadRequestError` for what is wrong
    with the forward itself, never for who it is for.
    """
    if message.type.major != _MAJOR[message.generation]:
        raise UnsupportedMessageError(str(message.type))
    named, payloads = _read(office, message)
    _check_copies(len(named), payloads)
    recipients = [key for text in named if (key := canonical(text)) is not None]
    request = Forward(
        tenant=tenant,
        keys=recipients,
        payloads=payloads,
        expire_at=_expiry(message),
        delay=_delay(message, office.rules.keep),
    )
    outcome = await office.broker.forward(request, office.rules)
    # A name that is none leads nowhere, as a key that nobody has; telling them apart is of no use to its sender.
    nameless = (len(named) - len(recipients)) * len(payloads)
    office.meters.forwarded(outcome.queued, outcome.unroutable + nameless, outcome.full)
    return outcome


def _read(office: "Office", message: Message) -> tuple[list[str], list[bytes]]:
    """Return the recipients as written, and the envelopes."""
    if message.generation is Generation.V1:
        return _recipients(message.body.get("to"), "to"), [_envelope(office, message.body.get("msg"), "msg")]
    named = _recipients(message.body.get("next"), "next")
    attached = [_envelope(office, attachment.data, "attachments") for attachment in attachments(message)]
    if not attached:
        raise BadRequestError("attachments", f"expected 1 to {MAX_ATTACHMENTS} envelopes")
    return named, attached


def _check_copies(recipients: int, payloads: Sequence[bytes]) -> None:
    """Bound what one forward makes, before anyone is looked up (D9)."""
    if recipients * len(payloads) > MAX_COPIES:
        raise BadRequestError("attachments", f"expected at most {MAX_COPIES} times a recipient")
    if recipients > 1 and recipients * sum(map(len, payloads)) > MAX_COPIED:
        raise BadRequestError("attachments", f"expected at most {MAX_COPIED} bytes for all recipients")


def _recipients(value: object, where: str) -> list[str]:
    named = [value] if isinstance(value, str) else value
    if (
        not isinstance(named, list)
        or not 1 <= len(named) <= MAX_RECIPIENTS
        or not all(isinstance(text, str) and 1 <= len(text) <= MAX_NAME for text in named)
    ):
        raise BadRequestError(where, f"expected a key or a DID, or a list of 1 to {MAX_RECIPIENTS}")
    return named


def _envelope(office: "Office", value: Any, where: str) -> bytes:
    """Return the bytes that are queued: those that came, or of a JSON object its one compact form."""
    payload = value.encode("utf-8", "replace") if isinstance(value, str) else value
    recipients = None
    # Pickup 1.0 and the relay write it again inside other JSON, so it is held to the bounds of any JSON here; what
    # orjson raises for text that is no Unicode and numbers beyond 64 bits is a TypeError.
    with suppress(EnvelopeError, TypeError):
        if isinstance(payload, dict):
            recipients, payload = recipients_in(payload), orjson.dumps(payload)
        elif isinstance(payload, bytes):
            recipients = recipients_in(read_object(payload))
    if recipients is None or not isinstance(payload, bytes):
        raise BadRequestError(where, "expected a DIDComm encrypted envelope")
    if any(_is_ours(office, kid) for kid in recipients):
        raise BadRequestError(where, "expected an envelope for somebody else than this mediator")
    return payload


def _is_ours(office: "Office", kid: str) -> bool:
    try:
        office.identities.known_as(kid)
    except UnresolvedDidError:
        return False
    return True


def _expiry(message: Message) -> int | None:
    """Return when the forward expires, in milliseconds: header and body may say so, the earlier one holds."""
    if message.generation is Generation.V1:
        return None
    said = [value for value in (message.expires_time, message.body.get("expires_time")) if value is not None]
    if not all(type(value) is int and abs(value) <= MAX_SECONDS for value in said):
        raise BadRequestError("expires_time", "expected Unix seconds")
    return min(said) * 1000 if said else None


def _delay(message: Message, longest: int) -> int | None:
    """Return the delay in milliseconds; a negative one asks for a random one up to it."""
    value = None if message.generation is Generation.V1 else message.body.get("delay_milli")
    if value is None:
        return None
    if type(value) is not int or abs(value) > longest:
        raise BadRequestError("delay_milli", f"expected a whole number of at most {longest} milliseconds")
    return value if value >= 0 else random.randint(0, -value)
