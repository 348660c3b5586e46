"""Alarms: since when a problem is there, what ended, what survives a restart, and who may see it."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import jsonschema
import pytest

from mediator.cli.service import alarm_lines
from mediator.operate.alarms import KEPT_MS, LOOK_SECONDS, MAX_ENDED, MAX_PRESENT, SAME_MS, Alarms
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.operations import ROLES, Actor, Operations
from mediator.store.opening import database_path
from tests.harness.clock import ManualClock
from tests.harness.console_site import HTML, console_site
from tests.harness.core import MINUTE, SECOND, Core, core

READER = Actor("eve", ROLES["read"], "token")


class Doctor:
    """Finds what a test says, and asks for the list as an operator does."""

    def __init__(self, inner: Core, clock: ManualClock) -> None:
        self.inner = inner
        self.clock = clock
        self.found: list[Finding] = []
        self.restart()

    def restart(self) -> None:
        self.alarms = Alarms(self.inner.broker, "i1", self.look)
        self.operations = Operations()
        self.operations.add_methods(self.alarms)

    async def look(self) -> list[Finding]:
        return self.found

    async def see(self, *found: Finding, after: int = LOOK_SECONDS * SECOND) -> None:
        self.clock.now += after
        self.found = list(found)
        await self.alarms.tick()

    async def list(self) -> tuple[list[tuple[float, str]], list[tuple[float, float, str]]]:
        answer = await self.operations.run(READER, "alarm-list", {"limit": 1000})
        jsonschema.validate(answer, self.operations.get("alarm-list").answer)
        assert all(each["ended_at"] is None for each in answer["present"])
        present = [(each["began_at"], each["text"]) for each in answer["present"]]
        return present, [(each["began_at"], each["ended_at"], each["text"]) for each in answer["ended"]]


def problem(text: str, code: str = "") -> Finding:
    return Finding(Level.PROBLEM, text, "Mend it.", "/cleanup", code)


@pytest.fixture
async def doctor(tmp_path: Path) -> AsyncIterator[Doctor]:
    clock = ManualClock()
    async with core(tmp_path, enabled=False) as inner:
        inner.broker.clock = clock
        yield Doctor(inner, clock)


async def test_an_alarm_keeps_its_first_time_and_its_last_text(doctor: Doctor) -> None:
    await doctor.see(problem("Dead: 1", "dead"), Finding(Level.NOTE, "a note"), Finding(Level.OK, "fine"))
    began = doctor.clock.now / 1000
    await doctor.see(problem("Dead: 2", "dead"), problem("without a code"))
    now = doctor.clock.now / 1000
    assert await doctor.list() == ([(now, "without a code"), (began, "Dead: 2")], [])
    await doctor.see()
    ended = doctor.clock.now / 1000
    present, past = await doctor.list()
    assert (present, sorted(past)) == ([], [(began, ended, "Dead: 2"), (now, ended, "without a code")])


async def test_the_command_shows_alarms_in_the_order_of_need(doctor: Doctor) -> None:
    await doctor.see(problem("first"))
    await doctor.see(problem("second"))
    answer = await doctor.operations.run(READER, "alarm-list", {})
    assert list(alarm_lines(answer)) == [
        "Now:",
        "  2026-01-01 00:01:00Z  second",
        "    Mend it.",
        "Ended:",
        "  2026-01-01 00:00:30Z to 2026-01-01 00:01:00Z  first",
    ]


async def test_a_problem_that_is_soon_back_is_the_same_alarm(doctor: Doctor) -> None:
    await doctor.see(problem("lag", "lag"))
    began = doctor.clock.now / 1000
    await doctor.see()
    await doctor.see(problem("lag", "lag"), after=SAME_MS - 1)
    assert await doctor.list() == ([(began, "lag")], [])
    await doctor.see()
    await doctor.see(problem("lag", "lag"), after=SAME_MS)
    present, past = await doctor.list()
    assert present == [(doctor.clock.now / 1000, "lag")]
    assert [start for start, _, _ in past] == [began]


async def test_alarms_survive_a_restart(doctor: Doctor) -> None:
    await doctor.see(problem("gone before", "a"))
    await doctor.see(problem("stays", "b"), problem("gone meanwhile", "c"))
    before = await doctor.list()
    doctor.restart()
    await doctor.alarms.open()
    assert await doctor.list() == before
    await doctor.see(problem("stays", "b"), after=10 * MINUTE)
    present, past = await doctor.list()
    assert present == [each for each in before[0] if each[1] == "stays"]
    assert [text for _, _, text in past] == ["gone meanwhile", "gone before"]
    assert past[0][1] == doctor.clock.now / 1000


async def test_what_ended_is_kept_for_a_week(doctor: Doctor) -> None:
    await doctor.see(problem("old", "a"))
    await doctor.see()
    await doctor.see(problem("new", "b"), after=KEPT_MS)
    assert [text for _, _, text in (await doctor.list())[1]] == ["old"]
    await doctor.see(after=SECOND)
    assert [text for _, _, text in (await doctor.list())[1]] == ["new"]
    assert doctor.inner.rows("alarm") == 1


async def test_alarms_are_bounded(doctor: Doctor) -> None:
    many = [problem(f"{number} {'x' * 1000}") for number in range(MAX_PRESENT + 1)]
    await doctor.see(*many)
    assert len((await doctor.list())[0]) == MAX_PRESENT
    for turn in range(MAX_ENDED // MAX_PRESENT + 2):
        await doctor.see(*[problem(f"{turn} {number}") for number in range(MAX_PRESENT)])
    assert len((await doctor.list())[1]) == MAX_ENDED
    assert doctor.inner.rows("alarm") <= MAX_ENDED + 2 * MAX_PRESENT


async def test_alarms_are_read_while_the_store_refuses(doctor: Doctor) -> None:
    path = database_path(doctor.inner.data_dir)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TRIGGER refuse BEFORE INSERT ON alarm BEGIN SELECT RAISE(ABORT, 'full'); END")
    await doctor.see(problem("store: lost", "check_store"))
    assert [text for _, text in (await doctor.list())[0]] == ["store: lost"]
    assert doctor.inner.rows("alarm") == 0
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TRIGGER refuse")
    await doctor.see(problem("store: lost", "check_store"))
    assert doctor.inner.rows("alarm") == 1


async def test_what_is_not_looked_for_while_the_store_is_lost_stays(doctor: Doctor) -> None:
    await doctor.see(problem("a group lags", "lag"))
    began = (await doctor.list())[0][0][0]
    for _ in range(20):
        await doctor.see(problem("store: lost", "check_store"))
    present, ended = await doctor.list()
    assert ([text for _, text in present], ended) == (["store: lost", "a group lags"], [])
    await doctor.see(problem("a group lags", "lag"))
    present, ended = await doctor.list()
    assert (present, [text for *_, text in ended]) == ([(began, "a group lags")], ["store: lost"])


async def test_the_page_shows_alarms_to_who_may_see_the_overview(tmp_path: Path) -> None:
    async with console_site(tmp_path) as site:
        found = [Finding(Level.PROBLEM, "Dead: <b>1</b>", "Run `mediator dead drop`.", "/cleanup", "dead_messages")]

        async def look() -> list[Finding]:
            return found

        site.host.add_doctor_check(look)
        await site.alarms.tick()
        for role in ROLES:
            site.role = role
            page = await site.read("/console/alarms")
            assert "Dead: &lt;b&gt;1&lt;/b&gt;" in page
            assert "<code>mediator dead drop</code>" in page
            assert 'href="/console/cleanup" aria-label' in page
            assert "No problem ended in the last week." in page
        found.clear()
        await site.alarms.tick()
        page = await site.read("/console/alarms")
        assert "No problems now." in page
        assert "Dead: &lt;b&gt;1&lt;/b&gt;" in page
        table = await (await site.get("/console/alarms?download=ended.json")).json()
        assert [each["text"] for each in table] == ["Dead: <b>1</b>"]
        asked = await site.session.get(site.server.make_url("/console/alarms"), headers=HTML, allow_redirects=False)
        assert (asked.status, asked.headers["Location"]) == (303, "/console/sign-in?next=/console/alarms")
