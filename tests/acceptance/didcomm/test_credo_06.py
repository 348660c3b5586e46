"""Wallets on Credo 0.6 as they are: connected by an ordinary invitation, in each of their strategies."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.acceptance.didcomm.credo_scenarios import SETTINGS, live_burst, mail_by_each_strategy
from tests.acceptance.didcomm.door import Door, Invites

__all__ = ["SETTINGS"]

pytestmark = pytest.mark.timeout(300)
EDITION = "0.6"


@pytest.mark.rule("A8", "D2", "D3", "D5", "D6", "D7")
async def test_each_strategy_gets_all_mail_whoever_is_killed(
    door: Door, invites: Invites, tmp_path: Path, stack: AsyncExitStack
):
    await mail_by_each_strategy(EDITION, door, invites.v1, tmp_path, stack)


@pytest.mark.rule("D6")
async def test_a_live_burst_is_shown_once(door: Door, invites: Invites, tmp_path: Path, stack: AsyncExitStack):
    await live_burst(EDITION, door, invites.v1, tmp_path, stack)
