"""Enrols holders and queues their mail by calling the rules directly, because the door would take too long.

Use it only while no service runs on the database. What is measured afterwards goes through the door.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.servers import ServiceProcess, running
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.quotas import Quotas
from mediator.operate.control import send_command
from mediator.store.base import Store
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from pickup.client import Wallet
from pickup.client.handshake import MediatorInvitation
from pickup.client.wallet import Link
from pickup.rules import connecting, granting
from pickup.rules.forwarding import Forward, forward
from pickup.rules.granting import KeylistResult, KeylistUpdate
from pickup.rules.records import Generation, MediationRules, NewConnection
from pickup.rules.tables import MediationTransaction

TENANT = "default"
CHUNK = 1000
SETTINGS = {"MEDIATOR_DIDCOMM__PUBLIC_URL": "http://mediator.example"}
"""The mediator's DID names its URL. With this one it is the same after a restart, whatever the ports are then."""


@dataclass(frozen=True, slots=True)
class EnrolledHolders:
    """DIDComm v2 holders of one mediator; one wallet holds all keys, each holder has one recipient DID."""

    mediator: str
    wallet: Wallet
    own: list[str]
    """The DIDs by which the mediator knows them."""
    recipients: list[str]

    def link(self, number: int, service: ServiceProcess) -> Link:
        """Return the link of a holder to the mediator."""
        http = f"{service.http_url}/didcomm"
        endpoints = (http, http.replace("http", "ws", 1))
        return Link(Generation.V2, self.own[number], self.mediator, endpoints, routing=(self.mediator,))


def begin(data_dir: Path, **settings: str) -> str:
    """Start the service once to create its identity; return its DID."""
    with running(ServiceProcess(data_dir, env={**SETTINGS, **settings})):
        made = asyncio.run(send_command(data_dir, "invite", tenant=TENANT, label="", ttl_ms=None, uses=None))
    did = MediatorInvitation.parse(str(made["v2_url"])).did
    assert did is not None
    return did


@contextmanager
def opened(data_dir: Path, database_url: str | None = None) -> Iterator[Store]:
    """Open the store of a stopped service."""
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


def enrol(store: Store, mediator: str, count: int) -> EnrolledHolders:
    """Connect holders, grant mediation and register one recipient for each, as the protocol handlers do."""
    wallet = Wallet()
    own = [wallet.new_did() for _ in range(count)]
    behind = {"type": "DIDCommMessaging", "serviceEndpoint": {"uri": mediator, "accept": ["didcomm/v2"]}}
    recipients = [wallet.new_did([behind]) for _ in range(count)]
    now, rules = _now(), MediationRules()
    for start in range(0, count, CHUNK):
        with store.transaction() as tx:
            for mine, recipient in zip(own[start : start + CHUNK], recipients[start : start + CHUNK], strict=True):
                new = NewConnection(TENANT, Generation.V2, mine, mediator, (mine,), now)
                met = connecting.meet(tx.table(MediationTransaction), rules, new, now)
                granted = granting.grant(tx.table(MediationTransaction), Bounds(), secrets.token_bytes, rules, met, now)
                results = granting.update_keylist(
                    tx.table(MediationTransaction), rules, granted, [KeylistUpdate(recipient, "add")], frozenset(), now
                )
                assert results == [KeylistResult.SUCCESS]
        store.upkeep(busy=False)
    return EnrolledHolders(mediator, wallet, own, recipients)


def queue(store: Store, recipient: str, payload: bytes, count: int) -> None:
    """Queue the same envelope ``count`` times for a recipient."""
    bounds, rules, now = Bounds(), MediationRules(), _now()
    quotas = Quotas(bounds.mailbox, bounds.tenant)
    request = Forward(TENANT, [recipient], [payload])
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        with store.transaction() as tx:
            kept = [forward(tx.table(MediationTransaction), bounds, quotas, rules, request, now) for _ in range(size)]
            assert sum(outcome.queued for outcome in kept) == size
        store.upkeep(busy=False)


def _now() -> int:
    return time.time_ns() // 1_000_000
