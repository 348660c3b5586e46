"""Data directories that older versions of v0.1 left: this one migrates them and serves what was promised.

tests/data/v0.1/make.py made them, by running the older code and using it as clients do.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pickup.client import Holder, Sender, Wallet
from tests.harness.client import Client, payload_of
from tests.harness.didcomm_service import note, note_v2, texts
from tests.harness.service import Service, Services
from tests.harness.verified import verify_all
from tests.harness.waiting import until

DATA = Path(__file__).parent.parent / "data" / "v0.1"
URL = "http://127.0.0.1:18999"
"""Where the older service was reached; the proxy in front of it now leads to the port of the test's."""
RELEASED_WITHIN = 20.0


@dataclass(frozen=True, slots=True)
class Upgraded:
    """A service of this version on a directory of an older one."""

    service: Service
    folder: Path
    facts: dict[str, Any]

    def wallet(self, generation: str) -> Wallet:
        """Open the file of a wallet that the older service served."""
        path = self.folder / f"wallet-{generation}.json"
        path.write_text(path.read_text().replace(f'"{URL}/', f'"http://127.0.0.1:{self.service.http_port}/'))
        return Wallet.load(path)


@pytest.fixture(scope="module", params=[path.name.partition(".")[0] for path in sorted(DATA.glob("*.tar.xz"))])
def upgraded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgraded]:
    """The tests share it; each looks at other rows."""
    folder = tmp_path_factory.mktemp("older")
    shutil.unpack_archive(DATA / f"{request.param}.tar.xz", folder)
    services = Services(folder)
    service = services.new(data_dir=folder / "data")
    service.environment |= {"MEDIATOR_DIDCOMM__PUBLIC_URL": URL}
    try:
        asyncio.run(service.serve())
        yield Upgraded(service, folder, json.loads((folder / "facts.json").read_text()))
        assert service.complaints() == []
        service.discard()
        report = verify_all(service.data_dir)
        assert report.checks
        assert report.damage == []
    finally:
        services.close()


@pytest.fixture
async def client(upgraded: Upgraded, stack: AsyncExitStack) -> Client:
    """An agent's NATS client."""
    client = await Client.connect(upgraded.service.nats_url)
    stack.push_async_callback(client.close)
    return client


@pytest.mark.rule("A3", "A4", "A8", "F1", "F6", "S4")
async def test_stored_mail_and_positions_are_served_on(upgraded: Upgraded, client: Client):
    async def all_released() -> bool:
        stored = await client.query_all("orders")
        return any(payload_of(item) == b"due while the service was off" for item in stored)

    await until(all_released, RELEASED_WITHIN, "delayed mail that is due by now is released")
    stored = {payload_of(item): item for item in await client.query_all("orders")}
    lanes = ["critical order", "urgent order", "normal order", "low order"]
    rest = [b"price 2", bytes(range(256)), b"last", b"due while the service was off"]
    assert set(stored) == {lane.encode() for lane in lanes} | set(rest)
    assert stored[b"critical order"]["headers"] == {"shop": "Zürich"}
    assert (stored[b"price 2"]["key"], stored[b"price 2"]["tags"]) == ("price", ["news"])

    # One group had acknowledged the first two, the other had got them and acknowledged nothing.
    started = [payload_of(item) for item in (await client.fetch("orders", "begun", num_msgs=100)).messages]
    assert started[:2] == [b"critical order", b"urgent order"]
    gone_on = [payload_of(item) for item in (await client.fetch("orders", "position", num_msgs=100)).messages]
    assert gone_on == started[2:]
    assert sorted(started) == sorted(stored)

    # Of three leased jobs two were acknowledged; the lease of the other has ended since.
    jobs = (await client.fetch("jobs", "workers", num_msgs=100)).messages
    assert [payload_of(item) for item in jobs] == [b"job 1", b"job 3"]
    assert not (await client.ack("jobs", "workers", [item["msg_id"] for item in jobs])).error
    assert await client.query_all("jobs") == []

    sent = await client.send("orders", b"new")
    assert sent.body["msg_id"] > max(item["msg_id"] for item in stored.values()) >= upgraded.facts["newest"]
    taken = await client.create(name="orders")
    assert "exists" in taken.error


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.rule("D1", "D2", "D3", "D4", "D7")
async def test_an_older_wallet_picks_up_its_mail(upgraded: Upgraded, generation: str, stack: AsyncExitStack):
    url = f"http://127.0.0.1:{upgraded.service.http_port}/didcomm"
    holder = await stack.enter_async_context(Holder.resume(upgraded.wallet(generation)))
    sender, key = await stack.enter_async_context(Sender()), upgraded.facts["keys"][generation]
    assert (await holder.status()).count == 2
    routing = holder.link.routing
    for recipient, said in ((key, "to the old key"), (await holder.add_key(), "to a new key")):
        # Senders know the mediator by what the wallet told them then.
        if generation == "v1":
            await sender.send_v1(recipient, routing, url, note(said))
        else:
            await sender.send_v2(recipient, routing[0], url, note_v2(said))
    mails = await holder.fetch()
    assert await texts(holder, mails) == ["queued 1", "queued 2", "to the old key", "to a new key"]
    assert (await holder.received([mail.id for mail in mails])).count == 0
    # Asked again it is told the way that it was told before, or a newer one that works as well.
    grant = await holder.mediate()
    if generation == "v1":
        await sender.send_v1(key, grant.routing, url, note("granted"))
    else:
        await sender.send_v2(key, grant.routing[0], url, note_v2("granted"))
    assert await texts(holder, await holder.fetch()) == ["granted"]


@pytest.mark.rule("G1", "G3")
async def test_agents_are_found(client: Client):
    found = await client.ask("AGENT.DISCOVER", {"text": "French contracts"})
    assert [agent["name"] for agent in found.body["agents"]] == ["Translator"]
    assert not (await client.ask("AGENT.REPORT", {"name": "Translator", "status": "busy"})).error
