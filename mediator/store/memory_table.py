"""A table of the in-memory twin: dictionaries that note how to take back what is done to them."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

K = TypeVar("K")
V = TypeVar("V")
Undo = list[Callable[[], object]]
_ABSENT = object()


class Undoable:
    """Changes dictionaries, and notes how to take that back."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo

    def _set(self, table: dict[K, V], key: K, value: V) -> None:
        self._undo.append(partial(_restore, table, key, table.get(key, _ABSENT)))
        table[key] = value

    def _pop(self, table: dict[K, V], key: K) -> None:
        # Order matters to those who read it, so what is taken back is the whole table.
        self._undo.append(partial(_restore_all, table, dict(table)))
        del table[key]


def _restore(table: dict[K, V], key: K, value: V | object) -> None:
    if value is _ABSENT:
        table.pop(key, None)
    else:
        table[key] = cast(V, value)


def _restore_all(table: dict[K, V], before: dict[K, V]) -> None:
    table.clear()
    table.update(before)
