"""The console in a real browser: every page on a desktop and a phone, in light and dark, by keyboard, and live."""

from collections.abc import AsyncIterator

import pytest

from mediator.client import Client
from tests.harness.browser import Tab, open_tab
from tests.harness.console_tour import (
    BOX,
    DESKTOP,
    PAGES,
    PHONE,
    at,
    embedded,
    examine,
    fill,
    resize,
    run_tasks,
    settings,
    sign_in,
    walk,
    wallets,
)
from tests.harness.service import Service, Services
from tests.harness.waiting import until

TEXT = "document.querySelector('main')?.innerText ?? ''"
NUMBERS = "[...document.querySelectorAll('[data-event=messages] th')].map(each => Number(each.innerText))"
ENTER = ("Enter", 13, "\r")


@pytest.fixture
async def tab() -> AsyncIterator[Tab]:
    async with open_tab() as tab:
        yield tab


@pytest.fixture
async def service(services: Services) -> AsyncIterator[Service]:
    made = services.new()
    made.environment |= settings(made)
    await made.serve()
    await fill(made)
    async with wallets(made):
        yield made


def origin(service: Service) -> str:
    return f"http://127.0.0.1:{service.http_port}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_page_is_good_on_desktop_and_phone(tab: Tab, service: Service, scheme: str) -> None:
    await run_tasks(service)
    await resize(tab, DESKTOP, scheme)
    await sign_in(tab, origin(service))
    found = {}
    for width in (DESKTOP, PHONE):
        await resize(tab, width, scheme)
        for name, path in PAGES.items():
            tab.complaints.clear()
            if wrong := await examine(tab, f"{origin(service)}{path}"):
                found[name, width] = wrong
            if complaints := [each for each in tab.complaints if "404" not in each or name != "nothing"]:
                found[name, width, "console"] = complaints
    assert found == {}
    assert service.complaints() == []


async def test_the_keyboard_reaches_everything(tab: Tab, service: Service) -> None:
    await run_tasks(service)
    await resize(tab, DESKTOP)
    await sign_in(tab, origin(service))
    found = {}
    for name, path in PAGES.items():
        await tab.show(f"{origin(service)}{path}")
        if wrong := await walk(tab):
            found[name] = wrong
    assert found == {}


async def test_dead_messages_are_dropped_by_keyboard(tab: Tab, service: Service) -> None:
    await sign_in(tab, origin(service))
    await until(lambda: dead(tab, service), what="messages are dead")
    await tab.evaluate("document.querySelectorAll('details.confirm summary')[1].focus()")
    await tab.press(*ENTER)
    await tab.press("Tab", 9)
    assert await tab.evaluate("document.activeElement.innerText") == "Drop all"
    await tab.press(*ENTER)
    await until(lambda: shows(tab, "Messages dropped:"), what="the page says what was done")
    assert await shows(tab, "No dead messages.")
    assert tab.complaints == []


async def dead(tab: Tab, service: Service) -> bool:
    await tab.show(f"{origin(service)}{PAGES['dead']}")
    return await shows(tab, "Redrive all")


async def shows(tab: Tab, text: str) -> bool:
    return text in await tab.evaluate(TEXT)


async def test_a_search_leads_to_a_mailbox_and_a_message_is_sent(tab: Tab, service: Service) -> None:
    await sign_in(tab, origin(service))
    await tab.show(f"{origin(service)}/console/mailboxes")
    await tab.evaluate("document.querySelector('#prefix').focus()")
    await tab.call("Input.insertText", text="orders.")
    await until(lambda: finds(tab, ["orders.eu", "orders.us"]), what="the search found two")
    assert await tab.evaluate("location.search") == "?prefix=orders.&tenant=&mailboxes.sort=-messages"
    await tab.evaluate("document.querySelector('#found tbody th a').click()")
    await until(lambda: shows(tab, "Mailbox of tenant default"), what="the mailbox is shown")
    await tab.evaluate("document.querySelector('#payload').value = 'from the console'")
    await tab.evaluate("document.querySelector('#payload').form.requestSubmit()")
    await until(lambda: shows(tab, "Sent as message"), what="it is sent")
    number = (await tab.evaluate(NUMBERS))[0]
    await tab.show(f"{origin(service)}{BOX}/messages/{number}")
    assert await shows(tab, "from the console")
    await tab.evaluate("document.querySelector('details.confirm summary').click()")
    await tab.evaluate("document.querySelector('details.confirm button').click()")
    await until(lambda: shows(tab, f"Message {number} is deleted."), what="it is deleted")
    assert number not in await tab.evaluate(NUMBERS)
    assert tab.complaints == []


async def finds(tab: Tab, addresses: list[str]) -> bool:
    found = await tab.evaluate("[...document.querySelectorAll('#found th .address')].map(each => each.innerText)")
    return bool(sorted(found) == addresses)


async def test_a_search_by_meaning_says_why(tab: Tab, services: Services) -> None:
    service = services.new(semantic=True)
    service.environment |= settings(service)
    await service.serve()
    async with Client(service.nats_url) as client:
        for name, does in (("Gauge", "Warns before floods"), ("Baker", "Bakes rye bread")):
            skills = [{"id": name.lower(), "name": f"{name} skill"}]
            await client.register({"name": name, "mailbox": f"x.{name.lower()}", "description": does, "skills": skills})
    await until(lambda: embedded(service), what="the agents are found by meaning")
    await sign_in(tab, origin(service))
    for width in (DESKTOP, PHONE):
        await resize(tab, width, "dark")
        assert await examine(tab, f"{origin(service)}/console/agents?by=words&request=the+river+rises") == []
    await tab.evaluate("document.querySelector('#by').value = 'meaning'")
    await tab.evaluate("document.querySelector('#by').dispatchEvent(new Event('change', {bubbles: true}))")
    await until(lambda: shows(tab, "skill Gauge skill"), what="the search says which skill is nearest")
    assert await tab.evaluate("document.querySelector('#agent-1').innerText") == "1. Gauge"
    assert await examine(tab, await tab.evaluate("location.href")) == []
    await tab.evaluate("document.querySelector('#agent-1').click()")
    await until(lambda: at(tab, "/console/agents/default/id:1"), what="the agent is shown")
    await tab.evaluate("document.querySelector('details.confirm summary').focus()")
    await tab.press(*ENTER)
    await tab.press("Tab", 9)
    assert await tab.evaluate("document.activeElement.innerText") == "Unregister"
    await tab.press(*ENTER)
    await until(lambda: shows(tab, "Agent x.gauge is unregistered."), what="it is unregistered")
    assert tab.complaints == []
    assert service.complaints() == []


async def test_an_invitation_is_made_and_the_door_tried(tab: Tab, service: Service) -> None:
    await sign_in(tab, origin(service))
    await tab.show(f"{origin(service)}/console/invitations")
    await tab.evaluate("document.querySelector('#label').value = 'For Ann'")
    await tab.evaluate("document.querySelector('#label').form.requestSubmit()")
    await until(lambda: shows(tab, "Invitation created."), what="the invitation is shown")
    assert await shows(tab, "Invitation: For Ann")
    assert await tab.evaluate("[...document.images].every(each => each.complete && each.naturalWidth > 100)")
    await tab.evaluate("document.querySelector('[data-copy=v1_short_url]').click()")
    said = "document.querySelector('[data-copied]').textContent"
    assert await until(lambda: tab.evaluate(said), what="it is copied or selected")
    await tab.show(f"{origin(service)}/console/try")
    await tab.evaluate("document.querySelector('main form button').focus()")
    await tab.press(*ENTER)
    await until(lambda: shows(tab, "It works: 8 steps"), what="the door was tried")
    assert tab.complaints == []


async def test_messages_appear_as_they_come(tab: Tab, service: Service) -> None:
    await sign_in(tab, origin(service))
    await tab.show(f"{origin(service)}/console/mailboxes/default/logs.audit")
    await until(lambda: shows(tab, "Live."), what="the page is live")
    before = await tab.evaluate(NUMBERS)
    async with Client(service.nats_url) as client:
        for _ in range(25):
            await client.mailbox("logs.audit").send(b"x")
    expected = [*range(before[0] + 25, before[0], -1), *before]
    await until(lambda: has(tab, expected), what="the messages appear, each once and in order")
    assert tab.complaints == []


async def has(tab: Tab, numbers: list[int]) -> bool:
    return bool(await tab.evaluate(NUMBERS) == numbers)


async def test_a_page_says_when_the_service_is_gone(tab: Tab, service: Service) -> None:
    await sign_in(tab, origin(service))
    await tab.show(f"{origin(service)}{BOX}")
    await until(lambda: shows(tab, "Live."), what="the page is live")
    grey = "document.body.classList.contains('stale')"
    assert not await tab.evaluate(grey)
    # A proxy in front answers for a service that is gone.
    for event, status, stale in (("responseError", 502, True), ("afterOnLoad", 502, True), ("afterOnLoad", 200, False)):
        detail = f"{{detail: {{xhr: {{status: {status}}}}}}}"
        await tab.evaluate(f"document.dispatchEvent(new CustomEvent('htmx:{event}', {detail}))")
        assert await tab.evaluate(grey) is stale
    await service.kill()
    await until(lambda: shows(tab, "The service does not answer since"), what="the page says so")
    assert await tab.evaluate(grey)
    await service.serve()
    await until(lambda: shows(tab, "Live."), what="the page is live again", within=30)
    assert not await tab.evaluate(grey)
    assert not await shows(tab, "does not answer")


async def test_selected_messages_are_moved_by_the_mouse(tab: Tab, service: Service) -> None:
    await sign_in(tab, origin(service))
    await tab.show(f"{origin(service)}{BOX}")
    before = len(await tab.evaluate(NUMBERS))
    await tab.evaluate("document.querySelector('#messages [data-all]').click()")
    assert await tab.evaluate("document.querySelectorAll('#messages tbody :checked').length") == before
    await tab.evaluate("document.querySelector('#messages [data-all]').click()")
    for place in (0, 1):
        await tab.evaluate(f"document.querySelectorAll('#messages tbody [type=checkbox]')[{place}].click()")
    await tab.evaluate("document.querySelector('#to-address').value = 'billing.invoices'")
    await tab.evaluate("document.querySelector('#messages-selected button[formaction$=message-move]').click()")
    await until(lambda: shows(tab, "Messages moved: 2."), what="they are moved")
    left = f"document.readyState === 'complete' && {NUMBERS}.length"
    await until(lambda: tab.evaluate(left), what="the page is there")
    assert await tab.evaluate(left) == before - 2
    assert tab.complaints == []


async def test_what_is_typed_into_a_filter_is_not_taken_away(tab: Tab, services: Services) -> None:
    service = services.new()
    service.environment |= settings(service)
    await service.serve()
    async with Client(service.nats_url) as client:
        await client.create("box")
        for number in range(11):
            await client.mailbox("box").fetch(group=f"group{number}")
    await sign_in(tab, origin(service))
    await tab.show(f"{origin(service)}/console/mailboxes/default/box")
    await tab.evaluate("window.filter = document.querySelector('[name=\"groups.filter\"]'); filter.focus()")
    await tab.call("Input.insertText", text="group1")
    # As every ten seconds.
    ask = "htmx.ajax('GET', location.href, {source: '#state', target: '#state', select: '#state', swap: 'outerHTML'})"
    await tab.evaluate(ask)
    assert await tab.evaluate("filter.isConnected && document.activeElement === filter && filter.value") == "group1"
    await tab.evaluate("filter.blur()")
    await tab.evaluate(ask)
    await until(lambda: tab.evaluate("!filter.isConnected"), what="the part is asked for again")
    assert tab.complaints == []


async def test_the_overview_draws_the_last_hour_and_goes_on(tab: Tab, service: Service) -> None:
    await sign_in(tab, origin(service))
    drawn = await until(lambda: tab.evaluate("document.querySelectorAll('.plot canvas').length"), what="plots")
    assert drawn == 6
    await until(lambda: shows(tab, "Live."), what="the page is live")
    # The first sample came before all the mail; a live page shows the next one by itself.
    await until(lambda: tab.evaluate("document.querySelector('.facts dd').innerText !== '0'"), what="a sample")
    assert tab.complaints == []


async def test_a_reader_is_offered_no_act_and_signs_out(tab: Tab, service: Service) -> None:
    await sign_in(tab, origin(service), "ben")
    await tab.show(f"{origin(service)}{BOX}")
    assert await tab.evaluate("document.querySelectorAll('main form[method=post]').length") == 0
    assert await tab.evaluate("document.querySelectorAll('[data-event=messages] a').length") == 0
    await tab.evaluate("document.querySelector('header form').requestSubmit()")
    await until(lambda: at(tab, "/console/sign-in"), what="signed out")
    await tab.show(f"{origin(service)}{BOX}")
    assert await at(tab, "/console/sign-in")
