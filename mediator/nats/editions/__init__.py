"""The older editions of mq9 over the same mailboxes, one module each; subject and body say which one is spoken (E)."""

from collections.abc import Awaitable, Callable, Mapping

from mediator.broker import Broker
from mediator.fields import Fields
from mediator.mailboxes.lanes import Lane
from mediator.nats.client import Request
from mediator.nats.editions import publishing
from mediator.nats.editions.first import First
from mediator.nats.editions.publishing import Published
from mediator.nats.editions.questions import Questions
from mediator.nats.editions.second import Second
from mediator.nats.stored import Edition

Verb = Callable[[str, str, Fields], Awaitable[bytes]]
"""Takes the tenant, what follows the verb in the subject, and the body."""


_FAMILIES = {"INBOX.": Edition.FIRST, "MAILBOX.MSG.": Edition.LATER}
PUBLISHED = tuple(_FAMILIES)
"""What the subjects begin with that are published to, behind the prefix."""


class Editions:
    """Who does what of the older editions: by the subject behind the prefix, up to the address where it has one."""

    def __init__(self, broker: Broker, room: Callable[[], int], instance: str, inbox_ttls: Mapping[Lane, int]) -> None:
        """``room`` says how many bytes a reply may have, or raises :class:`BusyError`.

        Messages of the memory tier last until the next start of ``instance`` (E5). ``inbox_ttls`` are lives by lane,
        in milliseconds, of messages to INBOX that bring none; 0: none (E4).
        """
        self._instance = instance
        self._inbox_ttls = inbox_ttls
        questions = Questions(broker, room)
        self.verbs: Mapping[str, tuple[str, Verb]] = {
            **First(broker, room).verbs,
            **Second(broker, room).verbs,
            **questions.verbs,
        }
        self.python_verbs: Mapping[str, tuple[str, Verb]] = questions.python_verbs
        """In their place for ``robustmq-mq9-python`` (E11)."""

    def published(self, name: str, request: Request) -> Published:
        """Read what came on a subject that begins as :data:`PUBLISHED` say. Raises :class:`BadRequestError`."""
        family = next(family for family in PUBLISHED if name.startswith(family))
        edition = _FAMILIES[family]
        found = publishing.read(edition, name[len(family) :], request.data, request.headers)
        draft = found.draft
        if not found.lasting:
            draft.volatile = self._instance
        if edition is Edition.FIRST and draft.ttl is None and draft.expire_at is None:
            draft.ttl = self._inbox_ttls.get(draft.lane)
        return found
