"""Puts together what serves subscriptions."""

from mediator.broker import Broker
from mediator.metrics import Metrics
from mediator.nats.connection import Connection
from mediator.nats.push.broadcasts import BroadcastSource
from mediator.nats.push.fanout import Hub
from mediator.nats.push.mailboxes import Mail, MailboxSource
from mediator.nats.push.outlet import Outlet
from mediator.nats.push.public import PublicSource
from mediator.nats.push.pushes import Limits, Pushes
from mediator.nats.push.subscription import Tally
from mediator.nats.stored import Broadcast, PublicList, Stored, Subject


async def open_pushes(connection: Connection, broker: Broker, metrics: Metrics, limits: Limits, keep: int) -> Pushes:
    """Serve subscriptions; ``keep``: milliseconds for which the position of a queue outlives its last member (E7)."""
    outlet, tally = Outlet(connection), Tally(metrics.pushed)
    common = broker, outlet, tally, keep
    broadcasts = BroadcastSource(*common, Hub(connection, outlet, metrics.broadcast_lost))
    sources: dict[type[Subject], Mail] = {
        Stored: MailboxSource(*common),
        PublicList: PublicSource(*common),
        Broadcast: broadcasts,
    }
    for source in sources.values():
        source.start()
    pushes = Pushes(connection, outlet, sources, limits, tally)
    await pushes.open()
    metrics.push_subscriptions.set_function(lambda: pushes.count)
    metrics.push_waiting.set_function(lambda: tally.waiting)
    return pushes
