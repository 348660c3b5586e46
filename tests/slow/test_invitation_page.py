"""The page of an invitation in a real browser: a phone reads its codes, buttons copy, in light and in dark."""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import zxingcpp

from tests.harness.browser import Tab, open_tab
from tests.harness.didcomm_service import Door
from tests.harness.waiting import until

CENTIMETRE = 96 / 2.54
"""CSS pixels."""
TAB_KEY, ENTER, SPACE = ("Tab", 9), ("Enter", 13, "\r"), (" ", 32, " ")
BUTTONS = ("short1", "short2", "did")
"""What the buttons copy that are not folded away."""
COPIES = "document.activeElement.dataset.copies ?? null"
SAID = "document.querySelector('[role=status]').textContent === document.activeElement.dataset.done"
INSERTED = """{
  document.body.insertAdjacentHTML("beforeend", "<p onclick='ran = 1' id='hole'></p>");
  const script = document.createElement("script");
  script.textContent = "ran = 2";
  document.body.append(script);
  document.querySelector("#hole").click();
}"""


@pytest.fixture
async def tab() -> AsyncIterator[Tab]:
    async with open_tab() as tab:
        yield tab


async def read(tab: Tab, png: bytes) -> str:
    [found] = zxingcpp.read_barcodes(await tab.grey(png), formats=zxingcpp.BarcodeFormat.QRCode)
    return str(found.text)


async def test_its_codes_are_read_at_three_centimetres(tab: Tab, door: Door) -> None:
    invites = await door.invite()
    for scheme in ("light", "dark"):
        await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await tab.show(invites.v1_short)
        ground = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
        pictures = [await tab.picture(f"section:nth-of-type({number}) .short", 3 * CENTIMETRE) for number in (1, 2)]
        await tab.evaluate('document.querySelectorAll("details").forEach(details => details.open = true)')
        pictures += [await tab.picture(f"section:nth-of-type({number}) .long") for number in (1, 2)]
        assert [await read(tab, picture) for picture in pictures] == [
            invites.v1_short,
            invites.v2_short,
            invites.v1,
            invites.v2,
        ]
    assert tab.complaints == []


async def test_each_button_copies_by_keyboard_what_it_says(tab: Tab, door: Door) -> None:
    url = (await door.invite()).v1_short
    await tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    await tab.show(url)
    copied = {}
    for key in (ENTER, SPACE, ENTER):
        while await tab.evaluate(COPIES) in (None, *copied):
            await tab.press(*TAB_KEY)
        await tab.press(*key)
        await until(lambda: tab.evaluate(SAID), what="the page says that it is copied")
        copied[await tab.evaluate(COPIES)] = await tab.evaluate("navigator.clipboard.readText()")
    assert copied == {name: await tab.evaluate(f"document.getElementById('{name}').textContent") for name in BUTTONS}
    assert copied["short1"] == url
    assert tab.complaints == []


async def test_buttons_copy_without_a_secure_context(tab: Tab, door: Door) -> None:
    """A page over http from another machine has no navigator.clipboard."""
    url = (await door.invite()).v1_short
    await tab.show(url)
    await tab.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    await tab.evaluate("document.querySelector('button').click()")
    assert (await tab.evaluate("document.querySelector('[role=status]').textContent")).startswith("Copied")
    assert await tab.evaluate("getSelection().toString()") == url


async def test_its_policy_lets_no_other_script_run(tab: Tab, door: Door) -> None:
    await tab.show((await door.invite()).v1_short)
    await tab.evaluate(INSERTED)
    assert await tab.evaluate("typeof ran") == "undefined"
    assert len([said for said in tab.complaints if "Content Security Policy" in said]) == 2


async def test_a_phone_opens_its_own_wallet(tab: Tab, door: Door) -> None:
    """First comes a link of the wallets' scheme, with the invitation inside; a desktop does not show it."""
    invites = await door.invite()
    shown = "[...document.querySelectorAll('.open a')].filter(link => link.offsetParent).map(link => link.href)"
    await tab.show(invites.v1_short)
    assert await tab.evaluate(shown) == []
    await tab.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
    await tab.call("Emulation.setTouchEmulationEnabled", enabled=True)
    await tab.show(invites.v1_short)
    assert await tab.evaluate(shown) == [f"didcomm://invite?{urlsplit(url).query}" for url in (invites.v1, invites.v2)]
    above = "document.querySelector('.open a').offsetTop < document.querySelector('img').offsetTop"
    assert await tab.evaluate(above)
    assert tab.complaints == []
