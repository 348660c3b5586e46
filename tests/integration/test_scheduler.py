"""The scheduler over a real SQLite store: delayed mail on time, clean-up beside senders, and the clock that jumps."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from mediator.broker import Broker, wall_clock
from mediator.errors import UnavailableError
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.message import HIDDEN_ID, Draft, Filter
from mediator.mailboxes.querying import Query
from mediator.mailboxes.sending import Send
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from pickup.rules.tables import MediationTransaction
from tests.harness.clock import ShiftedClock
from tests.harness.core import BOX, HOUR, MINUTE, SECOND, TENANT, Core, core
from tests.harness.stores import migrated
from tests.harness.waiting import until

LATE_BUCKET = "10.0"
"""Seconds that a release may be late here; the promise is 0.1, but tests share their machine."""


def released(home: Core) -> int:
    return int(home.value("mediator_delayed_late_seconds_count"))


def in_time(home: Core) -> int:
    return int(home.value("mediator_delayed_late_seconds_bucket", le=LATE_BUCKET))


def fetch(group: str | None = None, **options: int | str) -> Fetch:
    return Fetch(TENANT, BOX, group, deliver=Deliver.EARLIEST, **options)


# Delayed mail.


@pytest.mark.rule("S4", "F2")
async def test_delayed_mail_wakes_who_waits_for_it(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        await home.create()
        assert await home.send(b"later", delay=200) == HIDDEN_ID
        assert await home.shown() == []
        (message,) = (await home.broker.fetch(fetch(max_wait=4500))).messages
        assert (message.msg_id, message.payload) == (0, b"later")
        assert 200 <= message.created_at - message.sent_at < 10_200
        assert (released(home), in_time(home)) == (1, 1)


@pytest.mark.rule("S4", "A3")
async def test_much_that_falls_due_comes_on_time_and_in_due_order(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        await home.create()
        count, begin = 500, wall_clock() + 2 * SECOND
        # Sent last first, due one millisecond apart.
        drafts = [{"payload": str(number).encode(), "send_at": begin + number} for number in reversed(range(count))]
        assert set(await asyncio.gather(*[home.send(**draft) for draft in drafts])) == {HIDDEN_ID}
        await until(lambda: released(home) == count)
        assert in_time(home) == count
        shown = await home.shown()
        assert [message.payload for message in shown] == [str(number).encode() for number in range(count)]
        assert [message.msg_id for message in shown] == list(range(count))
        assert all(message.created_at >= begin + number for number, message in enumerate(shown))


@pytest.mark.rule("S4", "A8")
async def test_mail_due_during_a_stop_comes_at_the_start_in_order(tmp_path: Path) -> None:
    clock, count = ShiftedClock(), 300
    store = SqliteStore(migrated(database_path(tmp_path)))
    broker = Broker(store, Bounds(), clock=clock)
    await broker.create(Create(TENANT, BOX))
    now = wall_clock()
    for number in reversed(range(count)):
        draft = Draft(str(number).encode(), send_at=now + MINUTE + 10 * SECOND * (number % 2) + number)
        await broker.send(Send(TENANT, BOX, draft))
    await broker.send(Send(TENANT, BOX, Draft(b"still to come", delay=HOUR)))
    await broker.close()
    store.close()
    clock.ahead = 30 * MINUTE
    async with core(tmp_path, clock) as home:
        await until(lambda: released(home) == count)
        order = [int(message.payload) for message in await home.shown()]
        assert order == [*range(0, count, 2), *range(1, count, 2)]
        assert home.rows("delayed") == 1

        async def next_due() -> float | None:
            return (await home.ask("status"))["next_due"]

        assert await until(next_due) == pytest.approx(wall_clock() / 1000 + 3600, abs=60)


@pytest.mark.rule("S4")
async def test_mail_whose_timer_was_lost_is_found_by_the_safety_net(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        await home.create()
        await home.send(delay=300)
        home.scheduler.releaser.timer.cancel()
        (message,) = (await home.broker.fetch(fetch(max_wait=4500))).messages
        assert message.msg_id == 0


@pytest.mark.rule("S4")
async def test_an_earlier_due_time_moves_the_timer(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        await home.create()
        await home.send(b"second", delay=HOUR)
        await home.send(b"first", delay=100)
        (message,) = (await home.broker.fetch(fetch(max_wait=4500))).messages
        assert message.payload == b"first"
        assert in_time(home) == 1


# What expired.


@pytest.mark.rule("S5", "A8")
async def test_expired_messages_are_collected_while_sends_go_on(tmp_path: Path) -> None:
    async with core(tmp_path, enabled=False) as home:
        await home.create()
        await home.send_many(8_000, ttl=10 * MINUTE)
        home.clock.ahead = 30 * MINUTE
        assert await home.shown() == []
        cleaning = asyncio.create_task(home.ask("cleanup"))
        answered = []
        while not cleaning.done():
            answered.append(await home.send(b"living"))
        assert (await cleaning)["removed"] == {"messages": 8_000}
        assert len(answered) > 20
        assert answered == list(range(8_000, 8_000 + len(answered)))
        assert home.rows("message") == len(answered)
        mailbox = await home.broker.read(lambda tx, now: tx.mailboxes.find(TENANT, BOX))
        assert (mailbox.messages, mailbox.bytes) == (len(answered), len(answered) * len(b"living"))
        assert home.value("mediator_cleanup_removed_total", kind="messages") == 8_000


@pytest.mark.rule("M1", "M4", "S3")
async def test_one_pass_ends_all_that_is_over(tmp_path: Path) -> None:
    async with core(tmp_path, enabled=False) as home:
        for number in range(350):
            await home.create(f"box{number}", ttl=10 * MINUTE)
        await home.create()
        await home.send_many(3000, ttl=10 * MINUTE)
        await home.send(delay=24 * HOUR, to="box0")
        await home.send(dedup_id="over", to="box1")
        await home.broker.delete_mailbox(TENANT, "box1")
        home.clock.ahead = 30 * MINUTE
        removed = (await home.ask("cleanup"))["removed"]
        assert removed == {"mailboxes": 350, "messages": 3001, "delayed": 1, "dedup_ids": 1}
        assert home.rows() == 1
        assert (await home.ask("cleanup"))["removed"] == {}


@pytest.mark.rule("D13")
async def test_envelopes_are_forgotten_when_their_time_is_over(tmp_path: Path) -> None:
    async with core(tmp_path, enabled=False) as home:
        for number, left in enumerate((10 * MINUTE, 10 * MINUTE, HOUR)):
            until, mark = home.clock() + left, bytes([number])
            assert await home.broker.write(
                lambda tx, _now, mark=mark, until=until: tx.table(MediationTransaction).replays.add(
                    b"s", mark, until, 9
                )
            )
        home.clock.ahead = 30 * MINUTE
        await home.ask("cleanup")
        assert home.rows("replay") == 1


@pytest.mark.rule("F7", "F6")
async def test_leases_of_gone_messages_end_and_spent_ones_are_dead(tmp_path: Path) -> None:
    async with core(tmp_path, enabled=False) as home:
        await home.create()
        await home.send(b"expires", ttl=10 * MINUTE)
        await home.send(b"dies")
        found = await home.broker.fetch(fetch("workers", max_wait=0, ack_wait=SECOND, max_deliver=1))
        assert [message.msg_id for message in found.messages] == [0, 1]
        home.clock.ahead = 30 * MINUTE
        assert home.rows("lease") == 2
        removed = (await home.ask("cleanup"))["removed"]
        assert removed == {"messages": 1, "leases": 2}
        dead = await home.broker.query(Query(TENANT, BOX, Filter(), 100, 1 << 20, "workers"))
        assert [message.payload for message in dead] == [b"dies"]
        assert home.rows("lease") == 1


@pytest.mark.rule("F7")
async def test_a_message_removed_beside_its_lease_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with core(tmp_path, enabled=False) as home:
        await home.create()
        await home.send()
        await home.broker.fetch(fetch("workers", max_wait=0, ack_wait=SECOND))
        home.clock.ahead = 30 * MINUTE
        await home.ask("cleanup")
        home.clock.ahead += MINUTE
        await home.broker.delete(TENANT, BOX, 0)
        assert (await home.ask("cleanup"))["removed"] == {}
        monkeypatch.setattr("mediator.cleanup.collector.LEASE_ROUND", 0)
        assert (await home.ask("cleanup"))["removed"] == {"leases": 1}


async def test_a_disabled_scheduler_cleans_up_only_when_asked(tmp_path: Path) -> None:
    async with core(tmp_path, enabled=False) as home:
        await home.create()
        await home.send(ttl=10 * MINUTE)
        home.clock.ahead = 30 * MINUTE
        assert home.rows("message") == 1
        await home.ask("cleanup")
        assert home.rows("message") == 0


@pytest.mark.rule("S5", "M1", "A7")
async def test_a_dry_run_says_what_would_go_and_removes_nothing(tmp_path: Path) -> None:
    async with core(tmp_path, enabled=False) as home:
        await home.create("agent.secret.inbox")
        for _ in range(8):
            await home.send(b"payload", to="agent.secret.inbox", ttl=10 * MINUTE)
        home.clock.ahead = 30 * MINUTE
        before = home.rows()
        answer = await home.ask("cleanup-plan")
        (finding,) = answer["findings"]
        assert (finding["what"], finding["why"], finding["count"]) == ("messages", "time to live is over", 8)
        assert [example["number"] for example in finding["examples"]] == list(range(5))
        assert "secret" not in str(answer)
        assert home.rows() == before
        assert (await home.ask("cleanup"))["removed"] == {"messages": 8}


async def test_the_history_says_what_was_removed_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with core(tmp_path, enabled=False) as home:
        await home.create()
        for number in range(6):
            await home.send(ttl=(number + 1) * 10 * MINUTE)
        home.clock.ahead = 11 * MINUTE
        await home.ask("cleanup")
        with monkeypatch.context() as patched:
            patched.setattr(Broker, "write_background", unwritable)
            assert "the disk is gone" in (await home.ask("cleanup"))["error"]
        # What could not be written down then is with the next pass; one that finds nothing leaves no trace.
        home.clock.ahead = 45 * MINUTE
        await home.ask("cleanup")
        await home.ask("cleanup")
        minutes = (await home.ask("cleanup-history"))["minutes"]
        hours = (await home.ask("cleanup-hours", hours=3))["hours"]
        for each in (minutes, hours):
            assert [sum(one[name] for one in each) for name in ("passes", "failed")] == [3, 1]
            assert sum(one["removed"].get("messages", 0) for one in each) == 4
            assert [one["error"] for one in each if one["failed"]] == ["unavailable: the disk is gone"]
        assert minutes[0]["removed"] == {"messages": 3}
        assert len(hours) == 3
        older = await home.ask("cleanup-history", before=minutes[0]["no"], limit=1)
        assert older["minutes"] == minutes[1:2]
        assert older["more"] is (len(minutes) > 2)


async def unwritable(*_: object, **_options: object) -> None:
    raise UnavailableError("the disk is gone")


async def test_jobs_say_how_they_ran(tmp_path: Path) -> None:
    async def fail() -> None:
        raise UnavailableError("no room")

    async with core(tmp_path) as home:
        home.scheduler.add_job(fail, 3600, "a job")
        await until(lambda: failed(home, "a job"))
        jobs = {each["job"]: each for each in (await home.ask("job-list"))["jobs"]}
        assert (jobs["a job"]["error"], jobs["a job"]["every_seconds"]) == ("unavailable: no room", 3600)
        assert jobs["a job"]["next_at"] > jobs["a job"]["last_at"]
        await until(lambda: ran(home, "clean-up"))


async def ran(home: Core, name: str) -> bool:
    jobs = (await home.ask("job-list"))["jobs"]
    return any(each["job"] == name and each["took_seconds"] and not each["error"] for each in jobs)


async def failed(home: Core, name: str) -> bool:
    jobs = (await home.ask("job-list"))["jobs"]
    return any(each["job"] == name and each["error"] for each in jobs)


# The clock.


async def paused(home: Core) -> bool:
    return "expiry is paused" in (await home.scheduler.check() or "")


async def test_a_job_cut_by_the_stop_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun = asyncio.Event()

    async def never_ends() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with core(tmp_path) as home:
        home.scheduler.add_job(never_ends, 10)
        await begun.wait()
    await asyncio.sleep(0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.rule("S4", "S5", "M1")
async def test_a_clock_that_jumps_ahead_pauses_expiry_until_confirmed(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        await home.create()
        await home.create("short", ttl=HOUR)
        await home.send(b"expires", ttl=HOUR)
        await home.send(b"delayed", delay=HOUR)
        home.clock.ahead = 2 * HOUR
        await until(lambda: paused(home))
        assert home.value("mediator_expiry_paused") == 1
        await until(lambda: released(home) == 1)
        assert "expiry is paused" in (await home.ask("cleanup"))["error"]
        assert "expiry is paused" in (await home.ask("cleanup-plan"))["paused"]
        assert (home.rows("message"), home.rows("mailbox")) == (2, 2)
        answer = await home.ask("confirm-clock")
        assert answer["ahead_seconds"] == pytest.approx(7200, abs=60)
        assert await home.scheduler.check() is None
        assert home.value("mediator_expiry_paused") == 0
        await until(lambda: (home.rows("message"), home.rows("mailbox")) == (1, 1))
        assert (await home.ask("confirm-clock"))["ahead_seconds"] == 0


@pytest.mark.rule("S5")
async def test_a_clock_set_back_ends_the_pause_and_nothing_is_lost(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        await home.create()
        await home.send(b"expires", ttl=HOUR)
        home.clock.ahead = 2 * HOUR
        await until(lambda: paused(home))
        assert await home.shown() == []
        home.clock.ahead = 0
        await until(lambda: home.value("mediator_expiry_paused") == 0)
        assert (await home.ask("cleanup"))["removed"] == {}
        assert [message.payload for message in await home.shown()] == [b"expires"]


@pytest.mark.rule("S5")
async def test_a_jump_that_nobody_has_noticed_yet_removes_nothing(tmp_path: Path) -> None:
    async with core(tmp_path, enabled=False) as home:
        await home.create()
        await home.send(ttl=HOUR)
        looked = home.broker.clock

        def jumps_after_the_look() -> int:
            home.clock.ahead, before = 2 * HOUR, looked()
            return before

        home.broker.clock = jumps_after_the_look
        with pytest.raises(UnavailableError):
            await home.scheduler.collector.run(home.broker)
        assert home.rows("message") == 1


async def test_jobs_go_on_after_the_clock_was_set_back(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        # What a clock that goes back by two hours does to the jobs: their next time lies that far ahead.
        for job in home.scheduler.jobs.get_jobs():
            job.modify(next_run_time=datetime.now(UTC) + timedelta(hours=2))
        before = home.scheduler.beat_at
        home.clock.ahead = -2 * HOUR
        await until(lambda: home.scheduler.beat_at > before + 0.5)


async def test_the_check_says_when_the_scheduler_stands_still(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        begun = home.scheduler.beat_at
        await until(lambda: home.scheduler.beat_at > begun)
        assert await home.scheduler.check() is None
        home.scheduler.jobs.pause()
        home.scheduler.beat_at -= 60
        said = await home.scheduler.check()
        assert said is not None
        assert "is stalled" in said
        assert (await home.ask("status"))["scheduler"] == said
        home.scheduler.jobs.resume()

        async def well() -> bool:
            return await home.scheduler.check() is None

        await until(well)
