"""Finds what is shipped with the program beside its modules."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped_folder(name: str) -> Path:
    """Return a folder of the checkout, such as ``migrations``; in an installed package it is ``_migrations``."""
    installed = _PACKAGE / f"_{name}"
    return installed if installed.is_dir() else _PACKAGE.parent / name
