"""What an instance did, on every store: means by minute for a day and by ten minutes for a week."""

from mediator.operate.activity_history import ActivityTable


def test_rows_survive_a_restart_and_are_of_one_instance(store, reopen):
    with store.transaction() as tx:
        table = tx.table(ActivityTable)
        table.add("one", 60, 120, b"a")
        table.add("one", 60, 60, b"b")
        table.add("one", 600, 600, b"c")
        table.add("two", 60, 60, b"d")
        # The clock was set back.
        table.add("one", 60, 120, b"e")
    with reopen().reading() as tx:
        table = tx.table(ActivityTable)
        assert table.read("one", 60, 0) == [(60, b"b"), (120, b"e")]
        assert table.read("one", 60, 61) == [(120, b"e")]
        assert table.read("one", 600, 0) == [(600, b"c")]
        assert table.read("three", 60, 0) == []


def test_rows_of_all_instances_are_forgotten_in_time(store):
    with store.transaction() as tx:
        table = tx.table(ActivityTable)
        for instance in ("one", "gone"):
            for step in (60, 600):
                table.add(instance, step, 600, b"x")
        table.forget(60, 601)
        assert [table.read(each, 60, 0) for each in ("one", "gone")] == [[], []]
        assert len(table.read("gone", 600, 0)) == 1
