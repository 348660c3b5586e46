"""Refuses a second class of the same name: ``python -m tests.class_names``, run by ``make check``.

One name has one meaning in all packages; names that begin with ``_`` belong to their module. Two classes may share a
name only as an interface (a ``Protocol``) and an implementation that has all its methods and attributes.

The client shows the service's things from outside, under the names that the service has for them, and once more for
programs without an event loop: each of the two views is a world of its own.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("mediator", "pickup", "pipeline", "registry")
VIEWS = ("mediator/client/sync.py", "mediator/client/")


def repeated() -> Iterator[str]:
    """Say which class names are defined more than once, and where."""
    found: defaultdict[tuple[str, str], list[tuple[str, ast.ClassDef]]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            where = str(path.relative_to(ROOT))
            view = next((view for view in VIEWS if where.startswith(view)), "")
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[view, node.name].append((where, node))
    for (_, name), definitions in sorted(found.items()):
        if len(definitions) > 1 and not _is_interface_pair([node for _, node in definitions]):
            yield f"{name}: {', '.join(where for where, _ in definitions)}"


def _is_interface_pair(nodes: list[ast.ClassDef]) -> bool:
    interfaces = [node for node in nodes if any(ast.unparse(base).startswith("Protocol") for base in node.bases)]
    if len(interfaces) != 1:
        return False
    wanted = _members(interfaces[0])
    # A class with bases may inherit some of them; mypy checks those where it is used.
    return all(node.bases or wanted <= _members(node) for node in nodes if node is not interfaces[0])


def _members(node: ast.ClassDef) -> set[str]:
    """Return the methods of a class, and the attributes that it or its ``__init__`` assigns."""
    found = set()
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(inner.name)
            case ast.Name(ctx=ast.Store()):
                found.add(inner.id)
            case ast.Attribute(ctx=ast.Store()):
                found.add(inner.attr)
    return found


def main() -> None:
    """Print what is wrong and exit with 1, or do nothing."""
    wrong = list(repeated())
    for line in wrong:
        print(f"class defined more than once: {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
