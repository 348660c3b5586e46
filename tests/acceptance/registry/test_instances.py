"""Two instances on one PostgreSQL are one registry: who registers at one is found at both; pages go on at either."""

import json
from collections.abc import AsyncIterator
from urllib.parse import urlencode

import pytest

from tests.harness.client import Client
from tests.harness.postgres import Server
from tests.harness.service import Service, Services
from tests.harness.waiting import until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

COUNT = 30
Pair = tuple[Service, Service]


@pytest.fixture
async def pair(services: Services, postgres: Server) -> AsyncIterator[Pair]:
    with postgres.database() as url:
        shared = {"database_url": url, "nats_url": await services.nats_server()}
        both = services.new("a", **shared), services.new("b", **shared)
        for service in both:
            service.environment["MEDIATOR_DIDCOMM__ENABLED"] = "false"
            service.start()
        for service in both:
            await service.ready()
        yield both
        for service in both:
            service.terminate()
        for service in both:
            await service.ended()


async def found(service: Service, **asked: object) -> dict[str, object]:
    """Ask one instance, by its own port."""
    status, answer = await service.get(f"/agents?{urlencode(asked)}")
    assert status == 200, answer
    return dict(json.loads(answer))


@pytest.mark.rule("G1", "G2", "G3")
async def test_agents_and_pages_are_shared_by_both_instances(pair: Pair):
    client = await Client.connect(pair[0].nats_url, tries=3)
    try:
        for number in range(COUNT):
            card = {"mailbox": f"agent.a{number}", "name": f"a{number}", "description": "paints houses"}
            assert (await client.ask("AGENT.REGISTER", card)).error == ""

        async def all_found() -> bool:
            return [(await found(each, text="paint"))["total"] for each in pair] == [COUNT, COUNT]

        await until(all_found, what="both instances have found all")
        for first, second in (pair, pair[::-1]):
            names: list[str] = []
            page = await found(first, text="paint", limit=8)
            at = [second, first]
            while True:
                names += [agent["name"] for agent in page["agents"]]
                if "next" not in page:
                    break
                at.reverse()
                page = await found(at[0], cursor=page["next"], limit=8)
            assert sorted(names) == sorted(f"a{number}" for number in range(COUNT))
        assert (await client.ask("AGENT.UNREGISTER", {"mailbox": "agent.a3"})).error == ""

        async def gone_at_both() -> bool:
            return [(await found(each, text="paint"))["total"] for each in pair] == [COUNT - 1, COUNT - 1]

        await until(gone_at_both, what="both instances have forgotten it")
    finally:
        await client.close()
    assert [service.complaints() for service in pair] == [[], []]


@pytest.mark.rule("A10", "G4")
async def test_a_send_only_address_means_the_same_at_both(pair: Pair):
    client = await Client.connect(pair[0].nats_url, tries=3)
    try:
        # Whichever instance is free answers, so among many requests there are some of each.
        for _ in range(COUNT):
            made = (await client.ask("MAILBOX.CREATE", {})).body
            own, to = made["mail_address"], made["send_address"]
            assert (await client.ask(f"MSG.SEND.{to}", b"x")).body == {"error": "", "msg_id": 0}
            assert (await client.ask(f"MSG.QUERY.{own}")).body["send_address"] == to
            assert (await client.ask(f"MSG.QUERY.{to}")).body["error_code"] == "send_only"
        assert (await client.ask("AGENT.REGISTER", {"mailbox": own, "name": "Ann"})).error == ""

        async def shown_at_both() -> bool:
            pages = [await found(each) for each in pair]
            return [page["agents"] for page in pages] == [[{"mailbox": to, "name": "Ann"}]] * 2

        await until(shown_at_both, what="both instances show the card with its send-only address")
        for each in pair:
            status, card = await each.get(f"/agents/{to}")
            assert (status, json.loads(card)) == (200, {"mailbox": to, "name": "Ann"})
    finally:
        await client.close()
    assert [service.complaints() for service in pair] == [[], []]
