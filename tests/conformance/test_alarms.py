"""The alarms of instances, on every store."""

from mediator.operate.alarms import Alarm, AlarmTable
from mediator.operate.diagnosis import Finding, Level

FOUND = Finding(Level.PROBLEM, "Dead: 1 – ä", "Mend it.", "/cleanup", "dead")


def test_alarms_survive_a_restart_and_are_of_one_instance(store, reopen):
    with store.transaction() as tx:
        table = tx.table(AlarmTable)
        table.put("one", [Alarm("dead", 5, None, FOUND), Alarm("lag", 1, None, FOUND), Alarm("disk", 2, 9, FOUND)])
        table.put("two", [Alarm("dead", 5, None, FOUND)])
        table.put("one", [Alarm("lag", 1, 7, FOUND)])
    with reopen().reading() as tx:
        table = tx.table(AlarmTable)
        assert table.read("one") == [
            Alarm("lag", 1, 7, FOUND),
            Alarm("disk", 2, 9, FOUND),
            Alarm("dead", 5, None, FOUND),
        ]
        assert table.read("three") == []


def test_old_alarms_are_forgotten(store):
    with store.transaction() as tx:
        table = tx.table(AlarmTable)
        for instance in ("one", "gone"):
            table.put(
                instance, [Alarm("present", 1, None, FOUND), Alarm("old", 1, 2, FOUND), Alarm("new", 1, 5, FOUND)]
            )
        table.forget("one", 3, 1)
        for instance in ("one", "gone"):
            assert [alarm.code for alarm in table.read(instance)] == ["new", "present"]
        table.forget("one", 3, 2)
        assert [alarm.code for alarm in table.read("one")] == ["new", "present"]
        assert [alarm.code for alarm in table.read("gone")] == ["new"]
