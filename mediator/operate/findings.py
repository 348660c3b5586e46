"""What is wrong with the whole service now: findings with their remedies and the pages that help.

``mediator doctor`` and ``status``, the console's overview and the admin API show the same findings.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import quote

from mediator.http.health import HealthReport
from mediator.mailboxes.address import redact
from mediator.mailboxes.bounds import SECOND, Quota
from mediator.mailboxes.tables.backlog import MailboxBacklog
from mediator.operate.backlog import NEARLY, Backlog, BacklogTotals
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.units import format_count, format_duration, format_time

RECENT_SECONDS: Final = 600
"""How long refusals are reported."""
TICK_SECONDS: Final = 10
NAMED: Final = 3
"""Tenants, mailboxes or groups that one finding names."""

_CHECKS: Final[Mapping[str, tuple[str, str]]] = {
    "store": (
        "Nothing is stored or delivered until it answers. With PostgreSQL, look at the server and the network to it; "
        "with SQLite, at the disk. The service's log says more.",
        "/checks",
    ),
    "nats": ("Clients of NATS get no answers. Look at the NATS server and its log.", ""),
    "scheduler": (
        "Check the machine's clock. If it is right, confirm it: `mediator cleanup --confirm-clock`.",
        "/cleanup",
    ),
    "journal": ("Look at the disk, and at the service's log.", ""),
    "registry": ("Searches are answered from the registry as it was. The service's log says more.", "/agents"),
}
_QUOTA: Final = "Remove mail or have it read, or raise the quota."
_REFUSALS: Final[Mapping[str, tuple[str, str]]] = {
    "quota_exceeded": (_QUOTA, "/tenants"),
    "busy": ("Find out what is slow, raise max_pending or max_waiting, or add an instance.", "/settings"),
    "too_many_groups": ("Reuse group names; a group lives as long as its mailbox.", "/mailboxes"),
    "too_many_delayed": ("A group gave back too many messages with a delay: have it read them.", "/mailboxes"),
    "archive_backlog_full": ("Run `mediator pipeline archive`, or raise archive_limit.", "/pipeline"),
    "copy_refused": ("Read or remove copies, raise the quota, or end the rule: `mediator copy list`.", "/copies"),
    "storage_full": ("Free space on the disk. FETCH, ACK and DELETE still work.", "/cleanup"),
    "store_damaged": ("`mediator doctor` says which tables are damaged, docs/operations.md how to go on.", "/checks"),
    "unavailable": ("Look at the disk, or at PostgreSQL and the network to it.", ""),
    "uncertain": ("The database did not confirm commits. Look at it and at the network to it.", ""),
    "internal": ("The service's log says why. Please report it.", ""),
}
"""By the error's code, what to do, and where. Errors of clients, such as an unknown address, are not among them."""


class RecentRefusals:
    """Counts what clients were refused in the last minutes. Used on the event loop, but for :meth:`refuse`."""

    def __init__(self, counts: Callable[[], Counter[tuple[str, str]]]) -> None:
        """``counts`` returns how many requests were answered so far, by verb and outcome."""
        self._counts = counts
        self._by_tenant: Counter[str] = Counter()
        self._samples: deque[tuple[float, Counter[tuple[str, str]], Counter[str]]] = deque(
            maxlen=RECENT_SECONDS // TICK_SECONDS
        )
        self._sample()

    def refuse(self, tenant: str) -> None:
        """Count a message that a quota refused, on whatever door."""
        self._by_tenant[tenant] += 1

    async def tick(self) -> None:
        """Sample the counters; to be called each :data:`TICK_SECONDS`."""
        self._sample()

    def _sample(self) -> None:
        self._samples.append((time.monotonic(), self._counts(), Counter(self._by_tenant)))

    def findings(self) -> Iterator[Finding]:
        """Yield one for each kind of refusal."""
        at, counts, by_tenant = self._samples[0]
        since = format_duration(max(60, round(time.monotonic() - at)) * SECOND)
        tenants = Counter(self._by_tenant)
        tenants.subtract(by_tenant)
        by_code: dict[str, Counter[str]] = {}
        for (verb, code), count in (self._counts() - counts).items():
            by_code.setdefault(code, Counter())[verb] += count
        if "quota_exceeded" not in by_code and any(tenants.values()):
            by_code["quota_exceeded"] = Counter({"messages": tenants.total()})
        for code, verbs in by_code.items():
            if code not in _REFUSALS:
                continue
            advice, link = _REFUSALS[code]
            refused = ", ".join(f"{verb} {count}" for verb, count in verbs.most_common(NAMED))
            whose = ""
            if code == "quota_exceeded" and (named := [name for name, count in tenants.most_common(NAMED) if count]):
                whose = f" Tenants: {', '.join(named)}."
                link = _tenant_page(named[0])
            text = f"Clients were refused with {code} within {since}: {refused}.{whose}"
            yield Finding(Level.PROBLEM, text, advice, link, f"refused_{code}")


def readiness_findings(report: HealthReport) -> Iterator[Finding]:
    """Report the health checks."""
    if report.ready:
        yield Finding(Level.OK, f"The service is ready: {', '.join(report.checks)}.")
    for name, result in report.checks.items():
        if result != "ok":
            advice, link = _CHECKS.get(name, ("The service's log says more.", ""))
            yield Finding(Level.PROBLEM, f"{name}: {result}", advice, link, f"check_{name}")


def backlog_findings(
    backlog: Backlog | None, tenants: Iterable[str], quota_of: Callable[[str], Quota], lag_minutes: int
) -> Iterator[Finding]:
    """Report dead messages, groups that lag, and quotas that are used up or nearly."""
    if backlog is None:
        yield Finding(Level.NOTE, "What waits in the mailboxes is still being measured.", "Ask again in some minutes.")
        return
    yield from _tenant_quotas(backlog, tenants, quota_of)
    yield from _mailbox_quotas(backlog)
    if dead := backlog.total.dead:
        worst = backlog.most_dead[0]
        yield Finding(
            Level.PROBLEM,
            f"Dead: {format_count(dead, 'message')}, each delivered as often as its group allows, without an ACK. "
            f"Most are in {_names(backlog.most_dead)}.",
            "Mend the readers, then deliver them again or drop them: `mediator dead redrive`, `mediator dead drop`.",
            f"{_mailbox_page(worst)}/dead/{_quoted(max(worst.groups, key=lambda group: group.dead).name)}",
            "dead_messages",
        )
    if lagging := backlog.total.lagging:
        mailbox, group = backlog.lagging[0]
        yield Finding(
            Level.PROBLEM,
            f"Lagging: {format_count(lagging, 'group')}, for which messages have waited for "
            f"{format_duration(lag_minutes * 60 * SECOND)} or longer. Longest: group {group.name} of {_name(mailbox)}, "
            f"since {format_time((group.waiting_since or 0) / 1000)}.",
            "Its readers are too slow, too few, or not running. If nobody reads with the group any more, drop it: "
            "`mediator mailbox drop-group ADDRESS --group NAME`. Where readers come rarely, raise lag_minutes.",
            _mailbox_page(mailbox),
            "lagging_groups",
        )


def _tenant_quotas(backlog: Backlog, tenants: Iterable[str], quota_of: Callable[[str], Quota]) -> Iterator[Finding]:
    uses = {
        tenant: backlog.tenants.get(tenant, BacklogTotals()).quota_use(quota_of(tenant))
        for tenant in {*tenants, *backlog.tenants}
    }
    fullest = sorted(uses, key=lambda tenant: -uses[tenant][0])
    for low, high, level, words, advice in (
        (1.0, float("inf"), Level.PROBLEM, "used up, and what is above it is refused with quota_exceeded", _QUOTA),
        (NEARLY, 1.0, Level.NOTE, "nearly used up", _QUOTA),
    ):
        if found := [tenant for tenant in fullest if low <= uses[tenant][0] < high]:
            shown = ", ".join(f"tenant {tenant} {uses[tenant][1]}" for tenant in found[:NAMED])
            more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
            text = f"A quota is {words}: {shown}{more}."
            yield Finding(level, text, advice, _tenant_page(found[0]), "tenant_quota")


def _mailbox_quotas(backlog: Backlog) -> Iterator[Finding]:
    if full := backlog.total.full:
        at_quota = [mailbox for mailbox, use in backlog.fullest if use >= 1]
        yield Finding(
            Level.PROBLEM,
            f"At the quota of a mailbox: {format_count(full, 'mailbox', 'mailboxes')}, to which each SEND is refused "
            f"with quota_exceeded: {_names(at_quota)}.",
            "Have their messages read or remove some, or raise quotas.mailbox_messages or quotas.mailbox_bytes.",
            _mailbox_page(at_quota[0]),
            "mailbox_quota",
        )
    if nearly := [mailbox for mailbox, use in backlog.fullest if use < 1]:
        yield Finding(
            Level.NOTE,
            f"Nearly at the quota of a mailbox: {_names(nearly)}.",
            "Have their messages read or remove some, or raise quotas.mailbox_messages or quotas.mailbox_bytes.",
            _mailbox_page(nearly[0]),
        )


def _names(mailboxes: Iterable[MailboxBacklog]) -> str:
    return ", ".join(_name(mailbox) for mailbox in list(mailboxes)[:NAMED])


def _name(mailbox: MailboxBacklog) -> str:
    """Name a mailbox to all operators: who may not read payloads must not learn its address (A7)."""
    return f"{redact(mailbox.address)} (id:{mailbox.id}, tenant {mailbox.tenant})"


def _tenant_page(tenant: str) -> str:
    return f"/tenants/{_quoted(tenant)}"


def _mailbox_page(mailbox: MailboxBacklog) -> str:
    return f"/mailboxes/{_quoted(mailbox.tenant)}/id:{mailbox.id}"


def _quoted(text: str) -> str:
    return quote(text, safe="")
