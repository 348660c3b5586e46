"""Mediation for tests: its verbs over any store, beside those of the mailboxes, each one transaction."""

from collections.abc import Collection, Sequence
from typing import Any

from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import Draft
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.sending import Send, send
from mediator.store.base import Store
from pickup.broker import MEDIATION_HOOKS, MediationBroker
from pickup.rules import connecting, forwarding, granting, message_queue, names
from pickup.rules.forwarding import Forward, ForwardOutcome
from pickup.rules.granting import KeylistResult, KeylistUpdate
from pickup.rules.message_queue import QueueStatus
from pickup.rules.records import Connection, DidRotation, Generation, Invitation, MediationRules, NewConnection, Route
from pickup.rules.tables import ConnectionCursor, MediationTransaction
from tests.harness.broker import START, TENANT, Broker

AMPLE = 1 << 30
OURS = "did:example:mediator"


def key(number: int) -> str:
    """Return a canonical key, another one for each number."""
    return names.from_verkey(number.to_bytes(32, "big"))


class Mediation(Broker):
    """The broker of the tests, and what mediation adds to it."""

    tables = MediationTransaction

    def __init__(
        self, store: Store, rules: MediationRules | None = None, bounds: Bounds | None = None, now: int = START
    ) -> None:
        super().__init__(store, bounds, now)
        self.rules = rules or MediationRules()
        self.batches = 0

    def connect(self, *callers: str, tenant: str = TENANT, **more: Any) -> Connection:
        new = NewConnection(
            tenant=tenant,
            generation=Generation.V1,
            their_did=more.pop("their_did", "did:sov:peer"),
            my_did=more.pop("my_did", OURS),
            callers=callers,
            created_at=self.now,
            **more,
        )
        return self.run(lambda tx: connecting.connect(tx, self.rules, new, self.now))

    def meet(
        self, caller: str, their_did: str | None = None, invitation: str | None = None, my_did: str = OURS
    ) -> Connection:
        new = NewConnection(
            tenant=TENANT,
            generation=Generation.V2,
            their_did=their_did or caller,
            my_did=my_did,
            callers=(caller,),
            created_at=self.now,
            invitation=invitation,
        )
        return self.run(lambda tx: connecting.meet(tx, self.rules, new, self.now))

    def rotate(
        self, prior: str, caller: str | None, signed_at: int | None = None, mark: bytes = b"", **more: Any
    ) -> Connection | None:
        rotation = DidRotation(
            tenant=TENANT,
            prior_did=prior,
            caller=caller,
            their_did=caller or prior,
            my_did=OURS,
            endpoint=more.pop("endpoint", None),
            signed_at=self.now if signed_at is None else signed_at,
            digest=mark or f"{prior} {caller} {signed_at}".encode(),
        )
        return self.run(lambda tx: connecting.rotate(tx, self.rules, rotation, self.now))

    def seen(self, connection: Connection) -> Connection:
        return self.run(lambda tx: connecting.record_use(tx, connection, self.now))

    def disconnect(self, connection: Connection) -> None:
        self.run(lambda tx: connecting.disconnect(tx, connection, self.now))

    def forget(self, limit: int = 1000) -> int:
        """Run slices of the clean-up of connections to their end, and return how many it ended."""
        after: ConnectionCursor | None = connecting.FIRST
        ended = 0
        while after is not None:
            place = after
            removed, after = self.run(
                lambda tx: connecting.forget_unused(tx, self.rules.idle, place, self.now, limit)  # noqa: B023
            )
            ended += removed.connections
        return ended

    def called(self, caller: str, tenant: str = TENANT) -> Connection | None:
        return self.run(lambda tx: tx.connections.called(tenant, caller))

    def invite(self, id: str = "invitation", tenant: str = TENANT, **more: Any) -> Invitation:
        made = Invitation(id, tenant, key(900 + len(id)), b"sealed", "label", self.now, **more)
        self.run(lambda tx: tx.invitations.put(made))
        return made

    def uses(self, id: str = "invitation") -> int:
        return self.run(lambda tx: tx.invitations.get(id)).uses

    def grant(self, connection: Connection) -> Connection:
        return self.run(lambda tx: granting.grant(tx, self.bounds, self.random, self.rules, connection, self.now))

    def holder(self, number: int, *keys: str, tenant: str = TENANT) -> Connection:
        """Return a connection with mediation whose caller is ``key(number)`` and whose keylist has ``keys``."""
        connection = self.grant(self.connect(key(number), tenant=tenant))
        if keys:
            assert self.add(connection, *keys) == [KeylistResult.SUCCESS] * len(keys)
        return connection

    def mailbox_of(self, connection: Connection) -> Mailbox:
        return self.run(lambda tx: granting.get_mailbox(tx, connection, self.now))

    def update(
        self,
        connection: Connection,
        changes: Sequence[tuple[str, str]],
        proven: Sequence[str] = (),
        inside: Sequence[str] = (),
    ) -> list[KeylistResult]:
        wishes = [KeylistUpdate(key, action, tuple(inside)) for key, action in changes]
        return self.run(
            lambda tx: granting.update_keylist(tx, self.rules, connection, wishes, frozenset(proven), self.now)
        )

    def add(
        self, connection: Connection, *keys: str, proven: Sequence[str] = (), inside: Sequence[str] = ()
    ) -> list[KeylistResult]:
        return self.update(connection, [(key, "add") for key in keys], proven, inside)

    def remove(self, connection: Connection, *keys: str) -> list[KeylistResult]:
        return self.update(connection, [(key, "remove") for key in keys])

    def keys(self, connection: Connection, offset: int = 0, limit: int = 1000) -> tuple[list[str], int]:
        routes, total = self.run(lambda tx: granting.query_keylist(tx, connection, offset, limit, self.now))
        return [route.key for route in routes], total

    def route(self, key: str, tenant: str = TENANT) -> Route | None:
        return self.run(lambda tx: tx.routes.find(tenant, key))

    def attach(self, key: str, address: str, tenant: str = TENANT, inside: Sequence[str] = ()) -> Route:
        return self.run(lambda tx: granting.attach_key(tx, tenant, key, address, self.now, inside))

    def detach(self, key: str) -> None:
        self.run(lambda tx: granting.detach_key(tx, TENANT, key))

    def forward(self, keys: str | Sequence[str], *payloads: bytes, tenant: str = TENANT, **more: Any) -> ForwardOutcome:
        request = Forward(tenant, [keys] if isinstance(keys, str) else keys, payloads or (b"mail",), **more)
        return self.run(lambda tx: forwarding.forward(tx, self.bounds, self.quotas, self.rules, request, self.now))

    def post(self, payload: bytes, to: str, **draft: Any) -> int:
        """SEND as the NATS door does it, for a mailbox of any kind."""
        request = Send(TENANT, to, Draft(payload, **draft))
        return self.run(
            lambda tx: send(
                tx,
                self.bounds,
                self.quotas,
                request,
                self.now,
                {Kind.MEDIATION: MEDIATION_HOOKS},
            )
        )

    def status(self, connection: Connection, recipient: str | None = None, leased: Collection[int] = ()) -> QueueStatus:
        with self.reading() as tx:
            return message_queue.status(tx, connection, recipient, self.now, leased)

    def deliver(
        self,
        connection: Connection,
        limit: int = 1000,
        recipient: str | None = None,
        budget: int = AMPLE,
        leased: Collection[int] = (),
    ) -> list[StoredMessage]:
        return self.run(lambda tx: message_queue.deliver(tx, connection, limit, recipient, budget, self.now, leased))

    def acknowledge(self, connection: Connection, *ids: int) -> int:
        return self.run(lambda tx: message_queue.acknowledge(tx, connection, ids, self.now))

    def take_batch(self, connection: Connection, size: int = 10) -> list[StoredMessage]:
        """Take as a holder does that never acknowledges."""
        messages = self.deliver(self.settle_handed(connection), size)
        self.hand_over(connection, messages)
        return messages

    def hand_over(self, connection: Connection, messages: Sequence[StoredMessage]) -> None:
        self.batches += 1
        self.run(lambda tx: message_queue.record_batch(tx, connection, messages, [f"batch {self.batches}"]))

    def keep_handed(self, connection: Connection, *about: str) -> None:
        self.run(lambda tx: message_queue.keep_batch(tx, connection, about))

    def settle_handed(self, connection: Connection) -> Connection:
        return self.run(lambda tx: message_queue.confirm_batch(tx, connection, self.now))

    def pick(self, connection: Connection, *ids: int, budget: int = AMPLE) -> list[StoredMessage]:
        return self.run(lambda tx: message_queue.pick(tx, connection, ids, budget, self.now))

    def open_live(self, connection: Connection) -> tuple[QueueStatus, int]:
        return self.run(lambda tx: message_queue.open_live(tx, connection, self.now))

    def arrived(
        self,
        connection: Connection,
        cursor: int,
        limit: int = 1000,
        budget: int = AMPLE,
        leased: Collection[int] = (),
    ) -> list[StoredMessage]:
        return self.run(
            lambda tx: message_queue.next_arrived(tx, connection, cursor, limit, budget, self.now, leased)[0]
        )


async def enrol(mediation: MediationBroker, number: int, *keys: str, **more: Any) -> Connection:
    """Connect a holder by the use cases: its caller is ``key(number)``, it has mediation, and its keylist ``keys``."""
    given = {"generation": Generation.V1, "their_did": "did:example:peer", "my_did": OURS} | more
    new = NewConnection(tenant=TENANT, callers=(key(number),), created_at=mediation.clock(), **given)
    connection = await mediation.request_mediation(await mediation.connect(new), None)
    results = await mediation.update_keylist(connection, [KeylistUpdate(one, "add") for one in keys], frozenset(), ())
    assert results == [KeylistResult.SUCCESS] * len(keys)
    return connection


def payloads(messages: Sequence[StoredMessage]) -> list[bytes]:
    return [message.payload for message in messages]


def ids(messages: Sequence[StoredMessage]) -> list[int]:
    return [message.msg_id for message in messages]
