"""The map of the code and the guide to adding name files and folders that exist; what pages import exists too."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from mediator.parts import Part

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
GUIDE = (ROOT / "docs/extend.md").read_text()


@pytest.mark.parametrize("page", [PAGE, GUIDE], ids=["map", "guide"])
def test_paths_on_the_page_exist(page: str) -> None:
    rooms = "conformance|mediator|pickup|registry|pipeline|migrations|tests|benchmarks"
    paths = set(re.findall(rf"`((?:{rooms})/[\w./-]*)`", page))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_room_is_on_the_page() -> None:
    rooms = [f"mediator/{path.parent.name}/" for path in (ROOT / "mediator").glob("*/__init__.py")]
    assert [room for room in rooms if f"`{room}`" not in PAGE] == []


def test_the_part_of_the_guide_is_one() -> None:
    (code,) = re.findall(r"```python\n(# echo_door.py\n.*?)```", GUIDE, re.DOTALL)
    module: dict[str, Any] = {"__name__": "echo_door"}
    exec(code, module)
    assert isinstance(module["part"], Part)
    assert module["part"].settings() is module["EchoSettings"]


def test_what_pages_import_exists() -> None:
    pytest.importorskip("pyarrow", reason="pages import from the pipeline")
    found = set()
    for page in (ROOT / "docs").glob("*.md"):
        found.update(
            re.findall(r"^from ((?:mediator|pickup|registry|pipeline)[\w.]*) import (\w+)$", page.read_text(), re.M)
        )
    assert found
    assert [name for name in sorted(found) if not hasattr(importlib.import_module(name[0]), name[1])] == []
