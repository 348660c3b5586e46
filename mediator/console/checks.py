"""The page of backups and checks: what there is, how far a run is, and what the last check found."""

from typing import Final

from mediator.console.pages import Page, Shown, Visit


async def _show(visit: Visit) -> Shown:
    backups, check = await visit.run("backup-list"), (await visit.run("verify-state"))["task"]
    tasks = [task for task in (backups["task"], check) if task is not None]
    return {"backups": backups, "check": check, "running": any(task["state"] == "running" for task in tasks)}


PAGES: Final = (Page("/checks", "Backups and checks", _show, "Service"),)
