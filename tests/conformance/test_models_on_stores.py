"""The state machines that hold the rules to models, on PostgreSQL; the unit tests run them on SQLite."""

import contextlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.harness.postgres import Server
from tests.unit import test_agents_model, test_mediation_model, test_model

FEW = settings(max_examples=8, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.postgres
@pytest.mark.rule("A2", "A3", "A8", "F1", "F3", "F6", "K2", "K3", "D1", "D2", "D3", "D4", "D6", "D7", "D8", "D9")
@pytest.mark.rule("G1", "G2", "G3")
@pytest.mark.parametrize("model", [test_model, test_mediation_model, test_agents_model])
def test_random_histories_agree_with_the_model(model, postgres: Server):
    # Its driver is an extra: imported after the fixture, which skips without it.
    from mediator.store.postgres import PostgresStore

    with contextlib.ExitStack() as stack:

        def new_store():
            return PostgresStore(stack.enter_context(postgres.database(migrated=True)))

        run_state_machine_as_test(model.machine(new_store), settings=FEW)
