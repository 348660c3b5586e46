"""What clients were refused lately, as operators read it."""

from collections import Counter

import pytest

from mediator.operate import findings
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.findings import RECENT_SECONDS, TICK_SECONDS, RecentRefusals


class Watched:
    """Refusals with counts that a test adds to, and a clock that it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.counts: Counter[tuple[str, str]] = Counter({("SEND", "busy"): 7})
        monkeypatch.setattr(findings.time, "monotonic", lambda: self.now)
        self.refusals = RecentRefusals(lambda: Counter(self.counts))

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            await self.refusals.tick()

    def found(self) -> list[Finding]:
        return list(self.refusals.findings())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_what_was_refused_before_the_start_is_old(watched: Watched) -> None:
    assert watched.found() == []


async def test_a_refusal_is_told_for_ten_minutes(watched: Watched) -> None:
    await watched.pass_time(300)
    watched.counts.update({("SEND", "busy"): 2, ("FETCH", "busy"): 1})
    (found,) = watched.found()
    assert (found.level, found.link) == (Level.PROBLEM, "/settings")
    assert found.text == "Clients were refused with busy within 5m: SEND 2, FETCH 1."
    await watched.pass_time(RECENT_SECONDS - 2 * TICK_SECONDS)
    assert watched.found() != []
    await watched.pass_time(2 * TICK_SECONDS)
    assert watched.found() == []


@pytest.mark.parametrize("code", ["ok", "mailbox_not_found", "bad_request", "wrong_token", "denied"])
def test_errors_of_clients_are_no_findings(watched: Watched, code: str) -> None:
    watched.counts["SEND", code] += 5
    assert watched.found() == []


@pytest.mark.rule("S7")
def test_a_quota_names_the_tenants_on_all_doors(watched: Watched) -> None:
    for _ in range(3):
        watched.refusals.refuse("acme")
    watched.refusals.refuse("a/b")
    (found,) = watched.found()
    assert found.text == "Clients were refused with quota_exceeded within 1m: messages 4. Tenants: acme, a/b."
    assert found.link == "/tenants/acme"
    watched.counts["SEND", "quota_exceeded"] += 4
    (found,) = watched.found()
    assert "SEND 4. Tenants: acme, a/b." in found.text
