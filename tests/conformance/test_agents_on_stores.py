"""The registry on every store: the machine that holds the verbs to a model."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.unit.test_agents_model import machine


@pytest.mark.rule("G1", "G2", "G3")
def test_the_registry_keeps_to_its_model(new_store, kind):
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
