"""The history of runs is the same in every store: bounded, in order, and each run ends once."""

import pytest

from mediator.operate.runs import KEPT, Ending, NewRun, Outcome, Run, Runs
from tests.harness.samples import ALL, T0
from tests.harness.stores import undone

ODD = "Zoë's 📱 \" ' % ? \\ {} \u2028 end"


def new(command="ingest", **more) -> NewRun:
    return NewRun(**{"command": command, "arguments": (), "instance": "one", "process": "p"} | more)


def done(outcome=Outcome.SUCCEEDED, error="", **numbers) -> Ending:
    return Ending(outcome, numbers, error)


def test_a_run_comes_back_as_it_was_kept(store, reopen):
    with store.transaction() as tx:
        begun = tx.table(Runs).add(new(arguments=("--lake", ODD, ""), instance="i", process=ODD), T0)
        assert begun == Run(begun.id, "ingest", ("--lake", ODD, ""), "i", ODD, T0, None, Outcome.RUNNING, {}, "")
        assert tx.table(Runs).newest(1) == [begun]
    with store.transaction() as tx:
        ended = tx.table(Runs).end(begun.id, done(Outcome.FAILED, ODD, rows=2**62, seconds=0.25), T0 + 9)
    assert ended == Run(
        begun.id,
        "ingest",
        begun.arguments,
        "i",
        ODD,
        T0,
        T0 + 9,
        Outcome.FAILED,
        {"rows": 2**62, "seconds": 0.25},
        ODD,
    )
    for _ in range(2):
        with store.reading() as tx:
            assert tx.table(Runs).newest(ALL) == [ended]
        store = reopen()


def test_a_run_ends_once_and_only_if_it_began(store):
    with store.transaction() as tx:
        run = tx.table(Runs).add(new(), T0)
        first = tx.table(Runs).end(run.id, done(rows=1), T0 + 1)
        assert first is not None
        assert tx.table(Runs).end(run.id, done(Outcome.KILLED), T0 + 2) is None
        for nothing in (run.id + 1, 0, -1, 2**60):
            assert tx.table(Runs).end(nothing, done(), T0 + 2) is None
        assert tx.table(Runs).newest(ALL) == [first]


def test_the_newest_come_first_as_many_as_are_asked_for(store):
    with store.transaction() as tx:
        assert tx.table(Runs).newest(ALL) == []
        # The order is that of the beginnings, whatever the clock said.
        runs = [tx.table(Runs).add(new(), T0 - number) for number in range(5)][::-1]
        assert [run.id for run in runs] == sorted((run.id for run in runs), reverse=True)
        assert tx.table(Runs).newest(ALL) == runs
        assert tx.table(Runs).newest(2) == runs[:2]
        assert tx.table(Runs).newest(0) == []


def test_of_many_the_newest_are_kept(store):
    with store.transaction() as tx:
        oldest = tx.table(Runs).add(new(), T0)
        kept = [tx.table(Runs).add(new(), T0 + number) for number in range(KEPT - 1)]
        assert tx.table(Runs).newest(ALL)[-1] == oldest
        kept.append(tx.table(Runs).add(new(), T0))
    with store.reading() as tx:
        assert tx.table(Runs).newest(ALL) == kept[::-1]
    with store.transaction() as tx:
        assert tx.table(Runs).end(oldest.id, done(), T0) is None


@pytest.mark.rule("A9")
def test_a_rollback_leaves_nothing_and_reuses_no_number(store, reopen):
    with store.transaction() as tx:
        run = tx.table(Runs).add(new(), T0)
    with undone(store) as tx:
        tx.table(Runs).add(new(), T0)
        tx.table(Runs).end(run.id, done(), T0)
    with store.reading() as tx:
        assert tx.table(Runs).newest(ALL) == [run]
    store = reopen()
    with store.transaction() as tx:
        assert tx.table(Runs).add(new(), T0).id > run.id
