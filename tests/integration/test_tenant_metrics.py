"""Metrics by tenant: what each does, holds and was refused; only where asked for, and for a bounded number."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mediator.mailboxes.address import redact
from mediator.mailboxes.events import Event, EventType
from mediator.metrics import Metrics, TenantMetrics
from mediator.store.writer import Committed
from tests.harness.app import ADA, BOB, TENANTS, App, app
from tests.harness.waiting import until


async def scrape(service: App) -> dict[tuple[str, ...], float]:
    """Return the series by tenant: the name behind the prefix, and the values of its labels in order of the labels."""
    text = (await service.call("GET", "/metrics", token=ADA)).data.decode()
    return {
        (
            sample.name.removeprefix("mediator_tenant_"),
            *(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("mediator_tenant_")
    }


async def test_each_tenant_is_counted_apart(tmp_path: Path) -> None:
    quotas = {"mailbox_messages": 2}
    async with app(tmp_path, tenants=TENANTS, metrics_per_tenant=10, quotas=quotas) as service:
        for user in ("ada", "bob"):
            await service.done("MAILBOX.CREATE", {"name": "orders"}, user)
            await service.done("MSG.SEND.orders", b"x" * 100, user)
        await service.done("MSG.SEND.orders", b"", "ada")
        assert "messages in the mailbox" in (await service.ask("MSG.SEND.orders", b"", "ada"))["error"]
        got = await service.done("MSG.FETCH.orders", {"group_name": "g", "deliver": "earliest"}, "ada")
        await service.done("MSG.ACK.orders", {"group_name": "g", "msg_id": got["messages"][-1]["msg_id"]}, "ada")
        found = await scrape(service)
        assert [found["messages_total", event, "acme"] for event in ("stored", "delivered")] == [2, 2]
        assert found["messages_total", "acknowledged", "acme"] > 0
        assert found["messages_total", "stored", "globex"] == 1
        assert ("messages_total", "delivered", "globex") not in found
        assert [found["stored_bytes_total", tenant] for tenant in ("acme", "globex")] == [100, 100]
        assert [found["quota_refused_total", tenant] for tenant in ("acme", "globex")] == [1, 0]


async def test_what_a_tenant_holds_is_measured(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        await service.done("MAILBOX.CREATE", {"name": "orders"})
        await service.done("MSG.SEND.orders", b"x" * 100)
        assert await scrape(service) == {}

    async def measured() -> bool:
        found = await scrape(service)
        return (found.get(("held_messages", "default")), found.get(("held_bytes", "default"))) == (1, 100)

    async with app(tmp_path, metrics_per_tenant=1) as service:
        await until(measured)


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    registry = Metrics().registry
    counts = TenantMetrics(registry, 2, ["default"])
    counts.committed(Committed(3, 0.1, [Event(EventType.STORED, 1, name, 1, size=10) for name in ("a", "b", "c", "a")]))
    counts.refused("d")
    named = {"tenant": "_others"}
    assert registry.get_sample_value("mediator_tenant_messages_total", {**named, "event": "stored"}) == 2
    assert registry.get_sample_value("mediator_tenant_stored_bytes_total", named) == 20
    assert registry.get_sample_value("mediator_tenant_quota_refused_total", named) == 1
    assert registry.get_sample_value("mediator_tenant_stored_bytes_total", {"tenant": "a"}) == 20


async def fill(service: App) -> None:
    """Give acme a mailbox with waiting, delayed, leased and dead messages."""
    await service.done("MAILBOX.CREATE", {"name": "secret.orders"}, "ada")
    for _ in range(3):
        await service.done("MSG.SEND.secret.orders", b"x", "ada")
    config = {"ack_wait_ms": 60_000, "num_msgs": 1}
    request = {"group_name": "hidden-group", "deliver": "earliest", "config": config}
    await service.done("MSG.FETCH.secret.orders", request, "ada")


async def metrics(service: App, token: str = "") -> str:
    return (await service.call("GET", "/metrics", token=token)).data.decode()


async def test_the_backlog_is_measured_without_being_asked_for(tmp_path: Path) -> None:
    async with app(tmp_path, tenants=TENANTS) as service:
        await fill(service)

        async def measured() -> bool:
            return "\nmediator_leased_messages 1.0\n" in await metrics(service)

        await until(measured, within=30)
        text = await metrics(service)
        assert "\nmediator_stored_messages 3.0\n" in text
        assert 'mediator_oldest_waiting_seconds{reader="group"}' in text
        assert "\nmediator_quota_used_ratio 0.0\n" in text


@pytest.mark.rule("A6", "A7")
async def test_who_scrapes_learns_no_names_unless_asked_for(tmp_path: Path) -> None:
    secrets = ("acme", "globex", "secret.orders", "hidden-group", redact("secret.orders"))
    async with app(tmp_path, tenants=TENANTS) as service:
        await fill(service)
    async with app(tmp_path, tenants=TENANTS) as service:
        await until(lambda: holds(service, "mediator_stored_messages 3.0"))
        for token in ("", ADA, BOB, service.local_token):
            text = await metrics(service, token)
            assert [secret for secret in (*secrets, "id:1") if secret in text] == []
    async with app(tmp_path, tenants=TENANTS, metrics_mailboxes=5) as service:
        await until(lambda: holds(service, 'mediator_mailbox_messages{mailbox="id:1"} 3.0'))
        text = await metrics(service)
        assert [secret for secret in secrets if secret in text] == []
    async with app(tmp_path, tenants=TENANTS, metrics_per_tenant=1) as service:
        await until(lambda: holds(service, 'mediator_tenant_held_messages{tenant="acme"} 3.0'))
        text = await metrics(service)
        assert [secret for secret in secrets[1:] if secret in text] == [], "the second tenant has no series"


async def holds(service: App, text: str) -> bool:
    return text in await metrics(service)
