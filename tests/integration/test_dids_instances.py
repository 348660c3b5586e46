"""Several instances on one PostgreSQL are one mediator: one identity, whoever makes or rotates it first."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing

import pytest

from mediator.broker import Broker
from mediator.errors import UnavailableError
from mediator.mailboxes.bounds import Bounds
from pickup.broker import MediationBroker
from pickup.dids.identities import OwnIdentities, Vault
from pickup.dids.own_dids import Identity
from pickup.rules.records import MediationRules
from pickup.rules.tables import MediationTransaction
from tests.integration.test_postgres_store import url

__all__ = ["url"]

pytestmark = pytest.mark.postgres

URL = "https://mediator.example.com/didcomm"
TENANTS = ("default", "acme")
INSTANCES = 3


@asynccontextmanager
async def brokers(url: str) -> AsyncIterator[list[Broker]]:
    """A broker for each instance, with a store of its own over the same database."""
    from mediator.store.postgres import PostgresStore

    async with AsyncExitStack() as stack:
        made = []
        for _ in range(INSTANCES):
            broker = Broker(stack.enter_context(closing(PostgresStore(url))), Bounds())
            stack.push_async_callback(broker.close)
            made.append(broker)
        yield made


async def opened(broker: Broker, url: str = URL) -> OwnIdentities:
    return await OwnIdentities.open(MediationBroker(broker, MediationRules()), Vault(bytes(32)), TENANTS, url)


async def test_instances_that_start_at_once_agree_on_one_identity(url: str) -> None:
    async with brokers(url) as made:
        instances = await asyncio.gather(*map(opened, made))
        for tenant in TENANTS:
            assert len({one.current(tenant) for one in instances}) == 1
        kept = await made[0].read(lambda tx, _now: tx.table(MediationTransaction).identities.all())
        assert sorted(one.tenant for one in kept) == sorted(TENANTS)


async def test_what_each_rotates_all_open(url: str) -> None:
    async with brokers(url) as made:
        instances = [await opened(broker) for broker in made]
        first = instances[0].current("default")
        ended = await asyncio.gather(*(one.rotate("default") for one in instances), return_exceptions=True)
        rotated = [one for one in ended if isinstance(one, Identity)]
        # Who loses the race more than once may try again later, and has changed nothing.
        assert rotated
        assert all(isinstance(one, Identity | UnavailableError) for one in ended)
        for one in instances:
            await one.renew()
        assert len({one.current("default") for one in instances}) == 1
        for identity in (first, *rotated):
            for one in instances:
                assert one.known_as(identity.v2_did) == identity
                assert await one.seed(identity.key) is not None
                assert one.kid(f"{identity.v2_did}#key-1") is not None


async def test_instances_with_urls_of_their_own_open_each_others_mail(url: str) -> None:
    async with brokers(url) as made:
        urls = [f"https://host-{at}.example.com/didcomm" for at in range(INSTANCES)]
        instances = [await opened(broker, url) for broker, url in zip(made, urls, strict=True)]
        for one in instances:
            await one.renew()
        for one in instances:
            me = one.current("default")
            for other in instances:
                assert other.kid(f"{me.v2_did}#key-1") is not None
                assert other.known_as(me.v1_did).key == me.key
