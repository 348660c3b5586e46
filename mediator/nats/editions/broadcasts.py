"""A broadcast as it is published: what it is called, and whether it is kept (E9)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mediator.errors import BadRequestError
from mediator.fields import printable
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Draft, Message
from mediator.nats import requests
from mediator.nats.editions.publishing import PERSIST, flag, persist_in
from mediator.nats.push.frames import Frames
from mediator.nats.stored import MAX_PATTERN

PUBLISHED: Final = "BROADCAST."
"""What the subjects begin with that broadcasts are published to, behind the prefix."""
_FOREIGN: Final = ("mq9-key", "mq9-delay", "mq9-send-at", "mq9-storage")
"""Headers that say what a broadcast cannot do; it is better refused than done otherwise."""


@dataclass(frozen=True, slots=True)
class Published:
    """A broadcast that was read."""

    name: str
    """The rest of its subject."""
    draft: Draft
    kept: bool

    def body(self) -> bytes:
        """Return what tells all instances of it, unkept: the frame that pushes it, behind its subject."""
        draft = self.draft
        # Clients see it as a message without an id; nobody sees its times.
        message = Message(
            HIDDEN_ID, Lane.NORMAL, draft.payload, draft.size, 0, 0, None, None, draft.tags, draft.headers,
            reply_to=draft.reply_to,
        )  # fmt: skip
        return Frames(message).end(python=False)


def read(name: str, payload: bytes, headers: Mapping[str, str] | None) -> Published:
    """Read what came on ``name``, the subject behind :data:`PUBLISHED`. Raises :class:`BadRequestError`."""
    _check_name(name)
    given = {header: value for header, value in (headers or {}).items() if header.lower() not in ("persist", PERSIST)}
    lowered = {header.lower(): (header, value) for header, value in (headers or {}).items()}
    for foreign in _FOREIGN:
        if lowered.get(foreign, ("", ""))[1]:
            raise BadRequestError(foreign, "has no meaning for a broadcast")
    draft = requests.draft(payload, given)
    # Broadcasts come in their order; there are no lanes.
    draft.lane = Lane.NORMAL
    header, value = lowered.get(PERSIST, ("", ""))
    if not value:
        header, value = lowered.get("persist", ("", ""))
    kept = flag(value, header)
    return Published(name, draft, bool(persist_in(payload)) if kept is None else kept)


def _check_name(name: str) -> None:
    tokens = name.split(".")
    if len(name) > MAX_PATTERN:
        raise BadRequestError("subject", f"expected at most {MAX_PATTERN} characters behind {PUBLISHED}")
    if len(tokens) < 2 or not all(tokens):
        raise BadRequestError("subject", f"expected {PUBLISHED}domain.event, got {PUBLISHED}{printable(name)}")
    if set(name) & {"*", ">", "#", "�"} or not name.isprintable() or " " in name:
        raise BadRequestError("subject", f"expected no wildcards and only printable characters behind {PUBLISHED}")
