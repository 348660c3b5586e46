"""The state machines of the unit tests, with as many histories as find what is rare; a push runs a few of them."""

import pytest
from hypothesis import HealthCheck, settings

from tests.harness.stores import ram_store
from tests.unit import test_agents_model, test_mediation_model, test_model, test_pushing_model

pytestmark = pytest.mark.timeout(900)
MANY = settings(max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.rule(
    "A3", "A5", "A8", "F1", "F3", "F4", "F6", "F7", "F8", "F9", "K2", "K3", "K4", "Q1", "Q2", "S2", "S3", "S4"
)
class TestMailboxes(test_model.machine(ram_store).TestCase):
    settings = MANY


@pytest.mark.rule("G1", "G2", "G3")
class TestAgents(test_agents_model.machine(ram_store).TestCase):
    settings = MANY


@pytest.mark.rule("D1", "D2", "D3", "D4", "D6", "D7", "D8", "D9")
class TestMediation(test_mediation_model.machine(ram_store).TestCase):
    settings = MANY


@pytest.mark.rule("A8", "E6", "E7", "E8")
class TestPushing(test_pushing_model.Pushing.TestCase):
    settings = MANY
