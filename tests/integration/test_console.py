"""The console over HTTP: who sees what, the forms that run operations, live pages, and what mailboxes are ranked by."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from aiohttp import ClientSession, CookieJar

from mediator.console import streams
from mediator.console.pages import Page, PageContent, PageRequest
from mediator.errors import SetupError
from mediator.host import Host
from mediator.http.health import Health
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Retention
from mediator.mailboxes.settling import Ack, Nack, nack
from mediator.operate import activity_history
from mediator.operate.activity import COLUMNS, Activity
from mediator.operate.activity_history import KEPT_RANGES, ActivityHistory
from mediator.operate.backlog import BacklogMeter
from mediator.operate.operations import ROLES, Actor, Operations, Right
from mediator.operate.run_history import RunHistory, RunOperations
from mediator.operate.runs import process_name
from mediator.store.base import Integrity, Transaction
from mediator.store.sqlite import SqliteStore
from pipeline.lake import REPORT
from pipeline.reports import ADDRESSES
from pipeline.service import PipelineOperations, PipelineScheduler, add_pages
from tests.harness.console_site import HTML, ConsoleSite, console_site, token
from tests.harness.core import PATIENCE, make_settings
from tests.harness.waiting import until

ADMIN = Actor("test", ROLES["admin"], "socket")
BOX = "/console/mailboxes/default/task"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[ConsoleSite]:
    async with console_site(tmp_path) as made:
        yield made


async def run(site: ConsoleSite, name: str, **fields: Any) -> dict[str, Any]:
    """Run an operation as the admin API would, and hold its answer against its schema."""
    answer = await site.host.operations.run(ADMIN, name, fields)
    jsonschema.validate(answer, site.host.operations.get(name).answer)
    return answer


async def test_people_are_led_to_the_console_and_programs_are_not(site: ConsoleSite) -> None:
    led = await site.session.get(site.server.make_url("/"), headers=HTML, allow_redirects=False)
    assert (led.status, led.headers["Location"]) == (302, "/console")
    program = await site.session.get(site.server.make_url("/"))
    assert (program.status, (await program.json())["code"]) == (404, "not_found")


async def test_who_has_not_signed_in_is_asked_to(site: ConsoleSite) -> None:
    for path in ("/console", BOX, "/console/live"):
        asked = await site.session.get(site.server.make_url(path), headers=HTML, allow_redirects=False)
        assert (asked.status, asked.headers["Location"]) == (303, f"/console/sign-in?next={path}")
    posted = await site.session.post(site.server.make_url("/console/do/mailbox-delete"), allow_redirects=False)
    assert posted.status == 303


async def test_pages_load_nothing_from_elsewhere(site: ConsoleSite) -> None:
    page = await site.get("/console")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = await page.text()
    assert "://" not in text.replace("http://www.w3.org", "")
    assert "<style" not in text
    for line in text.split('"'):
        if line.startswith("/console/static/"):
            found = await site.get(line)
            assert (found.status, "immutable" in found.headers["Cache-Control"]) == (200, True), line
    assert (await site.get("/console/static/../console.py")).status == 404
    assert (await site.get("/console/nowhere")).status == 404


async def test_no_answer_stays_in_caches(site: ConsoleSite) -> None:
    await site.core.create()
    paths = ("", "/history.json", "/cleanup.json", "/cleanup", "/sign-in", "/none", "/static/none", "/live")
    for path in paths:
        async with await site.get(f"/console{path}") as answer:
            kept = answer.headers.get("Cache-Control"), answer.headers.get("X-Content-Type-Options")
            assert kept == ("no-store", "nosniff"), path
    style = (await site.read("/console")).partition('rel="stylesheet" href="')[2].partition('"')[0]
    async with await site.get(style) as answer:
        assert "immutable" in answer.headers["Cache-Control"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_a_reader_sees_no_payload_and_changes_nothing(site: ConsoleSite) -> None:
    await site.core.create()
    await site.core.send(b"between us")
    site.role = "read"
    page = await site.read(BOX)
    assert "Send a test message" not in page
    assert f"{BOX}/messages/0" not in page
    assert (await site.get(f"{BOX}/messages/0")).status == 403
    answer = await site.act("message-send", mail_address="task", payload="x", back=BOX)
    assert "Not done: this needs the right operate" in await follow(site, answer)
    assert len(await site.core.shown()) == 1
    site.role = "read-payload"
    assert "between us" in await site.read(f"{BOX}/messages/0")


async def follow(site: ConsoleSite, answer: Any) -> str:
    """Return the page that a form leads to."""
    assert answer.status == 303
    return await site.read(answer.headers["Location"])


async def test_a_form_runs_an_operation_and_says_once_what_it_did(site: ConsoleSite) -> None:
    await site.core.create()
    answer = await site.act("message-send", mail_address="task", payload="hi", back=BOX, done="Sent as $msg_id. $x")
    assert "Sent as 0. $x" in await follow(site, answer)
    assert "Sent as 0" not in await site.read(BOX)
    assert [message.payload for message in await site.core.shown()] == [b"hi"]
    for back in ("https://example.com/", "//example.com", "/console\\x", "/console\nx"):
        answer = await site.act("message-send", mail_address="task", payload="hi", back=back)
        assert answer.headers["Location"] == "/console"


async def test_a_message_is_deleted_from_its_mailbox(site: ConsoleSite) -> None:
    await site.core.create()
    for text in (b"one", b"two"):
        await site.core.send(text)
    form = {"tenant": "default", "mail_address": "task", "msg_id": "0"}
    for path in (BOX, f"{BOX}/messages/0"):
        page = await site.read(path)
        assert "It is removed for all groups. This cannot be undone." in page
        assert all(f'name="{name}" value="{value}"' in page for name, value in form.items())
    page = await follow(site, await site.act("message-delete", **form, back=BOX, done="Message $msg_id is gone."))
    assert "Message 0 is gone." in page
    assert [message.payload for message in await site.core.shown()] == [b"two"]
    site.role = "read-payload"
    assert "message-delete" not in await site.read(f"{BOX}/messages/1") + await site.read(BOX)


async def test_a_form_of_another_site_is_refused(site: ConsoleSite) -> None:
    await site.core.create()
    url = site.server.make_url("/console/sign-in")
    origin = {"Origin": str(site.server.make_url("")).rstrip("/")}
    token = site.headers["Authorization"].partition(" ")[2]
    assert (await site.session.post(url, data={"token": token}, headers=origin, allow_redirects=False)).status == 303
    form = {"mail_address": "task", "back": BOX}
    url = site.server.make_url("/console/do/mailbox-delete")
    for wrong in ({}, {"csrf": "guessed"}):
        await site.session.post(url, data=form | wrong, headers=origin, allow_redirects=False)
        assert len((await run(site, "mailbox-list"))["mailboxes"]) == 1
    page = await (await site.session.get(site.server.make_url(BOX), headers=HTML)).text()
    csrf = page.partition('name="csrf" value="')[2].partition('"')[0]
    await site.session.post(url, data=form | {"csrf": csrf}, headers=origin, allow_redirects=False)
    assert (await run(site, "mailbox-list"))["mailboxes"] == []


async def test_what_senders_write_is_no_markup(site: ConsoleSite) -> None:
    await site.core.create(desc="<script>alert(1)</script>", tags=("<i>",))
    await site.core.send(b"<script>alert(2)</script>", key="<b>", tags=("<u>",), headers={"<h>": "<v>"})
    for path in ("/console/mailboxes?prefix=<q>", BOX, f"{BOX}/messages/0", f"{BOX}/dead/<group>", "/console/<p>"):
        page = await (await site.get(path)).text()
        for markup in ("<script>", "<b>", "<u>", "<h>", "<v>", "<q>", "<group>", "<p>alert"):
            assert markup not in page.replace("<p>", ""), path


async def test_a_part_brings_pages_of_its_own(tmp_path: Path) -> None:
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "echoes.html").write_text(
        '{% extends "console/base.html" %}{% block content %}<h1>Heard {{ text }}</h1>{% endblock %}'
    )

    async def show(page_request: PageRequest) -> PageContent:
        return {"text": page_request.text("text", "nothing")}

    def open_part(host: Host) -> None:
        page = Page("/echoes", "Echoes", show, "Sounds", right=Right.OPERATE)
        host.console.add_pages("echo", templates, page)
        with pytest.raises(SetupError, match="two parts bring pages named echo"):
            host.console.add_pages("echo", templates)

    async with console_site(tmp_path / "data", open_part) as site:
        page = await site.read("/console/echoes?text=<b>")
        assert "<h1>Heard &lt;b&gt;</h1>" in page
        assert page.index("Overview") < page.index("Sounds") < page.index("/console/echoes") < page.index("Audit log")
        site.role = "read"
        assert (await site.get("/console/echoes")).status == 403
        assert "Echoes" not in await site.read("/console")


async def test_the_whole_database_is_checked_once_at_a_time(site: ConsoleSite, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    threads: list[str] = []

    def find_damage(_self: SqliteStore, _seconds: float) -> Integrity:
        threads.append(threading.current_thread().name)
        assert go_on.wait(PATIENCE)
        return Integrity(["message: gone"])

    monkeypatch.setattr(SqliteStore, "find_damage", find_damage)
    asked = [asyncio.create_task(run(site, "installation")) for _ in range(20)]
    await until(lambda: threads)
    await site.core.create()
    asked[0].cancel()
    go_on.set()
    for answer in await asyncio.gather(*asked[1:], run(site, "installation")):
        assert any("message: gone" in each["text"] for each in answer["findings"])
    assert len(threads) == 1
    assert not threads[0].startswith("store-")


async def test_mailboxes_are_ranked(site: ConsoleSite) -> None:
    for address, count in (("a.one", 1), ("a.three", 3), ("b.two", 2)):
        await site.core.create(address, retention=Retention.UNTIL_ACK)
        for _ in range(count):
            await site.core.send(b"x" * (10 - count) ** 2, address)
    expected = {"address": ["a.one", "a.three"], "depth": ["a.three", "a.one"], "size": ["a.three", "a.one"]}
    for order, addresses in expected.items():
        found = await run(site, "mailbox-rank", prefix="a.", order=order)
        assert [each["mail_address"] for each in found["mailboxes"]] == addresses
        assert (found["looked_at"], found["complete"]) == (2, True)
    page = await site.read("/console/mailboxes?mailboxes.sort=oldest_at")
    assert page.index("a.one") < page.index("a.three") < page.index("b.two")
    found = await run(site, "mailbox-rank", order="depth", skip=1, limit=1)
    assert [each["mail_address"] for each in found["mailboxes"]] == ["b.two"]


async def test_mailboxes_are_ranked_by_their_rates(site: ConsoleSite, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("a.idle", "a.slow", "b.busy"):
        await site.core.create(address)
    await run(site, "mailbox-rank", order="rate")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10)
    for address in ("a.slow", "b.busy", "b.busy"):
        await site.core.send(to=address)
    found = await run(site, "mailbox-rank", order="rate", limit=2)
    assert [each["mail_address"] for each in found["mailboxes"]] == ["b.busy", "a.slow"]
    page = await site.read("/console/mailboxes?mailboxes.sort=-rate")
    assert page.index("b.busy") < page.index("a.slow") < page.index("a.idle")


@pytest.mark.rule("F6", "F7", "S4")
async def test_a_mailbox_is_listed_with_what_waits_in_it(site: ConsoleSite, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("task", "other"):
        await site.core.create(address, retention=Retention.UNTIL_ACK)
    for _ in range(6):
        await site.core.send()
    await site.core.send(delay=3_600_000)
    take = partial(Fetch, "default", "task", "g", Deliver.EARLIEST, max_wait=0)
    await site.core.broker.fetch(take(num_msgs=2, ack_wait=1000, max_deliver=1))
    site.core.clock.ahead += 1000
    await site.core.broker.fetch(take(num_msgs=2, ack_wait=60_000))
    given_back = Nack("default", "task", "g", [3], 60_000)
    await site.core.broker.write(lambda tx, now: nack(tx, given_back, now))
    [found] = (await run(site, "mailbox-rank", prefix="task"))["mailboxes"]
    assert [found[name] for name in ("messages", "ready", "leased", "delayed", "dead")] == [6, 2, 1, 2, 2]
    assert (found["rate"], found["rate_out"]) == (None, None)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10)
    await site.core.send()
    await site.core.broker.ack(Ack("default", "task", "g", [2]))
    [found] = (await run(site, "mailbox-rank", prefix="task"))["mailboxes"]
    assert (round(found["rate"], 2), round(found["rate_out"], 2)) == (0.1, 0.1)
    page = await site.read("/console/mailboxes")
    assert '<strong class="bad">2</strong>' in page
    assert page.index("In/s") < page.index("Out/s") < page.index("Oldest")


async def test_messages_are_listed_by_lane_and_page_by_page(site: ConsoleSite) -> None:
    await site.core.create()
    for number in range(6):
        await site.core.send(b"x", lane=Lane.URGENT if number % 2 else Lane.NORMAL, key=f"k{number}", tags=("t",))
    found = await run(site, "message-list", mail_address="task", limit=4)
    assert [each["msg_id"] for each in found["messages"]] == [5, 4, 3, 2]
    assert found["next"] == 2
    assert found["lanes"]["urgent"] == 3
    assert found["tags"] == [{"name": "t", "messages": 6}]
    found = await run(site, "message-list", mail_address="task", limit=4, before=2)
    assert ([each["msg_id"] for each in found["messages"]], found["next"]) == ([1, 0], None)
    found = await run(site, "message-list", mail_address="task", lane="urgent", limit=2)
    assert ([each["msg_id"] for each in found["messages"]], found["next"]) == ([5, 3], 3)
    found = await run(site, "message-list", mail_address="task", after=3)
    assert [each["msg_id"] for each in found["messages"]] == [5, 4]


async def test_delayed_messages_are_listed(site: ConsoleSite) -> None:
    await site.core.create()
    for delay in (90, 30):
        await run(site, "message-send", mail_address="task", payload="later", delay=delay, lane="low")
    found = await run(site, "delayed-list", mail_address="task", limit=1)
    assert ([each["lane"] for each in found["messages"]], found["complete"]) == (["low"], False)
    assert "Not yet visible" in await site.read(BOX)


async def test_activity_tells_what_was_done_and_is_stored(site: ConsoleSite) -> None:
    operations, metrics = Operations(), site.core.metrics
    activity = Activity(
        site.core.broker, BacklogMeter(site.core.broker, 10, 0), site.host.settings, Health(), metrics.registry, None
    )
    await activity.open(operations)
    site.core.broker.listen(metrics.committed)
    await site.core.create(retention=Retention.UNTIL_ACK)
    await site.core.send(b"x", lane=Lane.URGENT)
    metrics.requests.count("default", "SEND", "ok", 0.002)
    metrics.requests.count("default", "FETCH", "busy", 4.0)
    await activity.tick()
    answer = await operations.run(ADMIN, "activity", {})
    jsonschema.validate(answer, operations.get("activity").answer)
    sample = answer["instances"][0]["sample"]
    assert sample["incoming.urgent"] > sample["incoming.normal"] == 0
    assert sample["requests"] == 2 * sample["failed"] > 0
    assert 0.001 < sample["p50"] < sample["p99"] <= 0.0025
    assert answer["depth"] == {"messages": 1, "bytes": 1}
    assert answer["oldest"]["mail_address"] == "task"
    assert answer["storage"]["database"] > 0
    assert 'data-event="numbers"' in await site.read("/console")
    assert 'data-event="numbers"' not in await site.read("/console?flows.sort=-incoming"), "it would lose its order"
    columns = (await operations.run(ADMIN, "activity-history", {}))["columns"]
    assert {len(column) for column in columns.values()} == {1}
    await until(lambda: shows(site, "/console/history", "<time"), what="the first sample is shown")


async def test_a_day_and_a_week_survive_a_restart(tmp_path: Path) -> None:
    start = 1_800_000_000
    async with console_site(tmp_path) as site:
        kept = ActivityHistory(site.core.broker, site.host.settings.instance)
        for second in range(0, 1800, 10):
            # The service was off for the second ten minutes.
            if not 600 <= second < 1200:
                await kept.add(sample_of(start + second, second / 10))
    async with console_site(tmp_path) as site:
        kept = ActivityHistory(site.core.broker, site.host.settings.instance)
        day = await kept.read(KEPT_RANGES["day"], start + 1800, ("at", *COLUMNS))
        assert [(each["at"], each["requests"]) for each in day[:2]] == [(start + 60, 2.5), (start + 120, 8.5)]
        gap = [(each["at"], each["requests"]) for each in day[9:12]]
        assert gap == [(start + 600, 56.5), (start + 660, None), (start + 1260, 122.5)]
        assert (day[0]["failed"], day[0]["p99"]) == (0, None)
        week = await kept.read(KEPT_RANGES["week"], start + 1800, ("at", *COLUMNS))
        assert [(each["at"], each["requests"]) for each in week] == [(start + 600, 29.5)]
        answer = await run(site, "activity-history", range="day")
        assert (answer["step"], answer["seconds"], answer["columns"]["at"][0]) == (60, 86_400, start + 60)
        for each in ("hour", "day", "week"):
            assert f"The last {each} of this instance" in await site.read(f"/console?range={each}")
            assert f"The last {each} as a table" in await site.read(f"/console/history?range={each}")
        for path in ("/console", "/console/history", "/console/history.json"):
            assert (await site.get(f"{path}?range=year")).status == 400


async def test_samples_are_taken_while_the_store_hangs(site: ConsoleSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_history, "WAIT_SECONDS", 0.01)
    kept, start = ActivityHistory(site.core.broker, "i1"), 1_800_000_000
    hangs, go_on = threading.Event(), threading.Event()

    def hang(_tx: Transaction, _now: int) -> None:
        hangs.set()
        assert go_on.wait(PATIENCE)

    hanging = asyncio.create_task(site.core.broker.write_background(hang))
    try:
        assert await asyncio.to_thread(hangs.wait, PATIENCE)
        for minute in range(3):
            await kept.add(sample_of(start + 60 * minute, 1))
        assert not hanging.done()
    finally:
        go_on.set()
    await hanging
    await site.core.broker.wait_committed()

    async def both() -> bool:
        return len(await kept.read(KEPT_RANGES["day"], start + 180, ("at", *COLUMNS))) == 2

    await until(both, what="the rows are kept once the store works again")


def sample_of(at: float, requests: float) -> dict[str, float | None]:
    return {**dict.fromkeys(COLUMNS, 0.0), "p50": None, "p99": None, "requests": requests, "at": at}


async def test_the_page_of_the_clean_up_tells_what_went(site: ConsoleSite) -> None:
    await site.core.create()
    await site.core.send(ttl=1000)
    site.core.clock.ahead = 60_000
    await until(lambda: shows(site, "/console/cleanup", "messages 1"), what="the clean-up is told of")
    plot = await (await site.get("/console/cleanup.json")).json()
    assert sum(plot["columns"]["messages"]) == 1
    assert len(plot["columns"]["seconds"]) == plot["kept"] == 48
    await run(site, "cleanup-history", limit=5)
    await run(site, "cleanup-hours")
    await run(site, "job-list")


async def test_the_pages_of_the_pipeline_show_runs_and_the_report(tmp_path: Path) -> None:
    report = tmp_path / "lake" / REPORT
    report.parent.mkdir()

    def open_part(host: Host) -> None:
        book = RunHistory(host.broker, host.settings.instance, host.metrics)
        host.operations.add_methods(RunOperations(book, 0))
        scheduler = PipelineScheduler(book, host.broker, host.settings)
        host.operations.add_methods(PipelineOperations(scheduler, report, 0))
        add_pages(host.console, report)

    async with console_site(tmp_path, open_part) as site:
        assert (await site.get("/console/pipeline/report")).status == 404
        no = (await site.core.ask("run-begin", name="ingest", process=process_name()))["run"]
        await site.core.ask("run-end", run=no, outcome="failed", numbers={"events": 7}, error_text="no room")
        report.write_text("<script>alert(1)</script>")
        for path in ("/console/pipeline", f"/console/pipeline/runs/{no}"):
            text = await site.read(path)
            assert "no room" in text
            assert "events" in text
        await run(site, "pipeline-state")
        await run(site, "run-show", run=no)
        report.write_text(f"<p>{ADDRESSES}")
        site.role = "read"
        assert (await site.get("/console/pipeline/report")).status == 403
        report.write_text("<script>alert(1)</script>")
        shown = await site.get("/console/pipeline/report")
        assert (shown.status, await shown.text()) == (200, "<script>alert(1)</script>")
        policy = shown.headers["Content-Security-Policy"]
        assert policy.startswith("sandbox; default-src 'none'")
        assert "allow-" not in policy
        assert "script" not in policy
        site.role = "read"
        assert "Run ingest now" not in await site.read("/console/pipeline")
        assert (await site.get(f"/console/pipeline/runs/{no + 1}")).status == 404


async def shows(site: ConsoleSite, path: str, text: str) -> bool:
    return text in await site.read(path)


async def test_instances_hear_of_each_other(tmp_path: Path, site: ConsoleSite) -> None:
    wire = Wire()
    answers = []
    for name in ("one", "two"):
        settings = make_settings(data_dir=tmp_path, instance=name)
        operations = Operations()
        activity = Activity(
            site.core.broker,
            BacklogMeter(site.core.broker, 10, 0),
            settings,
            Health(),
            site.core.metrics.registry,
            wire,
        )
        await activity.open(operations)
        await activity.tick()
        answers.append((operations, activity))
    await answers[0][1].tick()
    for operations, _ in answers:
        found = (await operations.run(ADMIN, "activity", {}))["instances"]
        assert sorted(each["instance"] for each in found) == ["one", "two"]


class Wire:
    """Passes on what instances announce, to each of them."""

    def __init__(self) -> None:
        self.listening: list[Callable[[bytes], None]] = []

    async def publish(self, data: bytes) -> None:
        for heard in self.listening:
            heard(data)

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        self.listening.append(heard)


async def events(response: Any) -> AsyncIterator[bytes]:
    buffer = b""
    while data := await response.content.readany():
        buffer += data
        while b"\n\n" in buffer:
            one, _, buffer = buffer.partition(b"\n\n")
            yield one


async def test_a_page_follows_a_mailbox(site: ConsoleSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.console.mailbox_pages.FOLLOW_SECONDS", 0.0)
    await site.core.create()
    await site.core.send(b"before")
    response = await site.get(f"{BOX}/live?after=0")
    assert response.headers["Content-Type"].startswith("text/event-stream")
    seen = events(response)
    assert await anext(seen) == b":"
    await site.core.send(b"secret", key="k1")
    first = await anext(one async for one in seen if one != b":")
    assert first.startswith(b"event: messages\nid: 1\n")
    assert b"k1" in first
    assert b"secret" not in first
    await site.core.send(b"x", key="k2")
    second = await anext(one async for one in seen if one != b":")
    assert b"k2" in second
    assert b"k1" not in second
    response.close()
    again = await site.get(f"{BOX}/live?after=0", headers={"Last-Event-ID": "1"})
    third = await anext(one async for one in events(again) if one != b":")
    assert (b"k2" in third, b"k1" in third) == (True, False)
    again.close()


async def test_live_pages_end_with_the_session(site: ConsoleSite) -> None:
    await site.core.create()
    site.host.access.ended.on_change = site.host.console.streams.end_forbidden
    async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser:
        origin, bearer = str(site.server.make_url("")).rstrip("/"), await site.get("/console/live")
        await browser.post(f"{origin}/console/sign-in", data={"token": token("read")}, headers={"Origin": origin})
        page = await (await browser.get(f"{origin}/console", headers=HTML)).text()
        live = [await browser.get(f"{origin}{path}") for path in ("/console/live", f"{BOX}/live")]
        csrf = page.partition('name="csrf" value="')[2].partition('"')[0]
        await browser.post(f"{origin}/console/sign-out", data={"csrf": csrf}, headers={"Origin": origin})
        async with asyncio.timeout(PATIENCE):
            for each in live:
                await each.content.read()
    assert not bearer.content.at_eof(), "of somebody else"
    bearer.close()


@pytest.mark.parametrize("roles", [None, ["operate"]], ids=["removed", "another role"])
async def test_live_pages_end_with_the_right(
    site: ConsoleSite, roles: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mediator.console.mailbox_pages.FOLLOW_SECONDS", 0.0)
    await site.core.create()
    site.role = "read"
    live = await site.get(f"{BOX}/live?after=0")
    assert await anext(events(live)) == b":"
    others = [{"name": "admin", "token": token("admin"), "roles": ["admin"]}]
    changed = [{"name": "read", "token": token("read"), "roles": roles}] if roles else []
    site.host.access.apply_settings(make_settings(data_dir=site.core.data_dir, operators={"tokens": others + changed}))
    # Before anybody ends them: nothing more is written.
    await site.core.send()
    async with asyncio.timeout(PATIENCE):
        assert b"event" not in await live.content.read()


async def test_one_user_does_not_take_all_live_pages(site: ConsoleSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_PER_USER", 2)
    site.role = "read"
    open_pages = [await site.get("/console/live") for _ in range(2)]
    refused = await site.get("/console/live")
    assert (refused.status, "you follow 2 pages live already" in await refused.text()) == (503, True)
    site.role = "operate"
    open_pages.append(await site.get("/console/live"))
    assert [page.status for page in open_pages] == [200] * 3
    for page in open_pages:
        page.close()


async def test_live_pages_are_few(site: ConsoleSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 1)
    first = await site.get("/console/live")
    assert (await site.get("/console/live")).status == 503
    first.close()

    async def admitted() -> bool:
        async with asyncio.timeout(30):
            response = await site.get("/console/live")
            response.close()
            return response.status == 200

    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    await until(admitted, what="there is room for another")


async def test_tables_are_files_for_those_who_may_see_them(site: ConsoleSite) -> None:
    await site.core.create()
    for number in range(60):
        await site.core.send(b"x", key=f"=key{number}", lane=Lane.URGENT if number % 2 else Lane.NORMAL)
    site.role = "read-payload"
    page = await site.read(f"{BOX}?messages.sort=msg_id")
    assert page.index("/messages/0") < page.index("/messages/49")
    assert "/messages/50" not in page
    assert f'href="{BOX}?messages.sort=msg_id&amp;messages.skip=50#messages"' in page
    wanted = f"{BOX}?messages.filter=urgent&download=messages.csv"
    answer = await site.get(wanted)
    lines = (await answer.text()).splitlines()
    assert (answer.content_type, len(lines), lines[0]) == (
        "text/csv",
        31,
        "msg_id,lane,created_at,size,key,tags,expire_at",
    )
    assert lines[1].startswith("59,urgent,")
    assert "'=key59" in lines[1]
    assert answer.headers["Cache-Control"] == "no-store"
    site.role = "read"
    assert "key59" not in await (await site.get(wanted)).text()
    assert "key59" not in await (await site.get(f"{BOX}?download=messages.json")).text()
    assert (await site.get(f"{BOX}?messages.sort=key")).status == 400
    assert (await site.get(f"{BOX}?messages.skip=-1")).status == 400
    dead = f"{BOX}/dead/a%3Fb%2Fc"
    assert f'href="{dead}?dead.sort=-size#dead"' in await site.read(dead)
    anonymous = await site.session.get(site.server.make_url(wanted), headers=HTML, allow_redirects=False)
    assert anonymous.status == 303
