"""Feedback at the registry: how it comes in, whose word counts, and how instances follow (G5–G7)."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multidict import CIMultiDict

from mediator.announcer import Announcer
from mediator.errors import BadRequestError, NoSuchAgentError
from mediator.http.callers import HttpCallers
from mediator.nats.client import Request, find_client
from mediator.settings.settings import Settings
from mediator.tenants.directory import TenantDirectory, digest_of
from mediator.tenants.records import Tenant, TenantToken, TenantUser
from registry.index.ranking import MEMORY
from registry.index.tenant import IndexQuery, SearchFilter
from registry.index.vectors import pack_rows
from registry.records import CardVectors, MemoryPolicy, voter_of_request
from registry.requests import FeedbackRequest
from registry.search.feedback import SEARCH_SECONDS, RecentSearches
from registry.tables import RegistryTables
from tests.harness.app import app
from tests.harness.core import make_settings
from tests.harness.directory import Instance, instance
from tests.harness.stores import ram_store
from tests.harness.waiting import until

SPACE = "model/3/1"
NKEY = "U" + "A" * 55
VECTOR = np.ones(4, np.float32) / 2
ALONE, SHARED = MemoryPolicy("auto"), MemoryPolicy("on", count_credentials=lambda _tenant: 2)


class Bus(Announcer):
    """Announces within the process."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[bytes], None]] = []

    async def publish(self, data: bytes) -> None:
        for heard in self.listeners:
            heard(data)

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        self.listeners.append(heard)


async def ask(one: Instance, *numbers: int, text: str = "Book a boat") -> str:
    query = await one.asked.add("default", text, SPACE, VECTOR, np.array(numbers, np.int64))
    return query.id


async def say(one: Instance, query_id: str, credential: str = "", *, useful: bool = True) -> bool:
    return await one.directory.feedback("default", FeedbackRequest(query_id, "agent.boats", useful), credential)


async def remembered(one: Instance) -> int:
    return (await one.updater.index("default")).remembered


@pytest.mark.rule("G5")
async def test_feedback_is_remembered_by_all_instances() -> None:
    store, bus = ram_store(), Bus()
    asked = [RecentSearches(bus), RecentSearches(bus)]
    async with (
        instance(store, SPACE, policy=ALONE, asked=asked[0]) as here,
        instance(store, SPACE, policy=ALONE, asked=asked[1]) as there,
    ):
        boats = await here.register("boats")
        assert await say(there, await ask(here, boats))
        assert await remembered(there) == 1
        await until(lambda: remembered(here), what="the other instance follows")


@pytest.mark.rule("G5")
async def test_a_search_is_known_for_an_hour() -> None:
    now = 0.0
    asked = RecentSearches(clock=lambda: now)
    async with instance(ram_store(), SPACE, policy=ALONE, asked=asked) as one:
        boats = await one.register("boats")
        query_id = await ask(one, boats)
        assert await say(one, query_id)
        now = SEARCH_SECONDS
        for unknown in (query_id, "nothing"):
            with pytest.raises(BadRequestError, match="query_id: not known"):
                await say(one, unknown)


@pytest.mark.rule("G6")
@pytest.mark.parametrize(("policy", "counted"), [(ALONE, True), (SHARED, False)])
@pytest.mark.parametrize("caller", ["user ann", ""], ids=["a user", "anonymous"])
async def test_own_agents_cannot_be_praised_among_several(policy: MemoryPolicy, counted: bool, caller: str) -> None:
    async with instance(ram_store(), SPACE, policy=policy) as one:
        card = b'{"mailbox": "agent.boats"}'
        done = await one.directory.register("default", card, caller)
        query_id = await ask(one, done.agent.id)
        assert await say(one, query_id, caller) is counted
        assert await say(one, query_id, "user bob")
        assert await remembered(one) == 1


@pytest.mark.rule("G6")
@pytest.mark.parametrize("parties", [0, 1, 2])
async def test_anonymous_callers_are_one_beside_a_credential(parties: int) -> None:
    policy = MemoryPolicy("on", count_credentials=lambda _tenant: parties)
    async with instance(ram_store(), SPACE, policy=policy) as one:
        done = await one.directory.register("default", b'{"mailbox": "agent.boats"}', "user ann")
        voters = set()
        for number in range(10):
            query = await one.asked.add("default", f"Boat {number}", SPACE, VECTOR, np.array([done.agent.id], np.int64))
            assert await say(one, query.id)
            voters |= await one.broker.read(
                lambda tx, _now, query=query: {  # type: ignore[misc]
                    voter
                    for voter in (0, voter_of_request(query.text))
                    if tx.table(RegistryTables).memory.find_vote(query, done.agent.id, voter) is not None
                }
            )
        assert len(voters) == (1 if parties else 10)
        if parties:
            own = await one.directory.register("default", b'{"mailbox": "agent.boats"}')
            assert not await say(one, await ask(one, own.agent.id)), "its own agent"


@pytest.mark.rule("G6")
async def test_a_bulk_registration_keeps_who_registered() -> None:
    async with instance(ram_store(), SPACE, policy=SHARED) as one:
        await one.directory.register("default", b'{"mailbox": "agent.boats"}', "user ann")
        cards = [b'{"mailbox": "agent.boats", "name": "Boats"}', b'{"mailbox": "agent.tide"}']
        await one.directory.register_many("default", SPACE, cards, lambda _at, _card: pack_rows(VECTOR[None]))
        numbers = (await one.updater.index("default")).list_agents(SearchFilter(), 0)
        query_id = await ask(one, *numbers.tolist())
        assert not await say(one, query_id, "user ann")
        assert await say(one, query_id, "")
        assert await one.directory.feedback("default", FeedbackRequest(query_id, "agent.tide", True), "")


@pytest.mark.rule("G7")
async def test_the_requests_of_a_tenant_are_bounded() -> None:
    async with instance(ram_store(), SPACE, policy=replace(ALONE, max_requests=3)) as one:
        boats = await one.register("boats")
        for n in range(6):
            await say(one, await ask(one, boats, text=f"boat {n}"))
        assert await remembered(one) == 3


@pytest.mark.rule("G7")
async def test_use_is_forgotten_on_demand() -> None:
    async with instance(ram_store(), SPACE, policy=ALONE) as one:
        boats = await one.register("boats")
        tide = await one.register("tide")
        for n in range(3):
            await say(one, await ask(one, boats, tide, text=f"boat {n}"))
        assert await one.directory.forget_use("default", "agent.tide") == 0
        assert await one.directory.forget_use("default", "agent.boats") == 3
        await say(one, await ask(one, boats))
        assert await one.directory.forget_use("other", None) == 0
        assert await one.directory.forget_use("default", None) == 1
        with pytest.raises(NoSuchAgentError):
            await one.directory.forget_use("default", "agent.nobody")


@pytest.mark.rule("G7")
async def test_what_is_forgotten_of_one_agent_lifts_it_no_more() -> None:
    async with instance(ram_store(), SPACE, policy=ALONE) as one:
        boats, tide = await one.register("boats"), await one.register("tide")
        query_id = await ask(one, boats, tide)
        await say(one, query_id)
        await one.directory.feedback("default", FeedbackRequest(query_id, "agent.tide", True), "")
        rows = pack_rows(VECTOR[None])
        made = [CardVectors(no, 1 + at, rows) for at, no in enumerate((boats, tide))]
        await one.broker.write(lambda tx, _now: tx.table(RegistryTables).vectors.save(SPACE, made))

        async def lifts() -> dict[int, float]:
            index = await one.updater.index("default")
            found, _ = index.search(IndexQuery([["boat"]], VECTOR[None], remember=True), SearchFilter(), 0)
            shares = found.shares.get(MEMORY, np.zeros(len(found.agent_ids)))
            return dict(zip(found.agent_ids.tolist(), shares.tolist(), strict=True))

        await until(lambda: _equal(lifts(), boats, tide), what="both are lifted alike")
        assert await one.directory.forget_use("default", "agent.boats") == 1
        after = await lifts()
        assert after[tide] > after[boats]


async def _equal(lifts: Awaitable[dict[int, float]], *numbers: int) -> bool:
    found = await lifts
    return len({found.get(no, 0.0) for no in numbers} | {0.0}) == 2


@pytest.mark.rule("G6")
def test_the_memory_is_off_where_parties_share_a_tenant() -> None:
    user: dict[str, Any] = {"password": "secret"}
    tenants: dict[str, Any] = {
        "alone": {"users": [user | {"name": "ann"}], "api_tokens": ["t" * 20]},
        "shared": {"users": [user | {"name": "bob"}, user | {"name": "eve"}]},
        "keys": {"api_tokens": ["a" * 20, "b" * 20]},
    }
    directory = TenantDirectory(Settings.model_validate({"tenants": tenants}), lambda: 0)
    policy = MemoryPolicy("auto", count_credentials=directory.parties)
    names = ("alone", "shared", "keys", "default")
    assert [policy.applies_to(name) for name in names] == [True, False, False, True]
    assert replace(policy, tenants=frozenset({"shared"})).applies_to("shared")
    assert not any(replace(policy, mode="off").applies_to(name) for name in names)
    assert all(replace(policy, mode="on").applies_to(name) for name in names)
    external = TenantDirectory(make_settings(nats_url="nats://127.0.0.1:4223"), lambda: 0)
    assert not replace(policy, count_credentials=external.parties).applies_to("default"), "its users are not known here"


@pytest.mark.rule("G6")
def test_who_gets_new_credentials_stays_the_same_voter() -> None:
    fixed: dict[str, Any] = {"users": [{"name": "eve~2", "password": "secret"}, {"name": "kim", "nkey": NKEY}]}
    directory = TenantDirectory(Settings.model_validate({"tenants": {"fixed": fixed}}), lambda: 0)
    tokens = tuple(TenantToken("main", digest_of(text)) for text in ("old" * 6, "new" * 6))
    directory.update(1, {"acme": Tenant("acme", 0, users=(TenantUser("ann", "hash", generation=3),), tokens=tokens)})
    logins = ("ann", "ann~2", "ann~3", "eve~2", NKEY, "somebody~4")
    assert [directory.user_of(login) for login in logins] == ["ann", "ann", "ann", "eve~2", "kim", "somebody~4"]
    callers = HttpCallers(
        make_settings(),
        "",
        {"fixed": ["set" * 6]},
        find_tenant=directory.tenant_of_token,
        find_name=directory.name_of_token,
    )
    credentials = [
        callers.identify(CIMultiDict(Authorization=f"Bearer {text * 6}"), None).credential
        for text in ("old", "new", "set")
    ]
    assert credentials == ["token main", "token main", f"token {digest_of('set' * 6)}"]
    assert callers.identify(CIMultiDict(), None).credential == ""


@pytest.mark.rule("G6")
def test_a_caller_is_who_the_server_vouches_for() -> None:
    block = b'NATS/1.0\r\nNats-Request-Info:{"server":"s","id":4,"user":"ann~2"}\r\n'
    assert Request("mq9.ACME.$mq9.AI.AGENT.DISCOVER", b"", b"", None, find_client(block)).login == "ann~2"
    twice = b'NATS/1.0\r\nNats-Request-Info:{"server":"s","id":4,"user":"eve"}' + block.removeprefix(b"NATS/1.0")
    assert Request("mq9.ACME.$mq9.AI.AGENT.DISCOVER", b"", b"", None, find_client(twice)).login == "ann~2", (
        "the server's is the last"
    )
    # Without accounts the server adds no such line, so a client wrote it.
    assert Request("$mq9.AI.AGENT.DISCOVER", b"", b"", None, find_client(block)).login == ""


@pytest.mark.rule("G5")
async def test_wrong_feedback_is_refused_by_its_field(tmp_path: Path) -> None:
    wrong: dict[str, list[dict[str, Any]]] = {
        "query_id": [{}, {"query_id": 5}, {"query_id": "x", "mailbox": "a.b", "useful": True}],
        "mailbox": [{"query_id": "x", "useful": True}],
        "useful": [{"query_id": "x", "mailbox": "a.b"}, {"query_id": "x", "mailbox": "a.b", "useful": 1}],
    }
    async with app(tmp_path) as service:
        for field, bodies in wrong.items():
            for body in bodies:
                assert (await service.ask("AGENT.FEEDBACK", body))["error"].startswith(field)
