"""Parses source code of tests and of the project, whatever other tests left behind."""

import ast
import gc


def parse(text: str, name: str = "<unknown>") -> ast.Module:
    """Return the tree of a module.

    Nothing is collected meanwhile: a warning about what was left open is shown with its traceback, which is parsed too,
    and one parsing within another makes CPython 3.11 raise SystemError.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text, name)
    finally:
        if was_enabled:
            gc.enable()
