"""Which publishes the gateway refuses, those that would pass for its own or store requests, or mends (N2, N10)."""

import json
from typing import Final

from mediator.nats import control_messages, subjects

_API: Final = subjects.API.encode()
_STREAM_VERBS: Final = ("API.STREAM.CREATE.", "API.STREAM.UPDATE.", "API.STREAM.RESTORE.")
_NOT_FOR_CLIENTS: Final = (
    b"$mq9.AI.PUSH.",
    # nats-server answers some of these for the account of the client, with everything its clients subscribe to.
    b"$SYS.",
    *(each.encode() for each in (subjects.PUSH, control_messages.ROOT)),
)


def is_for_clients(subject: bytes) -> bool:
    """Return whether clients may publish to a subject, or name it for the reply."""
    return not subject.startswith(_NOT_FOR_CLIENTS)


def can_be_answered(subject: bytes, reply: bytes) -> bool:
    """Return whether a publish to this subject may name that one for the reply.

    With a wildcard in it, nats-server forgets other clients' requests to the service when the answer comes.
    """
    return not (subject.startswith(_API) and {b"*", b">"}.intersection(reply.split(b".")))


def without_empty_tokens(subject: bytes) -> bytes:
    """Return a request's subject as nats-server delivers it, though it has empty tokens (N2).

    The server would answer these with its own 503; what stands in their place is in no address and no verb.
    """
    if not subject.startswith(_API) or not (b".." in subject or subject.endswith(b".")):
        return subject
    return subject.partition(b"..")[0].removesuffix(b".") + b".#"


def makes_stream(subject: bytes) -> bool:
    """Return whether a request to this subject asks JetStream, in any domain, for a stream."""
    words = subject.decode("utf-8", "replace").split(".", 2)
    if words[0] != "$JS" or len(words) < 3:
        return False
    return any(rest.startswith(_STREAM_VERBS) for rest in (f"{words[1]}.{words[2]}", words[2]))


def is_stream_allowed(body: bytes) -> bool:
    """Return whether a stream's configuration is valid and has no subjects of requests, pushes or replies."""
    found = _stream_subjects(body)
    return found is not None and all(isinstance(each, str) and subjects.stream_allowed(each) for each in found)


def _stream_subjects(body: bytes) -> list[object] | None:
    """Return all subjects that nats-server may find in a stream's configuration; None if that is unknown.

    The server accepts names in any case, merges repeated ones, and reads bytes that are not UTF-8.
    """
    found: list[object] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        for name, value in pairs:
            if name.casefold() == "subjects":
                found.extend(value if isinstance(value, list) else [value])

    try:
        json.loads(body.decode("utf-8", "replace"), object_pairs_hook=note)
    except (ValueError, RecursionError):
        return None
    return [each for each in found if each is not None]
