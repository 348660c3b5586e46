"""What operators are told of refusals and quotas: when, how urgent, and where to go."""

from collections import Counter

import pytest

from mediator.mailboxes.bounds import Quota
from mediator.operate import findings
from mediator.operate.backlog import Backlog, BacklogTotals
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.findings import RECENT_SECONDS, TICK_SECONDS, RecentRefusals, backlog_findings

NO_QUOTA = Quota()


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


def quotas(backlog: Backlog | None, quota: Quota = NO_QUOTA, *tenants: str) -> list[tuple[Level, str, str]]:
    found = backlog_findings(backlog, tenants, lambda _tenant: quota, 10)
    return [(each.level, each.text, each.link) for each in found]


def held(**tenants: BacklogTotals) -> Backlog:
    return Backlog(0, tenants=tenants)


def test_what_is_not_measured_yet_is_no_problem() -> None:
    ((level, _, link),) = quotas(None)
    assert (level, link) == (Level.NOTE, "")


def test_an_empty_store_has_no_findings() -> None:
    assert quotas(Backlog(0), Quota(messages=1, bytes=1, mailboxes=1), "default") == []
    assert quotas(held(acme=BacklogTotals(messages=10**9, mailboxes=10**6))) == [], "without a quota"


@pytest.mark.rule("S7", "M1")
@pytest.mark.parametrize(
    ("totals", "shown"),
    [
        (BacklogTotals(messages=60, delayed=31), "tenant acme 91 of 100 messages"),
        (BacklogTotals(bytes=1900 * 1024), "tenant acme 1.9 MiB of 2.0 MiB"),
        (BacklogTotals(mailboxes=19), "tenant acme 19 of 20 mailboxes"),
    ],
)
def test_a_quota_is_a_note_before_it_is_a_problem(totals: BacklogTotals, shown: str) -> None:
    quota = Quota(messages=100, bytes=2 << 20, mailboxes=20)
    assert quotas(held(acme=totals), quota) == [(Level.NOTE, f"A quota is nearly used up: {shown}.", "/tenants/acme")]


@pytest.mark.rule("S7")
def test_many_full_tenants_are_one_finding() -> None:
    full = held(**{f"t{number}": BacklogTotals(messages=number) for number in range(10, 16)})
    ((level, text, link),) = quotas(full, Quota(messages=10))
    assert (level, link) == (Level.PROBLEM, "/tenants/t15")
    named = ", ".join(f"tenant t{number} {number} of 10 messages" for number in (15, 14, 13))
    assert text.endswith(f": {named} and 3 more.")
