"""What operators see of the use of connections, after real holders have used them."""

import os
from pathlib import Path
from typing import Any

from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.events import Event, EventType
from pickup import connection_use
from pickup.connection_use import ConnectionUses, client_family
from pickup.rules.records import ConnectionUse, Generation
from tests.harness.didcomm_service import note
from tests.harness.live import Live
from tests.harness.stores import ram_store
from tests.integration.test_didcomm_access import tell
from tests.integration.test_didcomm_bad_input import BOTH, Mediator, mediating

V1 = Generation.V1
COUNTS = ("queued", "delivered", "acknowledged")


async def shown(door: Mediator) -> dict[str, Any]:
    return await tell(door, "connections-show", connection=1)


@BOTH
async def test_each_connection_shows_how_it_is_used(tmp_path: Path, generation: Generation):
    key = os.urandom(32)
    async with mediating(tmp_path, key=key) as door:
        holder, name = await door.holder(generation)
        assert [(await shown(door))[count] for count in COUNTS] == [0, 0, 0]
        grant, sender = await holder.mediate(), await door.sender()
        for text in ("one", "two"):
            if generation is V1:
                await sender.send_v1(name, grant.routing, grant.endpoint, note(text))
            else:
                message = {"id": text, "type": "https://x.org/x/1.0/x", "body": {}}
                await sender.send_v2(name, grant.routing[0], grant.endpoint, message)
        mails = await holder.fetch()
        await holder.received([mails[0].id])
        after = await shown(door)
        assert [after[count] for count in COUNTS] == [2, 2, 1]
        assert after["queued_bytes"] == after["delivered_bytes"] > after["acknowledged_bytes"] > 0
        assert (after["transport"], after["pickup"]) == ("http", "2.0" if generation is V1 else "3.0")
        assert after["client"].startswith("Python/")
        async with Live.of(holder):
            live = await shown(door)
            assert (live["transport"], live["live"]) == ("ws", True)
        totals = await tell(door, "didcomm-stats")
        assert (totals["connections"], totals["counted"], totals["messages"]) == (1, 1, 1)
        assert totals["didcomm"] == {generation.value: 1}
        assert totals["queues"]["1-9"] == totals["seen"]["hour"] == totals["created"]["hour"] == 1
        assert sum(hour["queued"] for hour in totals["hours"]) == 2
    # They are kept over a restart.
    async with mediating(tmp_path, key=key) as door:
        assert [(await shown(door))[count] for count in COUNTS] == [2, 2, 1]
        listed = (await tell(door, "connections-list", limit=10))["connections"]
        assert [row["acknowledged"] for row in listed] == [1]


async def test_counts_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(connection_use, "MAX_KEPT", 2)
    broker = Broker(ram_store(), Bounds())
    uses = ConnectionUses(broker)
    uses.count(Event(EventType.STORED, 0, "default", number, size=5) for number in range(1, 5))
    uses.count([Event(EventType.STORED, 0, "default", 1, size=5)])
    for number in range(1, 5):
        uses.record(ConnectionUse(number, 1, transport="http"))
    kept = [uses.unwritten(number, number) for number in range(1, 5)]
    assert [use.traffic.queued for use in kept] == [2, 1, 0, 0]
    assert [use.transport for use in kept] == ["http", "http", "", ""]
    await broker.close()


def test_a_client_is_its_first_product():
    said = {
        "okhttp/4.12.0": "okhttp/4.12.0",
        "node-fetch/1.0 (+https://x)": "node-fetch/1.0",
        "Mozilla/5.0 (X11; Linux)": "Mozilla/5.0",
        "<script>": "",
        "": "",
        "a" * 100: "a" * 32,
    }
    assert {text: client_family(text) for text in said} == said
