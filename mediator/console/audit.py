"""The page of the audit log: who changed what, and which payloads they read."""

from datetime import UTC, datetime
from typing import Final

from mediator.console.pages import Page, Shown, Visit
from mediator.errors import BadRequestError

PER_PAGE: Final = 50
FIELDS: Final = ("actor", "operation", "since", "until", "result")


async def _show(visit: Visit) -> Shown:
    asked = {name: visit.text(name) for name in FIELDS}
    wanted = asked | {name: _seconds(name, asked[name]) for name in ("since", "until")}
    before = visit.number("before", 0, 0, 2**53) or None
    found = await visit.run("audit-list", **wanted, before=before, limit=PER_PAGE)
    acts = [each.name for each in visit.operations.all() if each.is_act]
    return {"asked": asked, "found": found, "acts": acts, "first": before is None}


def _seconds(name: str, text: str) -> float | None:
    """Return Unix seconds of what a browser's field for a time sends, which is taken as UTC."""
    try:
        if not text:
            return None
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        raise BadRequestError(name, "expected a time such as 2026-01-31T12:00") from None


PAGES: Final = (Page("/audit", "Audit log", _show, group="Service"),)
