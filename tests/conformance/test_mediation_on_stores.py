"""Mediation on every store: the machine that holds the verbs to a model."""

import sqlite3

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from mediator.store.sqlite import SqliteStore
from tests.unit.mediation import Mediation, key
from tests.unit.test_mediation_model import machine


@pytest.mark.rule("D1", "D2", "D3", "D4", "D6", "D7", "D8", "D9")
def test_mediation_keeps_to_its_model(new_store, kind):
    if kind == "memory":
        pytest.skip("the domain's own tests run the model in memory")
    run_state_machine_as_test(
        machine(lambda: new_store().store),
        settings=settings(
            max_examples=10,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.rule("D9")
def test_a_forward_that_reaches_nobody_goes_to_disk_each_time(tmp_path):
    path = tmp_path / "m.db"
    house = Mediation(SqliteStore(path))
    house.holder(1, key(10))
    # Another connection's view of how often the file was written.
    other = sqlite3.connect(path, isolation_level=None)
    seen = [other.execute("PRAGMA data_version").fetchone()]
    # All in the same millisecond.
    for number in (99, 99, 10, 99):
        house.forward(key(number))
        seen.append(other.execute("PRAGMA data_version").fetchone())
    other.close()
    house.store.close()
    assert len(set(seen)) == len(seen)
