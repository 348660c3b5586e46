"""Tests have short names, and touch nothing of ours that is private.

The files are read, not run, so this holds whichever tests were chosen.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.harness.parsing import parse

TESTS = Path(__file__).parent
LONGEST = 59
OURS = ("conformance", "mediator", "pickup", "registry", "pipeline")
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}
"""Documented names of the standard library that begin with an underscore."""
OF_LIBRARIES = {
    "conftest.py": {"_split_scope"},
    "harness/client.py": {"_pending", "_pending_data_size"},
    "harness/spark.py": {"_gateway"},
    "harness/wire.py": {"_transport", "_io_writer"},
    "slow/spark/executors.py": {"_jsc"},
    "unit/test_dids_parsing.py": {"_hash_encoded_doc"},
    "unit/test_private_names.py": {"_process_msg"},
}
"""What libraries show nowhere else, by file."""


TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
MAY_BE_PRIVATE = re.compile(r"\._[^_]|import.*\b_[^_]|^\s+_\w+,$", re.MULTILINE)
"""Found in each file that touches something private; most have none, and are not parsed."""


def texts() -> Iterator[tuple[str, str]]:
    """Return all files of the tests."""
    for path in sorted(TESTS.rglob("*.py")):
        yield str(path.relative_to(TESTS)), path.read_text(encoding="utf-8")


def private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return the line and the name of each private attribute that is reached from outside, and of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            yield from ((node.lineno, name.name) for name in node.names if name.name[0] == "_" != name.name[1])


def test_names_are_shorter_than_60_characters():
    long = [f"{file} {name}" for file, text in texts() for name in TEST.findall(text) if len(name) > LONGEST]
    assert not long, "\n".join(long)


def test_nothing_private_of_ours_is_touched():
    touched = [
        f"{file}:{line} {name}"
        for file, text in texts()
        if MAY_BE_PRIVATE.search(text.replace("self._", "").replace("cls._", ""))
        for line, name in private(parse(text))
        if name not in PUBLIC | OF_LIBRARIES.get(file, set())
    ]
    assert not touched, "\n".join(touched)
