"""The options of the older editions of the protocol."""

from collections.abc import Mapping

from pydantic import BaseModel, Field

from mediator.mailboxes.lanes import Lane
from mediator.settings_types import CLOSED, Whole

_MAX_TTL = 100 * 365 * 24 * 3600


class Editions(BaseModel):
    """The older editions: how long what is sent to INBOX lives, where its sender does not say."""

    model_config = CLOSED

    urgent_ttl: Whole = Field(
        default=0,
        ge=0,
        le=_MAX_TTL,
        description="Seconds an urgent message to INBOX lives; 0 is as long as its mailbox. Set it where clients rely "
        "on the first edition, which suggests 86400.",
    )
    normal_ttl: Whole = Field(
        default=0,
        ge=0,
        le=_MAX_TTL,
        description="The same for normal messages to INBOX; the first edition suggests 3600. A reader that is away for "
        "longer never sees them.",
    )
    notify_ttl: Whole = Field(
        default=0,
        ge=0,
        le=_MAX_TTL,
        description="The same for notifications to INBOX, which end with the next start in any case. Set it when they "
        "pile up.",
    )

    @property
    def inbox_ttls(self) -> Mapping[Lane, int]:
        """What the door needs of this, in milliseconds, by lane (E4)."""
        chosen = {Lane.URGENT: self.urgent_ttl, Lane.NORMAL: self.normal_ttl, Lane.LOW: self.notify_ttl}
        return {lane: seconds * 1000 for lane, seconds in chosen.items() if seconds}
