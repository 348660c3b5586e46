"""The group commit over SQLite: order, poison, chores, refusals, and an answer for every request (A8, A9)."""

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mediator.errors import BusyError, MediatorError, NoSuchMessageError, UnavailableError, UncertainError
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import MailboxKey, NewMailbox
from mediator.mailboxes.message import Message
from mediator.mailboxes.transaction import Transaction
from mediator.store import writer as writer_module
from mediator.store.sqlite import SqliteStore
from mediator.store.writer import MAX_BATCH, MAX_JOINED, MIN_BATCH, RECEIVE_ABOVE, Committed, MergeableWork, Writer
from mediator.system.freezes import FROZEN_MS, SETTLE_MS, FreezeGuard
from tests.harness.clock import ManualClock
from tests.harness.stores import ram_store

PLACE = ("default", "task")


class Gated(SqliteStore):
    """A store whose transactions begin when the gate is open, and fail as they are told."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = path
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.failures: list[BaseException] = []
        self.last_words: list[BaseException] = []
        """Raised right before the commit."""
        self.fast = False

    @property
    def commits_fast(self) -> bool:
        return self.fast

    @commits_fast.setter
    def commits_fast(self, measured: bool) -> None:
        """Each test chooses how fast commits seem."""

    @contextmanager
    def transaction(self, places: Sequence[MailboxKey] = ()) -> Iterator[Transaction]:
        self.entered.set()
        assert self.gate.wait(30)
        if self.failures:
            raise self.failures.pop(0)
        with super().transaction(places) as tx:
            yield tx
            if self.last_words:
                raise self.last_words.pop(0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Gated]:
    gated = Gated(tmp_path / "mail.db")
    with gated.transaction() as tx:
        tx.mailboxes.add(NewMailbox("default", "task", 1))
    gated.entered.clear()
    yield gated
    gated.gate.set()
    gated.close()


@pytest.fixture
async def writer(store: Gated) -> AsyncIterator[Writer]:
    made = Writer(store, lambda: 1, MAX_BATCH * 3, [])
    yield made
    store.gate.set()
    await made.close()


def note(what: object) -> Callable[[Transaction, int], object]:
    """Keep a message and return what is in it."""

    def work(tx: Transaction, now: int) -> object:
        mailbox = tx.mailboxes.find(*PLACE)
        assert mailbox is not None
        payload = str(what).encode()
        tx.messages.append(mailbox, Message(mailbox.next_id, Lane.NORMAL, payload, len(payload), now, now))
        return what

    return work


def where(tx: Transaction, now: int) -> str:
    """Return the name of the thread that runs it."""
    return threading.current_thread().name


def fail(error: BaseException) -> Callable[[Transaction, int], object]:
    """Raise."""

    def work(tx: Transaction, now: int) -> object:
        raise error

    return work


def noted(store: Gated) -> list[str]:
    """Read what is committed, beside the store."""
    with contextlib.closing(sqlite3.connect(f"file:{store.file}?mode=ro", uri=True)) as file:
        return [payload.decode() for (payload,) in file.execute("SELECT payload FROM message ORDER BY msg_id")]


def texts(*what: object) -> list[str]:
    return [str(one) for one in what]


class Answers:
    """Collects what jobs are answered, in order."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def submit(self, writer: Writer, work: Callable[[Transaction, int], object] | MergeableWork[Any, Any]) -> None:
        writer.submit(PLACE, work, self.given.append)

    async def until(self, count: int) -> list[Any]:
        async with asyncio.timeout(30):
            while len(self.given) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        return self.given


async def held(store: Gated, writer: Writer) -> "asyncio.Task[object]":
    """Stop the writer inside a transaction, so that what comes now makes the next batch."""
    store.gate.clear()
    store.entered.clear()
    first = asyncio.create_task(writer.write(PLACE, note("first")))
    assert await asyncio.to_thread(store.entered.wait, 30)
    return first


@pytest.mark.rule("A8", "F3")
async def test_jobs_run_and_are_answered_in_their_order(store: Gated, writer: Writer) -> None:
    answers = Answers()
    count = MAX_BATCH * 2 + 7
    for no in range(count):
        answers.submit(writer, note(no))
    assert await answers.until(count) == list(range(count))
    assert noted(store) == texts(*range(count))


@pytest.mark.rule("A8")
async def test_an_answer_comes_after_the_commit(store: Gated, writer: Writer) -> None:
    seen = [noted(store)[-1] for no in range(20) if await writer.write(PLACE, note(no)) == no]
    assert seen == texts(*range(20))


@pytest.mark.rule("A8")
async def test_a_batch_that_takes_long_is_parted_and_keeps_its_order(store: Gated) -> None:
    commits: list[Committed] = []
    writer = Writer(store, lambda: 1, MAX_BATCH, [(commits.append, None)])
    first = await held(store, writer)
    slow = threading.Event()

    def work(no: int) -> Callable[[Transaction, int], object]:
        def run(tx: Transaction, now: int) -> object:
            slow.wait(0.004)
            return note(no)(tx, now)

        return run

    answers = Answers()
    for no in range(30):
        answers.submit(writer, work(no))
    store.gate.set()
    await first
    assert await answers.until(30) == list(range(30))
    assert noted(store) == texts("first", *range(30))
    assert len(commits) > 3, "no batch holds the others up"
    await writer.close()


@pytest.mark.rule("N3", "A8")
async def test_a_refusal_costs_nobody_else_anything(store: Gated, writer: Writer) -> None:
    first = await held(store, writer)
    answers = Answers()
    for no in range(5):
        answers.submit(writer, fail(NoSuchMessageError()) if no == 2 else note(no))
    store.gate.set()
    await first
    given = await answers.until(5)
    assert isinstance(given.pop(2), NoSuchMessageError)
    assert given == [0, 1, 3, 4]
    assert noted(store) == texts("first", 0, 1, 3, 4)


@pytest.mark.rule("N3", "A8")
@pytest.mark.parametrize("poison", [ZeroDivisionError("poison"), MemoryError(), sqlite3.ProgrammingError("poison")])
async def test_poison_fails_itself_alone(store: Gated, writer: Writer, poison: Exception) -> None:
    first = await held(store, writer)
    answers = Answers()
    for no in range(5):
        answers.submit(writer, fail(poison) if no == 2 else note(no))
    store.gate.set()
    await first
    given = await answers.until(5)
    refusal = given.pop(2)
    assert isinstance(refusal, MediatorError)
    assert "poison" not in str(refusal) or isinstance(poison, sqlite3.Error)
    if isinstance(poison, sqlite3.Error):
        # An error of the database is nobody's in particular.
        assert all(isinstance(outcome, UnavailableError) for outcome in given)
        assert noted(store) == texts("first")
    else:
        assert given == [0, 1, 3, 4]
        assert noted(store) == texts("first", 0, 1, 3, 4)
    assert await writer.write(PLACE, note("after")) == "after"


@pytest.mark.rule("A9", "A8")
async def test_a_batch_whose_commit_fails_is_taken_back_whole(store: Gated, writer: Writer) -> None:
    first = await held(store, writer)
    answers = Answers()
    for no in range(5):
        answers.submit(writer, note(no))
    broken = UnavailableError("the disk is full")
    store.gate.set()
    await first
    store.last_words = []
    assert await answers.until(5) == list(range(5))
    await held(store, writer)
    for no in range(5, 10):
        answers.submit(writer, note(no))
    # The one that holds the gate, and its second try; then the batch, and its second try.
    store.last_words = [broken] * 4
    store.gate.set()
    given = await answers.until(10)
    assert given[5:] == [broken] * 5
    assert noted(store) == texts("first", *range(5))


@pytest.mark.rule("A9")
async def test_a_lost_connection_is_tried_once_more(store: Gated, writer: Writer) -> None:
    store.failures = [UnavailableError("deadlock")]
    assert await writer.write(PLACE, note("a")) == "a"
    store.failures = [UnavailableError("gone"), UnavailableError("still gone")]
    with pytest.raises(UnavailableError, match="still gone"):
        await writer.write(PLACE, note("b"))
    assert await writer.write(PLACE, note("c")) == "c"
    assert noted(store) == texts("a", "c")


@pytest.mark.rule("A9")
async def test_more_than_the_bound_is_refused_at_once(store: Gated) -> None:
    writer = Writer(store, lambda: 1, 3, [])
    first = await held(store, writer)
    answers = Answers()
    for no in range(3):
        answers.submit(writer, note(no))
    assert writer.pending == 3
    with pytest.raises(BusyError, match="3 requests wait already"):
        answers.submit(writer, note("too many"))
    store.gate.set()
    await first
    assert await answers.until(3) == [0, 1, 2]
    await writer.close()


@pytest.mark.parametrize("fast", [False, True])
async def test_chores_run_while_requests_go_on(store: Gated, writer: Writer, fast: bool) -> None:
    store.fast = fast
    stop = asyncio.Event()

    async def requests() -> int:
        count = 0
        while not stop.is_set():
            await asyncio.gather(*(writer.write(PLACE, note(no)) for no in range(20)))
            count += 20
        return count

    busy = asyncio.create_task(requests())
    async with asyncio.timeout(20):
        for no in range(5):
            assert await writer.write_background(note(f"chore {no}")) == f"chore {no}"
            await writer.upkeep()
    stop.set()
    count = await busy
    assert count > 0
    kept = noted(store)
    assert len(kept) == count + 5
    assert [what for what in kept if what.startswith("chore")] == [f"chore {no}" for no in range(5)]


async def test_an_answer_waits_for_no_background_work(store: Gated, writer: Writer) -> None:
    first = await held(store, writer)
    go_on = threading.Event()

    def chore(tx: Transaction, now: int) -> bool:
        return go_on.wait(30)

    background = asyncio.create_task(writer.write_background(chore))
    await asyncio.sleep(0)
    store.gate.set()
    # Both are done in one turn of the thread.
    async with asyncio.timeout(20):
        assert await first == "first"
    assert not background.done()
    go_on.set()
    assert await background


@pytest.mark.rule("A8")
async def test_close_answers_everything_and_takes_no_more(store: Gated) -> None:
    writer = Writer(store, lambda: 1, MAX_BATCH, [])
    first = await held(store, writer)
    answers = Answers()
    for no in range(50):
        answers.submit(writer, note(no))
    chore = asyncio.create_task(writer.write_background(note("chore")))
    await asyncio.sleep(0)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0)
    for refused in (writer.write(PLACE, note("late")), writer.write_background(note("late")), writer.upkeep()):
        with pytest.raises(UnavailableError, match="stopping"):
            await refused
    store.gate.set()
    await closing
    assert await first == "first"
    assert await answers.until(50) == list(range(50))
    assert await chore == "chore"
    assert sorted(noted(store)) == sorted(texts("first", "chore", *range(50)))


@pytest.mark.rule("A8")
async def test_whoever_fails_at_being_told_costs_nobody_the_answer(
    store: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BATCH_SECONDS", 60.0)

    def told(committed: Committed) -> None:
        raise ValueError("a listener")

    def done(outcome: object) -> None:
        raise ValueError("an asker")

    commits: list[Committed] = []
    writer = Writer(store, lambda: 1, MAX_BATCH, [(told, None), (commits.append, None)])
    first = await held(store, writer)
    answers = Answers()
    writer.submit(PLACE, note(0), done)
    answers.submit(writer, note(1))
    store.gate.set()
    assert await first == "first"
    assert await answers.until(1) == [1]
    assert [commit.size for commit in commits] == [1, 2], "the other listener learns of every commit"
    await writer.close()


async def test_upkeep_that_fails_leaves_the_writer_alive(store: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(store, lambda: 1, MAX_BATCH, [])

    def upkeep(busy: bool) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(store, "upkeep", upkeep)
    with pytest.raises(MediatorError, match="internal error"):
        await writer.upkeep()
    assert await writer.write(PLACE, note(1)) == 1
    await writer.close()


@pytest.mark.rule("A8")
async def test_an_observer_sees_what_is_committed_and_nothing_else(store: Gated) -> None:
    seen: list[int] = []

    def observe(tx: Transaction, now: int) -> None:
        seen.append(tx.mailboxes.find(*PLACE).next_id)

    writer = Writer(store, lambda: 1, MAX_BATCH, [], [observe])
    assert await writer.write(PLACE, note("a")) == "a"
    assert seen == [1]
    await writer.close()


async def test_one_who_stopped_waiting_disturbs_nobody(store: Gated, writer: Writer) -> None:
    first = await held(store, writer)
    gone = asyncio.create_task(writer.write(PLACE, note("gone")))
    stays = asyncio.create_task(writer.write(PLACE, note("stays")))
    await asyncio.sleep(0)
    gone.cancel()
    store.gate.set()
    assert await first == "first"
    assert await stays == "stays"
    assert noted(store) == texts("first", "gone", "stays")


@pytest.mark.parametrize(
    ("first", "sizes"), [(RECEIVE_ABOVE - 1, [RECEIVE_ABOVE - 1, 5]), (RECEIVE_ABOVE, [RECEIVE_ABOVE + 5])]
)
async def test_many_at_once_wait_for_those_that_follow(
    store: Gated, monkeypatch: pytest.MonkeyPatch, first: int, sizes: list[int]
) -> None:
    # However slowly the machine runs, no batch is parted.
    monkeypatch.setattr(writer_module, "BATCH_SECONDS", 60.0)
    commits: list[Committed] = []
    writer = Writer(store, lambda: 1, MAX_BATCH, [(commits.append, None)])
    store.fast = True
    answers = Answers()

    def submit(count: int) -> None:
        for no in range(count):
            answers.submit(writer, note(no))

    submit(first)
    # What the event loop finds when it looks once more.
    asyncio.get_running_loop().call_soon(submit, 5)
    await answers.until(first + 5)
    assert [commit.size for commit in commits] == sizes
    await writer.close()


class Joined:
    """Joint work that keeps what it was asked for together."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []

    def __call__(self, tx: Transaction, requests: Sequence[int], now: int) -> list[object]:
        self.runs.append(list(requests))
        return [note(request)(tx, now) for request in requests]

    def work(self, request: int, key: str = "k") -> MergeableWork[int, object]:
        return MergeableWork(key, request, self)


@pytest.mark.rule("A8", "F3")
@pytest.mark.parametrize("fast", [False, True])
async def test_joint_work_in_a_row_is_done_together(
    store: Gated, writer: Writer, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(writer_module, "BATCH_SECONDS", 60.0)
    store.fast = fast
    joined, answers = Joined(), Answers()
    works = [joined.work(0), joined.work(1), note(2), joined.work(3), joined.work(4, "other"), joined.work(5)]
    works += [joined.work(no) for no in range(6, MAX_JOINED + 6)]
    for work in works:
        answers.submit(writer, work)
    assert await answers.until(len(works)) == list(range(len(works)))
    # In place one half is committed at a time.
    end = len(works) // 2 if fast else MAX_JOINED + 5
    assert joined.runs[:4] == [[0, 1], [3], [4], list(range(5, end))]
    assert noted(store) == texts(*range(len(works)))


@pytest.mark.rule("A8", "N3")
async def test_joint_work_that_is_refused_is_refused_to_each(store: Gated, writer: Writer) -> None:
    def refuse(tx: Transaction, requests: Sequence[int], now: int) -> list[int]:
        raise NoSuchMessageError

    answers = Answers()
    for no in range(3):
        answers.submit(writer, MergeableWork("k", no, refuse))
    answers.submit(writer, note("after"))
    *refusals, after = await answers.until(4)
    assert all(isinstance(outcome, NoSuchMessageError) for outcome in refusals)
    assert after == "after"


@pytest.mark.rule("A8", "N3")
async def test_poison_in_joint_work_fails_alone(store: Gated, writer: Writer) -> None:
    def work(tx: Transaction, requests: Sequence[int], now: int) -> list[float]:
        return [1 / request for request in requests]

    answers = Answers()
    for no in (1, 0, 2):
        answers.submit(writer, MergeableWork("k", no, work))
    first, second, third = await answers.until(3)
    assert (first, third) == (1, 0.5)
    assert isinstance(second, MediatorError)


HERE = threading.main_thread().name
"""The thread of the event loop."""


@pytest.mark.parametrize(("fast", "used"), [(False, "store-writer"), (True, HERE)])
async def test_requests_are_committed_in_place_on_a_fast_disk(
    store: Gated, writer: Writer, fast: bool, used: str
) -> None:
    store.fast = fast
    for _ in range(5):
        assert await writer.write(PLACE, where) == used


async def test_background_work_stays_on_the_thread(store: Gated, writer: Writer) -> None:
    store.fast = True
    assert await writer.write_background(where) == "store-writer"


@pytest.mark.rule("A8")
async def test_the_event_loop_never_waits_for_the_thread(store: Gated, writer: Writer) -> None:
    first = await held(store, writer)
    store.fast = True
    answers = Answers()
    for no in range(5):
        answers.submit(writer, note(no))
    for _ in range(10):
        # Each turn of the loop might begin to commit.
        await asyncio.sleep(0)
    assert not answers.given
    store.gate.set()
    await first
    assert await answers.until(5) == list(range(5))
    assert noted(store) == texts("first", *range(5))


@pytest.mark.rule("A8", "F3")
async def test_answers_keep_their_order_wherever_they_are_committed(store: Gated, writer: Writer) -> None:
    answers = Answers()
    commits = 300
    for no in range(commits):
        store.fast = no % 3 > 0
        for part in range(1 + no % 4):
            answers.submit(writer, note((no, part)))
        # Some of them wait for the thread meanwhile, others do not.
        await asyncio.sleep(0)
    given = [(no, part) for no in range(commits) for part in range(1 + no % 4)]
    assert await answers.until(len(given)) == given
    assert noted(store) == texts(*given)


@pytest.mark.rule("A8", "F3")
async def test_what_was_asked_meanwhile_comes_behind_the_second_half(store: Gated) -> None:
    commits: list[Committed] = []
    writer = Writer(store, lambda: 1, MAX_BATCH, [(commits.append, None)])
    store.fast = True
    given: list[object] = []
    asked = 4 * MIN_BATCH
    everything = asyncio.Event()

    def done(outcome: object) -> None:
        given.append(outcome)
        if len(given) <= MIN_BATCH:
            # As a client does that has read its answer.
            writer.submit(PLACE, note(asked + len(given) - 1), done)
        if len(given) == asked + MIN_BATCH:
            everything.set()

    for no in range(asked):
        writer.submit(PLACE, note(no), done)
    async with asyncio.timeout(30):
        await everything.wait()
    assert given == list(range(asked + MIN_BATCH))
    assert commits[0].size == 2 * MIN_BATCH
    assert max(commit.size for commit in commits[1:]) < 2 * MIN_BATCH
    await writer.close()


@pytest.mark.rule("A8")
async def test_what_takes_long_in_place_is_left_to_the_thread(store: Gated, writer: Writer) -> None:
    store.fast = True
    slow = threading.Event()

    def work(tx: Transaction, now: int) -> str:
        slow.wait(0.004)
        return where(tx, now)

    answers = Answers()
    for _ in range(20):
        answers.submit(writer, work)
    used = await answers.until(20)
    assert used == sorted(used, key=[HERE, "store-writer"].index)
    assert HERE in used
    assert "store-writer" in used


@pytest.mark.rule("A9", "A8", "N3")
async def test_failures_in_place_cost_nobody_else_anything(store: Gated, writer: Writer) -> None:
    store.fast = True
    answers = Answers()
    works = [note(0), fail(NoSuchMessageError()), note(1), fail(ZeroDivisionError("poison")), note(2)]
    for work in works:
        answers.submit(writer, work)
    given = await answers.until(len(works))
    assert [outcome for outcome in given if not isinstance(outcome, MediatorError)] == [0, 1, 2]
    assert isinstance(given[1], NoSuchMessageError)
    store.failures = [UnavailableError("deadlock")]
    assert await writer.write(PLACE, note("again")) == "again"
    store.last_words = [UncertainError()]
    with pytest.raises(UncertainError):
        await writer.write(PLACE, note("perhaps"))
    assert noted(store) == texts(0, 1, 2, "again")


@pytest.mark.rule("A8")
async def test_close_leaves_nothing_to_the_event_loop(store: Gated) -> None:
    writer = Writer(store, lambda: 1, MAX_BATCH, [])
    store.fast = True
    answers = Answers()
    answers.submit(writer, where)
    await writer.close()
    assert await answers.until(1) == ["store-writer"]


async def test_a_store_whose_commits_are_fast_says_so() -> None:
    store = ram_store()
    assert not store.commits_fast, "not before the first commits"
    for no in range(1000):
        with store.transaction() as tx:
            tx.write_heartbeat(no)
        if store.commits_fast:
            break
    assert store.commits_fast


async def test_a_transaction_that_wrote_nothing_says_nothing() -> None:
    store = ram_store()
    for _ in range(100):
        with store.transaction() as tx:
            tx.mailboxes.find(*PLACE)
    assert not store.commits_fast


@pytest.mark.rule("A8", "A9")
async def test_what_waited_while_frozen_is_refused(store: Gated) -> None:
    clock, renewed = ManualClock(), []
    store.renew = lambda: renewed.append(True)  # type: ignore[method-assign]
    writer = Writer(store, lambda: 1, MAX_BATCH, [], guard=FreezeGuard(clock))
    first = await held(store, writer)
    waiting = asyncio.ensure_future(writer.write(PLACE, note("waiting")))
    await asyncio.sleep(0)
    # Frozen within the first transaction, while the second waits.
    clock.now += FROZEN_MS + 1
    store.gate.set()
    for late in (first, waiting, asyncio.ensure_future(writer.write(PLACE, note("in a socket")))):
        with pytest.raises(UnavailableError, match="frozen"):
            await late
    clock.now += SETTLE_MS
    assert await writer.write(PLACE, note("new")) == "new"
    assert noted(store) == texts("new")
    assert renewed == [True]
    await writer.close()
