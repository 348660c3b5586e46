"""A tenant's life by clicks in a real browser: added, its secrets copied once, bounded, rotated, used and removed."""

from mediator.client import Client
from mediator.errors import LoginRefusedError
from tests.harness.browser import Tab, open_tab
from tests.harness.console_tour import SETTINGS, sign_in
from tests.harness.service import Service, Services
from tests.harness.waiting import until

SECRETS = "[...document.querySelectorAll('.secret')].map(each => each.innerText)"
ACME = "/console/tenants/acme"


async def send(tab: Tab, operation: str, **fields: str) -> None:
    """Fill in the form of an operation, the first on the page, and click its button."""
    form = f"""document.querySelector('form[action$="/do/{operation}"]')"""
    for name, value in fields.items():
        await tab.evaluate(f"{form}.elements[{name!r}].value = {value!r}")
    await tab.evaluate(f"{form}.closest('details')?.setAttribute('open', '')")
    await tab.evaluate(f"{form}.querySelector('button').click()")


async def shows(tab: Tab, text: str) -> bool:
    return text in await tab.evaluate("document.querySelector('main')?.innerText ?? ''")


async def secrets(tab: Tab) -> list[str]:
    await until(lambda: shows(tab, "Shown once"), what="the secrets are shown")
    found: list[str] = await tab.evaluate(SECRETS)
    return found


async def works(service: Service, password: str) -> bool:
    try:
        async with Client(service.nats_url, user="ann", password=password, patience=10) as client:
            await client.create("orders", exist_ok=True)
        return True
    except LoginRefusedError:
        return False


async def test_a_tenant_is_added_bounded_rotated_and_removed(services: Services) -> None:
    service = services.new()
    service.environment |= SETTINGS
    await service.serve()
    origin = f"http://127.0.0.1:{service.http_port}"
    async with open_tab() as tab:
        await tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        await sign_in(tab, origin)
        await tab.show(f"{origin}/console/tenants")
        await send(tab, "tenant-add", tenant="acme", users="ann", tokens="shop")
        first, token = await secrets(tab)
        await tab.evaluate("document.querySelector('[data-copy]').click()")
        await until(lambda: shows(tab, "Copied."), what="the password is copied")
        assert await tab.evaluate("navigator.clipboard.readText()") == first
        assert await works(service, first)
        # Loading again leads on: nothing is done twice, and no secret is shown twice.
        await tab.call("Page.reload")
        await until(lambda: shows(tab, "Add a tenant"), what="the list")
        assert not {first, token} & set((await tab.evaluate("document.body.innerText")).split())

        await tab.show(f"{origin}{ACME}")
        await send(tab, "tenant-set", **{"quotas.mailboxes": "1"})
        await until(lambda: shows(tab, "The quotas of acme are set."), what="a quota is set")
        assert await tab.evaluate("document.querySelector('meter').getAttribute('aria-label')") == "Mailboxes: 1 of 1"

        await send(tab, "tenant-rotate", grace_ms="3600000")
        (second,) = await secrets(tab)
        assert [await works(service, password) for password in (first, second)] == [True, True]

        await tab.evaluate("document.querySelector('[data-replace]').click()")
        await until(lambda: shows(tab, "Rotate all secrets"), what="the tenant's page")
        await send(tab, "tenant-remove")
        await until(lambda: shows(tab, "Tenant acme is removed"), what="it is removed")
        assert not await works(service, second)
        assert tab.complaints == []
    assert not any(secret in service.said() for secret in (first, second, token))
