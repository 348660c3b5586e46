"""What goes wrong at night is red in the console, a finding with a remedy, and an alert that fires: each trouble made.

The alert is judged by promtool on what the service exposed then; what each alert is for alone, test_alerts.py says.
"""

import json
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mediator.broker import Broker, wall_clock
from mediator.mailboxes.address import redact
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from tests.harness.app import App, app
from tests.harness.external import nats_server
from tests.harness.postgres import cluster
from tests.harness.service import free_port
from tests.harness.stores import migrated
from tests.harness.waiting import until
from tests.slow.test_alerts import RULES, promtool

HOUR = 3600 * 1000
BOX = "secret.orders"
GROUP = "night shift"
READER = "reader-" + "t0ken" * 4
OPERATORS = {"tokens": [{"name": "eve", "token": READER, "roles": ["read"]}]}

__all__ = ["promtool"]


async def nothing(_service: App) -> None:
    """Leave all as it is."""


async def fill_quota(service: App) -> None:
    await service.done("MAILBOX.CREATE", {"name": BOX})
    for _ in range(3):
        await service.done(f"MSG.SEND.{BOX}", b"x")
    assert (await service.ask(f"MSG.SEND.{BOX}", b"x"))["error"].startswith("quota_exceeded")


async def an_hour_ago(folder: Path, *, dead: bool) -> None:
    """Leave a message behind that was delivered for the last time, and another so, or one that its group never got."""
    with closing(SqliteStore(migrated(database_path(folder)))) as store:
        broker = Broker(store, Bounds(), clock=lambda: wall_clock() - HOUR)
        await broker.create(Create("default", BOX))
        request = Fetch("default", BOX, GROUP, Deliver.EARLIEST, ack_wait=1000, max_deliver=1, max_wait=0)
        for fetched in (True, dead):
            await broker.send(Send("default", BOX, Draft(b"x")))
            if fetched:
                await broker.fetch(request)
        await broker.close()


class Trouble(NamedTuple):
    """One that a night may bring."""

    alert: str
    says: str
    """A part of the finding."""
    link: str = ""
    make: Callable[[App], Awaitable[None]] = nothing
    before: Callable[[Path], Awaitable[None]] | None = None
    options: Mapping[str, Any] = MappingProxyType({})


TROUBLES = {
    "a tenant at its quota": Trouble(
        "MediatorQuotaNearlyFull",
        "A quota is used up, and what is above it is refused with quota_exceeded: tenant default 3 of 3 messages.",
        "/tenants/default",
        fill_quota,
        options={"quotas": {"tenant_messages": 3}},
    ),
    "a refused client": Trouble(
        "MediatorQuotaNearlyFull",
        "Clients were refused with quota_exceeded within",
        "/tenants/default",
        fill_quota,
        options={"quotas": {"tenant_messages": 3}},
    ),
    "a full mailbox": Trouble(
        "MediatorMailboxesFull",
        f"At the quota of a mailbox: 1 mailbox, to which each SEND is refused with quota_exceeded: {redact(BOX)} (id:1",
        "/mailboxes/default/id:1",
        fill_quota,
        options={"quotas": {"mailbox_messages": 3}},
    ),
    "a dead letter": Trouble(
        "MediatorDeadLetters",
        "Dead: 2 messages, each delivered as often as its group allows, without an ACK. Most are in "
        f"{redact(BOX)} (id:1, tenant default).",
        "/mailboxes/default/id:1/dead/night%20shift",
        before=lambda folder: an_hour_ago(folder, dead=True),
    ),
    "a lagging group": Trouble(
        "MediatorGroupsLagging",
        f"Lagging: 1 group, for which messages have waited for 10m or longer. Longest: group {GROUP} of "
        f"{redact(BOX)} (id:1, tenant default), since",
        "/mailboxes/default/id:1",
        before=lambda folder: an_hour_ago(folder, dead=False),
    ),
    "a lost PostgreSQL": Trouble("MediatorStoreLost", "store: "),
    "a lost NATS": Trouble("MediatorNatsDown", "nats: "),
    "an unreachable public URL": Trouble(
        "MediatorPublicUrlLost",
        "does not lead here: ",
        "/settings",
        options={"didcomm": {"public_url": f"http://127.0.0.1:{free_port()}"}},
    ),
}


@asynccontextmanager
async def service_in(trouble: str, folder: Path) -> AsyncIterator[App]:
    """Run a service that is in a trouble."""
    made = TROUBLES[trouble]
    if made.before is not None:
        await made.before(folder)
    if trouble == "a lost PostgreSQL":
        server = cluster()
        try:
            async with app(folder, operators=OPERATORS, database_url=server.url) as service:
                server.halt()
                yield service
                server.resume()
        finally:
            server.stop()
        return
    if trouble == "a lost NATS":
        async with (
            nats_server(folder.parent, "") as (port, process),
            app(folder, operators=OPERATORS, nats_url=f"nats://127.0.0.1:{port}") as service,
        ):
            process.kill()
            yield service
        return
    async with app(folder, operators=OPERATORS, **made.options) as service:
        await made.make(service)
        yield service


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_trouble_is_red_a_finding_and_an_alert(trouble: str, tmp_path: Path, promtool: str) -> None:
    expected = TROUBLES[trouble]
    folder = tmp_path / "data"
    folder.mkdir()
    async with service_in(trouble, folder) as service:

        async def find() -> dict[str, Any] | None:
            found = (await service.call("GET", "/api/v1/doctor?quick=true", token=READER)).json["findings"]
            of_it = [each for each in found if expected.says in each["text"] and each["level"] == "problem"]
            return of_it[0] if len(of_it) == 1 else None

        found = await until(find, what=trouble)
        assert found["advice"]
        assert found["link"].startswith(expected.link)
        page = await service.call("GET", "/console", token=READER)
        assert page.status == 200
        text = page.data.decode()
        assert 'class="state bad"' in text
        assert f'href="/console{found["link"]}"' in text
        assert BOX not in text, "who may not read payloads learns no address (A7)"
        if expected.link:
            assert (await service.call("GET", f"/console{expected.link}", token=READER)).status == 200
        metrics = (await service.call("GET", "/metrics")).data.decode()
        anonymous = await service.call("GET", "/api/v1/doctor?quick=true", token="")
        assert (anonymous.status, BOX in metrics) == (401, False)
    assert expected.alert in firing(promtool, metrics, tmp_path)


async def test_a_quiet_night_is_green_and_silent(tmp_path: Path, promtool: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    async with app(folder, operators=OPERATORS, quotas={"tenant_messages": 100}) as service:
        await service.done("MAILBOX.CREATE", {"name": BOX})
        await service.done(f"MSG.SEND.{BOX}", b"x")

        async def good() -> bool:
            return 'class="state good"' in (await service.call("GET", "/console", token=READER)).data.decode()

        await until(good)
        metrics = (await service.call("GET", "/metrics")).data.decode()
        assert "mediator_quota_used_ratio 0.01" in metrics
    assert firing(promtool, metrics, tmp_path) == set()


def firing(promtool: str, metrics: str, folder: Path) -> set[str]:
    """Return the alerts that fire when what was exposed stays as it is."""
    where = {"job": "mediator", "instance": "a"}
    series = [
        {"series": f"{sample.name}{json_labels({**sample.labels, **where})}", "values": f"{sample.value}x80"}
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    ]
    series.append({"series": f"up{json_labels(where)}", "values": "1x80"})
    test = {
        "interval": "30s",
        "input_series": series,
        "promql_expr_test": [{"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "39m"}],
    }
    file = folder / "night.yml"
    # JSON is YAML.
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [test]}))
    # None is expected, so it tells all that it got.
    told = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    return set(re.findall(r'alertname=\\?"(\w+)', told.stdout + told.stderr.partition("got:")[2]))


def json_labels(labels: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"
