"""Local time of a report, with one fixed offset from UTC, so that no hour is repeated or skipped."""

from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Self


@dataclass(frozen=True, slots=True)
class LocalClock:
    """Formats times in one time zone."""

    zone: tzinfo = UTC

    @classmethod
    def of_this_machine(cls, when: datetime) -> Self:
        """Return the machine's own, with the offset that it has at a moment."""
        zone = when.astimezone().tzinfo
        assert zone is not None, "astimezone gives one"
        return cls(zone)

    def name(self, when: datetime) -> str:
        """Return what the clock is called: ``UTC``, ``CET (UTC+01:00)``."""
        local = when.astimezone(self.zone)
        if not local.utcoffset():
            return "UTC"
        return f"{local.tzname()} (UTC{local.isoformat()[-6:]})"

    def moment(self, when: datetime) -> str:
        """Return a time to the minute."""
        return f"{when.astimezone(self.zone):%Y-%m-%d %H:%M}"

    def plain(self, when: datetime) -> datetime:
        """Return what the clock shows, for plots: they know no zones."""
        return when.astimezone(self.zone).replace(tzinfo=None)
