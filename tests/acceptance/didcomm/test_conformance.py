"""The conformance suite passes against this service at every level."""

import pytest

from conformance.didcomm import SUITE, DidcommSession, Target
from conformance.running import Outcome, run_checks
from tests.harness.didcomm_service import Door, Invites

SECONDS = 60.0
"""For each answer; the machine may be busy."""
FAMILIES = list(dict.fromkeys(check.id.rpartition(".")[0] for check in SUITE))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rule("D1", "D2", "D3", "D4", "D5", "D6", "D7", "D8", "D9", "D10", "D12", "D13")
async def test_all_checks_pass(door: Door, invites: Invites, family: str):
    target = await Target.find([invites.v1, invites.v2], SECONDS)
    checks = SUITE.select(f"{family}.")
    results = await run_checks(checks, lambda transcript: DidcommSession.open(target, transcript, SECONDS))
    failed = [result for result in results if result.outcome is not Outcome.PASSED]
    assert not failed, "\n".join(f"{result.check.id}: {result.detail}\n{result.transcript}" for result in failed)
