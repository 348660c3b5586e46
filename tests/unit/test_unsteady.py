"""Tests that fail once: told apart from those that fail again (``tests/unsteady.py``)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONCE = """
from pathlib import Path

def test_once():
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        print("the first time")
        raise AssertionError
    print("the second time")
"""


ALWAYS = "def test_always(): assert False"


@pytest.mark.parametrize(
    ("files", "processes", "unsteady"),
    [
        ({"test_a": ONCE}, 0, 1),
        ({"test_a": ONCE, "test_b": ONCE, "test_c": ONCE}, 2, 3),
        ({"test_a": "def test_passes(): pass"}, 0, 0),
    ],
    ids=["one", "three in two processes", "none"],
)
def test_what_passes_alone_is_excused(tmp_path: Path, files: dict[str, str], processes: int, unsteady: int) -> None:
    code, printed = run(tmp_path, files, processes)
    assert code == 0, printed
    assert printed.count("UNSTEADY") == unsteady, printed
    for moment in ("the first time", "the second time"):
        assert (moment in printed) is (unsteady > 0), printed


@pytest.mark.parametrize(
    ("files", "processes"),
    [
        ({"test_a": ONCE, "test_b": ALWAYS}, 2),
        ({f"test_{letter}": ONCE for letter in "abcd"}, 0),
        ({"test_a": "import nothing_of_this_name"}, 0),
        ({"test_a": "import nothing_of_this_name"}, 2),
    ],
    ids=["one fails again", "four", "not collected", "not collected in two processes"],
)
def test_all_else_fails_the_run(tmp_path: Path, files: dict[str, str], processes: int) -> None:
    code, printed = run(tmp_path, files, processes)
    assert code != 0, printed


def run(folder: Path, files: dict[str, str], processes: int) -> tuple[int, str]:
    """Run pytest on these files, without plugins that are slow to load; return its status and what it printed."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.unsteady", "-n", str(processes), str(folder)]
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    return ended.returncode, ended.stdout
