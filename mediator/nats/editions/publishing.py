"""What a publish of an older edition says: address and lane by its subject, headers without prefix, persist (E1–E5)."""

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from mediator.errors import BadRequestError, MediatorError
from mediator.fields import MAX_BODY, printable
from mediator.mailboxes.address import writable_address
from mediator.mailboxes.lanes import Lane, parse_lane
from mediator.mailboxes.message import Draft
from mediator.nats import requests
from mediator.nats.stored import Edition, split_word

ADDRESS = "mail_id"
"""What the older editions call a mail address."""
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
class Published:
    """A publish that was read."""

    address: str
    draft: Draft
    lasting: bool
    """Whether it outlives a restart (E5)."""
    written: Mapping[str, str]
    """What the sender called the headers it wrote without their prefix."""

    def named(self, error: MediatorError) -> MediatorError:
        """Return an error about a header under the name the sender gave it."""
        return _renamed(error, self.written)


def read(edition: Edition, rest: str, payload: bytes, headers: Mapping[str, str] | None) -> Published:
    """Read a publish; ``rest`` is its subject behind the family's name.

    Raises :class:`BadRequestError`, with headers called what the sender called them.
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
    return Published(address, draft, draft.lane is not Lane.LOW if persist is None else persist, written)


def _renamed(error: MediatorError, written: Mapping[str, str]) -> MediatorError:
    if not isinstance(error, BadRequestError) or error.field not in written:
        return error
    return BadRequestError(written[error.field], str(error).removeprefix(f"{error.field}: "))


def _prefixed(headers: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Give every header its prefix; a prefixed one that is there wins (E3). Returns also what each was called."""
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
    """Read true or false, None for nothing; raises :class:`BadRequestError` naming the header."""
    if not word:
        return None
    if word.lower() not in ("true", "false"):
        raise BadRequestError(name, f'expected true or false, got "{printable(word)}"')
    return word.lower() == "true"


def persist_in(payload: bytes) -> bool | None:
    """Read ``persist`` of a JSON body; the body is the sender's own, so anything but true and false says nothing."""
    if _PERSIST_MARK not in payload or len(payload) > MAX_BODY:
        return None
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    persist = body.get("persist") if isinstance(body, dict) else None
    return persist if isinstance(persist, bool) else None
