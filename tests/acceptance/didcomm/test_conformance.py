"""The conformance suite passes against this service at every level."""

import pytest

from conformance.checks import Check
from conformance.didcomm import SUITE, DidcommSession, Target
from conformance.running import Outcome, run_checks
from tests.harness.didcomm_service import Door, Invites

SECONDS = 60.0
"""For each answer; the machine may be busy."""


@pytest.mark.parametrize("check", list(SUITE), ids=lambda check: check.id)
async def test_a_check_passes(door: Door, invites: Invites, check: Check[DidcommSession]):
    target = await Target.find([invites.v1, invites.v2], SECONDS)
    (result,) = await run_checks([check], lambda transcript: DidcommSession.open(target, transcript, SECONDS))
    assert result.outcome is Outcome.PASSED, f"{result.detail}\n{check.source}: {check.sentence}\n{result.transcript}"
