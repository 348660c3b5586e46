"""Connects holders and queues their mail through the domain's verbs, where the door would take too long.

Only while no service runs on the database; what is measured afterwards goes through the door.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.servers import Service, running
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.quotas import Quotas
from mediator.mediation import connecting, granting, keylist
from mediator.mediation.forwarding import Forward, forward
from mediator.mediation.keylist import Change, Result
from mediator.mediation.records import Generation, NewConnection, Rules
from mediator.operators.control import ask
from mediator.store.base import Store
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from pickup.client import Wallet
from pickup.client.invitation import Invitation
from pickup.client.link import Link

TENANT = "default"
CHUNK = 1000
SETTINGS = {"MEDIATOR_DIDCOMM__PUBLIC_URL": "http://mediator.example"}
"""The mediator's DID names its URL. With this one it is the same after a restart, whatever the ports are then."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Holders of one mediator (v2) with their keys in one wallet, each with one recipient DID."""

    mediator: str
    wallet: Wallet
    own: list[str]
    """The DIDs by which the mediator knows them."""
    recipients: list[str]

    def link(self, number: int, service: Service) -> Link:
        """Return what a holder knows of the mediator."""
        http = f"{service.http_url}/didcomm"
        endpoints = (http, http.replace("http", "ws", 1))
        return Link(Generation.V2, self.own[number], self.mediator, endpoints, routing=(self.mediator,))


def begin(data_dir: Path, **settings: str) -> str:
    """Start the service once, so that it makes its identity, and return its DID."""
    with running(Service(data_dir, **SETTINGS, **settings)):
        made = asyncio.run(ask(data_dir, "invite", tenant=TENANT, label="", ttl_ms=None, uses=None))
    did = Invitation.parse(str(made["v2_url"])).did
    assert did is not None
    return did


@contextmanager
def opened(data_dir: Path, database_url: str | None = None) -> Iterator[Store]:
    """Open the store that a service used, while it does not run."""
    store: Store
    if database_url is None:
        store = SqliteStore(database_path(data_dir))
    else:
        from mediator.store.postgres import PostgresStore

        store = PostgresStore(database_url)
    try:
        yield store
    finally:
        store.close()


def enrol(store: Store, mediator: str, count: int) -> Crowd:
    """Connect holders, grant them mediation and register a recipient of each, as the door's handlers do."""
    wallet = Wallet()
    own = [wallet.new_did() for _ in range(count)]
    behind = {"type": "DIDCommMessaging", "serviceEndpoint": {"uri": mediator, "accept": ["didcomm/v2"]}}
    recipients = [wallet.new_did([behind]) for _ in range(count)]
    now, rules = _now(), Rules()
    for start in range(0, count, CHUNK):
        with store.transaction() as tx:
            for mine, recipient in zip(own[start : start + CHUNK], recipients[start : start + CHUNK], strict=True):
                new = NewConnection(TENANT, Generation.V2, mine, mediator, (mine,), now)
                met = connecting.meet(tx, rules, new, now)
                granted = granting.grant(tx, Bounds(), secrets.token_bytes, rules, met, now)
                results = keylist.update(tx, rules, granted, [Change(recipient, "add")], frozenset(), now)
                assert results == [Result.SUCCESS]
        store.upkeep(busy=False)
    return Crowd(mediator, wallet, own, recipients)


def queue(store: Store, recipient: str, payload: bytes, count: int) -> None:
    """Forward the same envelope to a recipient again and again."""
    bounds, rules, now = Bounds(), Rules(), _now()
    quotas = Quotas(bounds.mailbox, bounds.tenant)
    request = Forward(TENANT, [recipient], [payload])
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        with store.transaction() as tx:
            kept = [forward(tx, bounds, quotas, rules, request, now) for _ in range(size)]
            assert sum(outcome.queued for outcome in kept) == size
        store.upkeep(busy=False)


def _now() -> int:
    return time.time_ns() // 1_000_000
