"""Runs the checks of the core and of the installed parts, and sums up what they find."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from mediator.errors import StoreDamagedError
from mediator.settings.settings import Settings
from mediator.store.snapshots import open_snapshots
from mediator.verify.checks import Damage, Installation, SkippedError, VerifyCheck
from mediator.verify.database import PAGES, SCHEMA, Pages, Schema, mailbox_checks
from mediator.verify.journal import Journal


@dataclass(slots=True)
class VerifyReport:
    """What a run of ``verify`` found."""

    damage: list[Damage] = field(default_factory=list)
    """Each kind once, in the order of the checks."""
    checks: int = 0
    """How many checks were made."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Checks that could not be made, and why."""
    seconds: float = 0.0

    def add(self, found: Damage) -> None:
        """Add damage to what is known of its kind."""
        for known in self.damage:
            if known.kind == found.kind:
                known.add(found.count, found.examples)
                return
        self.damage.append(found)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "damage": [
                {
                    "code": found.kind.code,
                    "text": found.kind.text,
                    "advice": found.kind.advice,
                    "count": found.count,
                    "examples": list(found.examples),
                }
                for found in self.damage
            ],
            "checks": self.checks,
            "skipped": [{"check": title, "reason": reason} for title, reason in self.skipped],
            "seconds": round(self.seconds, 3),
        }


def all_checks(settings: Settings, of_parts: Sequence[VerifyCheck]) -> Sequence[VerifyCheck]:
    """Return the checks of the core and of the parts."""
    return [Schema(settings.migrations_of_parts), Pages(), *mailbox_checks(), *of_parts, Journal()]


def verify(
    settings: Settings, checks_of_parts: Sequence[VerifyCheck], on_progress: Callable[[str, float], None]
) -> VerifyReport:
    """Check the database and the journal of an installation, which are only read, whether a service runs or not.

    ``on_progress`` is told the title of each check and which part of all is done, from 0 to 1. Raises
    :class:`SetupError` when there is no database and :class:`UnavailableError` when it does not answer.
    """
    report = VerifyReport()
    began = perf_counter()
    checks = all_checks(settings, checks_of_parts)
    database = open_snapshots(settings.data_dir, settings.store_url)
    try:
        installation = Installation(database, settings.data_dir)
        for number, check in enumerate(checks):

            def tell(part: float, number: int = number, title: str = check.title) -> None:
                on_progress(title, (number + part) / len(checks))

            tell(0.0)
            try:
                for found in check.run(installation, tell):
                    report.add(found)
                report.checks += 1
            except SkippedError as reason:
                report.skipped.append((check.title, str(reason)))
            except StoreDamagedError as error:
                unreadable = Damage(PAGES)
                unreadable.add(1, [f"{check.title}: {error}"])
                report.add(unreadable)
            if any(found.kind is SCHEMA for found in report.damage):
                report.skipped += [(other.title, "the schema is not complete") for other in checks[number + 1 :]]
                break
    finally:
        database.close()
    report.seconds = perf_counter() - began
    return report
