"""Puts together what serves subscriptions."""

from mediator.broker import Broker
from mediator.metrics import Metrics
from mediator.nats.connection import Connection
from mediator.nats.push.mailboxes import MailboxSource
from mediator.nats.push.outlet import Outlet
from mediator.nats.push.pushes import Limits, Pushes
from mediator.nats.push.subscription import Tally
from mediator.nats.stored import Stored


async def open_pushes(connection: Connection, broker: Broker, metrics: Metrics, limits: Limits, keep: int) -> Pushes:
    """Serve subscriptions; ``keep``: milliseconds for which the position of a queue outlives its last member (E7)."""
    outlet, tally = Outlet(connection), Tally(metrics.pushed)
    mailboxes = MailboxSource(broker, outlet, tally, keep)
    mailboxes.start()
    pushes = Pushes(connection, outlet, {Stored: mailboxes}, limits, tally)
    await pushes.open()
    metrics.push_subscriptions.set_function(lambda: pushes.count)
    metrics.push_waiting.set_function(lambda: tally.waiting)
    return pushes
