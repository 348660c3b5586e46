"""What a copy has beside its payload and its sender's headers, as headers."""

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.rows import StoredMessage


def describe(message: StoredMessage) -> dict[str, str]:
    """Return lane, tags and the address for replies, each where it is set."""
    told = {
        "mq9-priority": "" if message.lane is Lane.NORMAL else message.lane.name.lower(),
        "mq9-tags": ",".join(message.tags),
        "mq9-reply-to": message.reply_to or "",
    }
    return {name: value for name, value in told.items() if value}
