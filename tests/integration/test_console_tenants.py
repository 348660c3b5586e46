"""The console's pages of tenants: secrets that are shown once, quotas with their use, and who may change what."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse

from mediator.mailboxes.creating import Create
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.operate.operations import ROLES, Actor
from tests.harness.console_site import ConsoleSite, console_site

ACME = "/console/tenants/acme"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[ConsoleSite]:
    async with console_site(tmp_path) as made:
        yield made


async def secrets(answer: ClientResponse) -> list[str]:
    """Return the secrets on the page that answers a form."""
    text = await answer.text()
    assert answer.status == 200, text
    assert (answer.headers["Cache-Control"], "Set-Cookie" in answer.headers) == ("no-store", False)
    return [part.partition("</code>")[0] for part in text.split('class="secret">')[1:]]


def everything_below(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


async def done(site: ConsoleSite, operation: str, **fields: Any) -> str:
    """Run an operation by a form, and return the page that it leads to."""
    answer = await site.act(operation, back=fields.pop("back", ACME), **fields)
    assert answer.status == 303, await answer.text()
    return await site.read(answer.headers["Location"])


async def test_secrets_are_on_the_page_of_who_asked_and_nowhere_else(site: ConsoleSite, tmp_path: Path) -> None:
    made = await secrets(await site.act("tenant-add", tenant="acme", users="ann", tokens="shop", back=ACME))
    made += await secrets(await site.act("tenant-user-add", tenant="acme", user="bob", nkey="", back=ACME))
    made += await secrets(await site.act("tenant-token-add", tenant="acme", token="stock", back=ACME))
    made += await secrets(await site.act("tenant-rotate", tenant="acme", users="ann", grace_ms="3600000", back=ACME))
    made += await secrets(await site.act("tenant-rotate", tenant="acme", tokens="shop", grace_ms="0", back=ACME))
    assert len(set(made)) == 6
    pages = [await site.read(path) for path in (ACME, "/console/tenants")]
    assert "Former password valid until" in pages[0]
    kept = "".join(pages).encode() + await asyncio.to_thread(everything_below, tmp_path)
    assert not [secret for secret in made if secret.encode() in kept]


async def test_quotas_are_shown_with_their_use(site: ConsoleSite) -> None:
    await done(site, "tenant-add", tenant="acme", back="/console/tenants")
    page = await done(
        site, "tenant-set", tenant="acme", **{"quotas.messages": "4", "quotas.rate": "", "quotas.bytes": "0"}
    )
    assert 'name="quotas.messages" value="4"' in page
    assert 'name="quotas.bytes" value="0"' in page
    broker = site.host.broker
    await broker.create(Create("acme", "box"))
    await broker.send(Send("acme", "box", Draft(b"x")))
    assert 'value="1" aria-label="Messages: 1 of 4"' in await site.read("/console/tenants?prefix=ac")
    wrong = await done(site, "tenant-set", tenant="acme", **{"quotas.rate": "many"})
    assert "Not done: quotas.rate: expected integer or null" in wrong
    assert "acme" not in (await site.read("/console/tenants?prefix=b")).partition("<tbody")[2]


async def test_a_tenant_that_is_gone_takes_no_place_in_the_list(site: ConsoleSite) -> None:
    for name in ("aaa", "acme"):
        await site.act("tenant-add", tenant=name)
    await site.act("tenant-remove", tenant="aaa", delete_mail="true")
    answer = await site.host.operations.run(Actor("test", ROLES["read"], "token"), "tenant-list", {"limit": 1})
    assert ([tenant["name"] for tenant in answer["tenants"]], answer["more"]) == (["acme"], True)


async def test_a_tenant_is_removed_comes_back_and_loses_its_mail(site: ConsoleSite) -> None:
    await done(site, "tenant-add", tenant="acme")
    await site.host.broker.create(Create("acme", "box"))
    assert "Its mail is kept" in await done(site, "tenant-remove", tenant="acme")
    assert "Remove the tenant" in await done(site, "tenant-add", tenant="acme")
    gone = {"tenant": "acme", "delete_mail": "true", "done": "Deleted: $deleted.", "back": "/console/tenants"}
    assert "Deleted: 1." in await done(site, "tenant-remove", **gone)
    assert (await site.get(ACME)).status == 404


async def test_a_reader_sees_tenants_and_changes_none(site: ConsoleSite) -> None:
    await site.act("tenant-add", tenant="acme", users="ann")
    for role in ("read", "operate"):
        site.role = role
        for path in ("/console/tenants", ACME):
            assert 'method="post" action="/console/do' not in await site.read(path)
        assert "this needs the right admin" in await done(site, "tenant-user-add", tenant="acme", user="eve")


async def test_those_of_the_settings_cannot_be_changed(site: ConsoleSite) -> None:
    page = await site.read("/console/tenants/default")
    assert "Defined in the settings" in page
    assert 'action="/console/do' not in page
    page = await done(site, "tenant-set", tenant="default", back="/console/tenants/default")
    assert "Not done: tenant: default is in the settings" in page
