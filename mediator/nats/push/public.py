"""Subscriptions to the public mailboxes of a tenant: one push for each that is there, and then every change (E10)."""

from mediator.mailboxes.address import PUBLIC
from mediator.mailboxes.board import ENDED
from mediator.mailboxes.lanes import Lane
from mediator.nats.push.mailboxes import Mail, queue_name
from mediator.nats.push.subscription import Asked, Served, Target
from mediator.nats.stored import PublicList

LANES = (Lane.NORMAL, ENDED)


class PublicSource(Mail):
    """Serves them out of the tenant's board."""

    async def open(self, asked: Asked) -> Served:
        """Make a subscription ready; raises :class:`TooManyGroupsError` (A4)."""
        assert isinstance(asked.subject, PublicList)
        await self._broker.ready_board(asked.tenant)
        place = asked.tenant, PUBLIC
        subject = (asked.to + asked.subject.delivered_on).encode()
        target = Target(dict.fromkeys(LANES, subject), asked.python, self._tally)
        if asked.queue:
            return await self.share(place, queue_name(asked), target)
        follower = await self.follow(place, LANES, asked.after, target)
        if not asked.after:
            # Who knows of no mailbox need not hear of those that ended before.
            follower.cursor.marks[ENDED] = follower.cursor.until - 1
        return follower
