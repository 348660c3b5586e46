"""The reception: opens what comes in at any transport, finds out who sent it, and has it handled and answered."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from mediator.errors import EnvelopeError
from mediator.mediation import connecting
from mediator.mediation.names import canonical
from mediator.mediation.records import Connection
from pickup.dispatch import Call, Channel, ReplayedError
from pickup.message import read
from pickup.office import Office
from pickup.post import Post
from pickup.problems import is_report

MAX_REMEMBERED = 100_000
"""Envelopes of known senders that are recognised on this instance since its start, whatever they ask for.

Those that are taken once are remembered in the store beside, for all instances (D13).
"""


class Reception:
    """Takes envelopes from the transports."""

    def __init__(self, office: Office, post: Post, came: Callable[[Connection], None]) -> None:
        """``came`` is told of each connection that calls and has an endpoint: mail may be brought there again (D10)."""
        self._office = office
        self._post = post
        self._came = came
        self._handled: OrderedDict[bytes, None] = OrderedDict()

    async def receive(self, data: bytes, channel: Channel) -> None:
        """Handle one envelope; what is answered goes out on ``channel`` or to the sender's endpoint (D5).

        Raises what cannot be told to a known sender: :class:`EnvelopeError`, :class:`UnresolvedDidError`, and for
        anonymous senders any error of the tree (D12). Returning means that all it asked for is committed.
        """
        office = self._office
        opened = await office.envelopes.open(data)
        tenant = await office.identities.tenant_of(opened.recipient)
        message = read(opened.plaintext, opened.generation)
        caller = None if opened.sender is None else canonical(opened.sender)
        if opened.sender is not None and caller is None:
            raise EnvelopeError("expected a sender with a DID or a key")
        call = Call(
            office=office,
            tenant=tenant,
            message=message,
            me=opened.recipient,
            caller=caller,
            sender=opened.sender,
            connection=await self._connection(tenant, caller),
            channel=channel,
            mark=opened.mark,
            repeated=opened.mark in self._handled,
        )
        try:
            replies = await office.dispatcher.handle(call)
        except ReplayedError:
            # The one that was first may have made the connection meanwhile.
            connection = await self._connection(tenant, caller)
            call = replace(call, connection=connection, repeated=True, once=None, after=[])
            replies = await office.dispatcher.handle(call)
        if caller is not None and not any(is_report(reply.type) for reply in replies):
            # What was refused may be tried again with the same bytes.
            self._remember(opened.mark)
        await self._post.answer(call, replies)

    def _remember(self, mark: bytes) -> None:
        self._handled[mark] = None
        self._handled.move_to_end(mark)
        if len(self._handled) > MAX_REMEMBERED:
            self._handled.popitem(last=False)

    async def _connection(self, tenant: str, caller: str | None) -> Connection | None:
        if caller is None:
            return None
        broker = self._office.broker
        connection = await broker.glance(lambda tx, _now: tx.connections.called(tenant, caller))
        if connection is None:
            return None
        if broker.clock() - connection.seen_at >= connecting.SEEN_EVERY:
            await broker.write(lambda tx, now: connecting.seen(tx, connection, now), when_full=True)
        if connection.endpoint is not None:
            self._came(connection)
        return connection
