"""What an operator limits and denies at the DIDComm door, with holders and senders that are real."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import WSCloseCode

from mediator.operate.control import send_command
from pickup.client import Holder, HttpStatusError, ProblemError, Wallet
from pickup.rules.records import Generation
from tests.harness.didcomm_service import note, note_v2
from tests.harness.live import Live
from tests.harness.stores import ram_store
from tests.harness.waiting import until
from tests.integration.test_didcomm_bad_input import BOTH, JSON, PATIENCE, Mediator, mediating

V1, V2 = Generation.V1, Generation.V2
GARBAGE = b'{"protected":"e30"}'
LOCAL = "127.0.0.0/8"
E = TypeVar("E", bound=Exception)


async def tell(door: Mediator, command: str, **fields: Any) -> dict[str, Any]:
    answer = await send_command(door.data_dir, command, **fields)
    assert answer["error"] == "", answer
    return answer


async def deny(door: Mediator, name: str) -> None:
    await tell(door, "access-add", list="deny", name=name, note="a test")


async def pardon(door: Mediator, name: str) -> None:
    await tell(door, "access-remove", list="deny", name=name)


async def post(door: Mediator, **headers: str) -> tuple[int, str, str | None]:
    """Post what is no envelope; return status, code and Retry-After."""
    async with door.session.post(door.url, data=GARBAGE, headers=JSON | headers) as answer:
        return answer.status, (await answer.json())["code"], answer.headers.get("Retry-After")


# Rates.


async def refused(attempt: Callable[[], Awaitable[Any]], kind: type[E]) -> E:
    """Repeat an attempt until it is refused: a slow machine may have got a new token meanwhile."""
    with pytest.raises(kind) as error:  # noqa: PT012 -- any of them
        for _ in range(200):
            await attempt()
    return error.value


async def test_posts_above_the_rate_of_an_address_get_429(tmp_path: Path):
    async with mediating(tmp_path, address_rate=1, burst_seconds=3, proxies=["127.0.0.1"]) as door:
        inside = {"X-Forwarded-For": "203.0.113.9"}

        async def post_long_way() -> None:
            async with door.session.post(
                door.url, data=GARBAGE, headers=JSON | {"Expect": "100-continue"} | inside
            ) as sent:
                assert sent.status in (400, 429)
                if sent.status == 429:
                    raise LookupError

        async def post_directly() -> None:
            status, code, after = await post(door, **inside)
            assert (status, code, after) in [(400, "bad_envelope", None), (429, "rate_limited", "1")]
            if status == 429:
                raise LookupError

        async def connect() -> None:
            await (await door.session.ws_connect(door.url, headers=inside)).close()

        assert (await post(door, **inside))[0] == 400
        await refused(post_directly, LookupError)
        await refused(post_long_way, LookupError)
        assert (await refused(connect, aiohttp.WSServerHandshakeError)).status == 429
        assert door.limited("address") == 3
        assert (await post(door, **{"X-Forwarded-For": "203.0.113.10"}))[0] == 400
        # The operator exempts a network.
        await tell(door, "access-add", list="allow", name="203.0.113.0/24", note="a partner")
        for _ in range(10):
            assert (await post(door, **inside))[0] == 400


async def test_frames_above_the_rate_of_an_address_wait(tmp_path: Path):
    async with mediating(tmp_path, address_rate=50, burst_seconds=1, proxies=["127.0.0.1"]) as door:
        headers = {"X-Forwarded-For": "203.0.113.9"}
        sockets = [await door.session.ws_connect(door.url, headers=headers) for _ in range(3)]

        async def limited() -> bool:
            for _ in range(20):
                await sockets[0].ping()
            return door.limited("address") > 0

        await until(limited)
        for socket in sockets:
            await socket.send_bytes(GARBAGE)
        await until(lambda: door.envelopes("ws", "bad_envelope") == len(sockets))
        for socket in sockets:
            await socket.close()


async def test_posts_above_the_rate_of_a_connection_get_429(tmp_path: Path):
    async with mediating(tmp_path, connection_rate=1, burst_seconds=10) as door:
        holder = await door.connected(V2)
        await holder.mediate()
        assert (await refused(holder.status, HttpStatusError)).status == 429
        assert door.limited("connection") == 1
        other = await door.connected(V2)
        await other.mediate()


@BOTH
async def test_frames_above_the_rate_of_a_connection_get_a_report(tmp_path: Path, generation: Generation):
    async with mediating(tmp_path, connection_rate=1, burst_seconds=10) as door:
        holder = await door.connected(generation)
        await holder.mediate()
        async with holder.socket():
            error = await refused(holder.status, ProblemError)
            assert error.code == "e.p.me.res.rate"
            assert "retry after" in error.text


# Lists.


@BOTH
async def test_a_denied_holder_loses_its_session_and_is_refused(tmp_path: Path, generation: Generation):
    async with mediating(tmp_path) as door:
        holder, key = await door.holder(generation)
        name = (await tell(door, "connections-show", connection=1))["callers"][0]
        grant = await holder.mediate()
        async with Live.of(holder) as live:
            await deny(door, name)
            await live.broken()
        with pytest.raises(HttpStatusError, match="denied"):
            await holder.status()
        # Senders learn nothing, and what they send waits.
        sender = await door.sender()
        await (sender.send_v1 if generation is V1 else _send_v2(sender))(key, grant.routing, grant.endpoint, note("x"))
        await pardon(door, name)
        assert [mail.id for mail in await holder.fetch()]


def _send_v2(sender: Any) -> Callable[..., Any]:
    async def send(key: str, routing: list[str], endpoint: str, message: dict[str, Any]) -> None:
        await sender.send_v2(key, routing[0], endpoint, {"id": "x", "type": "https://x.org/x/1.0/x", "body": message})

    return send


async def test_a_denied_holder_cannot_connect_or_get_mediation(tmp_path: Path):
    async with mediating(tmp_path) as door:
        holder = await door.connected(V1)
        name = (await tell(door, "connections-show", connection=1))["callers"][0]
        await deny(door, name)
        with pytest.raises(HttpStatusError, match="denied"):
            await holder.mediate()
        await pardon(door, name)
        await holder.mediate()


async def test_mail_for_a_denied_key_is_dropped_and_answered_alike(tmp_path: Path):
    async with mediating(tmp_path) as door:
        holder, key = await door.holder(V1)
        grant, sender = await holder.mediate(), await door.sender()
        await sender.send_v1(key, grant.routing, grant.endpoint, note("before"))
        await deny(door, key)
        await sender.send_v1(key, grant.routing, grant.endpoint, note("after"))
        assert (await holder.status()).count == 1
        assert door.forwarded("unroutable") == 1
        await holder.remove_key(key)
        with pytest.raises(ProblemError, match="client_error"):
            await holder.add_key(key)


async def test_an_allowed_holder_gets_mediation_by_any_policy(tmp_path: Path):
    async with mediating(tmp_path, policy="allow") as door:
        holder = await door.connected(V1)
        with pytest.raises(ProblemError):
            await holder.mediate()
        name = (await tell(door, "connections-show", connection=1))["callers"][0]
        await tell(door, "access-add", list="allow", name=name)
        await holder.mediate()


@pytest.mark.rule("D1")
async def test_the_did_of_an_invitation_lets_its_wallets_in(tmp_path: Path):
    async with mediating(tmp_path, policy="invitation") as door:
        made = await tell(door, "invite", uses=2)
        async with door.session.get(made["page_url"], headers={"Accept": "text/html"}) as page:
            text = await page.text()
        dids = [re.search(f'id="{id}">([^<]+)<', text)[1] for id in ("did", "socket-did")]
        async with door.session.get(f"{door.url}/did") as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == "*"
            told = await answer.json()
        # The mediator's own DIDs let nobody in, and the denial says why.
        for did in (told["did"], told["socket_did"]):
            stranger = await door.stack.enter_async_context(await Holder.connect(did, wallet=Wallet()))
            with pytest.raises(ProblemError) as denied:
                await stranger.mediate()
            assert denied.value.code == "e.p.req.invitation"
        holders = [await door.stack.enter_async_context(await Holder.connect(did, wallet=Wallet())) for did in dids]
        for holder in holders:
            grant = await holder.mediate()
            # Senders learn nothing that would let them in.
            assert grant.routing == (told["did"],)
        assert (await tell(door, "invitations-show", id=made["id"]))["uses"] == 2
        late = await door.stack.enter_async_context(await Holder.connect(dids[0], wallet=Wallet()))
        with pytest.raises(ProblemError):
            await late.mediate()
        # Who came by it stays when it is gone, keeps its DID, and goes live by it.
        await tell(door, "invitations-remove", id=made["id"])
        await tell(door, "identity-rotate")
        for holder, routing in zip(holders, (told["did"], dids[1]), strict=True):
            key, sender = await holder.add_key(), await door.sender()
            await sender.send_v2(key, routing, door.url, note_v2("before"))
            live = holder.mail()
            for text in ("before", "live"):
                mail = await asyncio.wait_for(anext(live), PATIENCE)
                assert (await holder.open(mail)).message["body"] == {"content": text}
                await holder.received([mail.id])
                await sender.send_v2(key, routing, door.url, note_v2("live"))
            await live.aclose()
        with pytest.raises(ProblemError):
            await late.mediate()


@pytest.mark.parametrize("path", ["nobody/did", "did/did", "DID"])
async def test_dids_are_told_of_tenants_that_are_there(tmp_path: Path, path: str):
    async with mediating(tmp_path) as door, door.session.get(f"{door.url}/{path}") as answer:
        assert answer.status == 404


async def test_a_denied_network_is_refused_and_its_sockets_are_closed(tmp_path: Path):
    async with mediating(tmp_path, proxies=["127.0.0.1"]) as door:
        inside, outside = ({"X-Forwarded-For": ip} for ip in ("203.0.113.9", "198.51.100.1"))
        socket = await door.session.ws_connect(door.url, headers=inside)
        await deny(door, "203.0.113.7/24")
        assert (await socket.receive()).data == WSCloseCode.POLICY_VIOLATION
        assert (await post(door, **inside))[:2] == (403, "denied")
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await door.session.ws_connect(door.url, headers=inside)
        assert (await post(door, **outside))[0] == 400
        # The smallest network decides.
        await tell(door, "access-add", list="allow", name="203.0.113.9")
        assert (await post(door, **inside))[0] == 400
        listed = (await tell(door, "access-list", list="deny"))["names"]
        assert [(row["name"], row["note"]) for row in listed] == [("203.0.113.0/24", "a test")]


async def test_changes_reach_other_instances_and_survive_a_restart(tmp_path: Path):
    listeners: list[Callable[[bytes], None]] = []

    class Announcements:
        async def publish(self, data: bytes) -> None:
            for heard in listeners:
                heard(data)

        async def listen(self, heard: Callable[[bytes], None]) -> None:
            listeners.append(heard)

    def announcer(topic: str) -> Announcements | None:
        return Announcements() if topic == "access" else None

    store, key = ram_store(), bytes(32)
    async with contextlib.AsyncExitStack() as stack:
        doors = [
            await stack.enter_async_context(mediating(tmp_path / name, store=store, key=key, announcer=announcer))
            for name in ("one", "two")
        ]
        await deny(doors[0], LOCAL)

        async def refused() -> bool:
            return (await post(doors[1]))[0] == 403

        await until(refused)


async def test_what_is_no_name_is_refused_with_the_field(tmp_path: Path):
    async with mediating(tmp_path) as door:
        for fields, field in (
            ({"list": "deny", "name": "nonsense"}, "name"),
            ({"list": "deny", "name": "10.0.0.0/99"}, "name"),
            ({"list": "maybe", "name": "10.0.0.1"}, "list"),
            ({"list": "deny", "name": "10.0.0.1", "note": "two\nlines"}, "note"),
        ):
            answer = await send_command(door.data_dir, "access-add", **fields)
            assert answer["error"].startswith(f"{field}: ")
        answer = await send_command(door.data_dir, "access-remove", list="deny", name="10.0.0.1")
        assert answer["error"] == "name: not on the deny list"
