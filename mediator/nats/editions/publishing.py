"""Reads a publish of an older edition: address and lane in its subject, headers without prefix, persist (E1–E5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from mediator.errors import BadRequestError, MediatorError
from mediator.fields import MAX_BODY, printable
from mediator.mailboxes.address import writable_address
from mediator.mailboxes.lanes import Lane, parse_lane
from mediator.mailboxes.message import Draft
from mediator.nats import requests
from mediator.nats.client import Request
from mediator.nats.subjects import Edition, split_word

ADDRESS = "mail_id"
"""What the older editions call a mail address."""
SUBJECTS: Final = {"INBOX.": Edition.FIRST, "MAILBOX.MSG.": Edition.LATER}
"""What follows the prefix in the subjects that are published to."""
PERSIST = "mq9-persist"
_PLAIN = {
    "dedup_id": "mq9-dedup-id",
    "send_at": "mq9-send-at",
    "expire_at": "mq9-expire-at",
    "tags": "mq9-tags",
    "persist": PERSIST,
}
_PERSIST_MARK = b'"persist"'


@dataclass(frozen=True, slots=True)
class PublishedMessage:
    """A publish that was read."""

    address: str
    draft: Draft
    lasting: bool
    """Whether it outlives a restart (E5)."""
    written: Mapping[str, str]
    """The names that the sender used for headers without their prefix."""

    def map_error(self, error: MediatorError) -> MediatorError:
        """Return an error about a header under the name that the sender used for it."""
        return _renamed(error, self.written)


class PublishReader:
    """Reads publishes for one instance of the service."""

    def __init__(self, instance: str, inbox_ttls: Mapping[Lane, int]) -> None:
        """Messages of the memory tier last until the next start of ``instance`` (E5).

        ``inbox_ttls`` are times to live by lane, in milliseconds, of messages to INBOX without one (E4); 0: none.
        """
        self._instance = instance
        self._inbox_ttls = inbox_ttls

    def read(self, edition: Edition, tail: str, message: Request) -> PublishedMessage:
        """Read a publish; raises :class:`BadRequestError`, as :func:`read`."""
        published = read(edition, tail, message.data, message.headers)
        draft = published.draft
        if not published.lasting:
            draft.volatile = self._instance
        if edition is Edition.FIRST and draft.ttl is None and draft.expire_at is None:
            draft.ttl = self._inbox_ttls.get(draft.lane)
        return published


def read(edition: Edition, rest: str, payload: bytes, headers: Mapping[str, str] | None) -> PublishedMessage:
    """Read a publish; ``rest`` is its subject behind one of :data:`SUBJECTS`.

    Raises :class:`BadRequestError`, which names headers as the sender did.
    """
    address, word = split_word(edition, rest)
    address = writable_address(address, ADDRESS)
    prefixed, written = _prefixed(headers or {})
    persist = flag(prefixed.pop(PERSIST, ""), written.get(PERSIST, PERSIST))
    try:
        draft = requests.draft(payload, prefixed)
    except BadRequestError as error:
        raise _renamed(error, written) from error
    if word:
        draft.lane = Lane.LOW if word == "notify" else parse_lane(word, ADDRESS)
    if persist is None:
        persist = persist_in(payload)
    return PublishedMessage(address, draft, draft.lane is not Lane.LOW if persist is None else persist, written)


def _renamed(error: MediatorError, written: Mapping[str, str]) -> MediatorError:
    if not isinstance(error, BadRequestError) or error.field not in written:
        return error
    return BadRequestError(written[error.field], str(error).removeprefix(f"{error.field}: "))


def _prefixed(headers: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Give every header its prefix; one that has it wins (E3). Returns also the name that the sender used for each."""
    lowered = [(name.lower(), name, value) for name, value in headers.items()]
    given = {lower for lower, _, value in lowered if value}
    prefixed = {lower if lower == PERSIST else name: value for lower, name, value in lowered if lower not in _PLAIN}
    written: dict[str, str] = {}
    for lower, name, value in lowered:
        full = _PLAIN.get(lower)
        if full is not None and full not in given:
            prefixed[full] = _unlisted(value) if lower == "tags" else value
            written[full] = name
    return prefixed, written


def _unlisted(value: str) -> str:
    """Read ``[a, b]`` as ``a, b``."""
    value = value.strip()
    return value[1:-1] if value[:1] == "[" and value[-1:] == "]" else value


def flag(word: str, name: str) -> bool | None:
    """Read true or false, None for an empty word; raises :class:`BadRequestError` naming the header."""
    if not word:
        return None
    if word.lower() not in ("true", "false"):
        raise BadRequestError(name, f'expected true or false, got "{printable(word)}"')
    return word.lower() == "true"


def persist_in(payload: bytes) -> bool | None:
    """Read ``persist`` of a JSON body; the body is the sender's own, so anything but true and false means nothing."""
    if _PERSIST_MARK not in payload or len(payload) > MAX_BODY:
        return None
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    persist = body.get("persist") if isinstance(body, dict) else None
    return persist if isinstance(persist, bool) else None
