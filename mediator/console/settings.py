"""The page of the settings in force: each option with its value, where that came from, and what it means."""

import json
from itertools import groupby
from typing import Any, Final

from mediator.console.pages import Page, Shown, Visit
from mediator.ops.operations import Answer


async def _show(visit: Visit) -> Shown:
    asked = {"text": visit.text("text"), "from": visit.text("from")}
    options = (await visit.run("settings"))["options"]
    found = [each | {"value": _written(each["value"])} for each in options]
    found = [each for each in found if _matches(each, asked["text"].lower().split())]
    if asked["from"]:
        found = [each for each in found if each["source"] != "default"]
    ordered = sorted(found, key=_section)
    sections = [(section, list(some)) for section, some in groupby(ordered, key=_section)]
    return {"asked": asked, "sections": sections, "count": len(found), "all": len(options)}


def _section(option: Answer) -> str:
    return str(option["option"]).rpartition(".")[0]


def _matches(option: Answer, words: list[str]) -> bool:
    text = " ".join(map(str, option.values())).lower()
    return all(word in text for word in words)


def _written(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


PAGES: Final = (Page("/settings", "Settings", _show, group="Service"),)
