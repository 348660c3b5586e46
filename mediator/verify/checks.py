"""What a check of ``mediator verify`` is, and the usual one: rows that a SELECT finds, in short snapshots."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mediator.mailboxes.rows import Row
from mediator.store.snapshots import Ask, Snapshots

SLICE_ROWS = 20_000
"""Rows of a table that one snapshot covers, unless one mailbox alone has more."""
EXAMPLES = 5
"""Examples of each kind of damage that are reported."""
_LAST = 2**63 - 1

RESTORE = "Restore a backup; docs/howto/verify.md says what can be saved without one."
RECOUNT = "Stop the service and count anew with the statements of docs/howto/verify.md; no mail is lost."


@dataclass(frozen=True, slots=True)
class DamageKind:
    """A kind of damage: its stable code, one plain sentence, and what to do."""

    code: str
    text: str
    advice: str = RESTORE


@dataclass(slots=True)
class Damage:
    """How often a kind of damage was found, with a few places."""

    kind: DamageKind
    count: int = 0
    examples: tuple[str, ...] = ()

    def add(self, count: int, examples: Sequence[str]) -> None:
        """Count more of it."""
        self.count += count
        self.examples = (*self.examples, *examples)[:EXAMPLES]


@dataclass(frozen=True, slots=True)
class Installation:
    """What is verified: a database, and the data directory beside it."""

    database: Snapshots
    data_dir: Path


Progress = Callable[[float], None]
"""Is told which part of a check is done, from 0 to 1."""


class SkippedError(Exception):
    """A check cannot be made here; the text says why."""


class VerifyCheck:
    """Looks for kinds of damage. A part brings its own from ``Part.verify_checks``."""

    title: str
    """What is looked at, for the progress bar."""
    kinds: Sequence[DamageKind]

    def run(self, installation: Installation, progress: Progress) -> Iterator[Damage]:
        """Yield what is found; raises :class:`SkippedError`, and what the database raises."""
        raise NotImplementedError


class RowCheck(VerifyCheck):
    """Finds rows by a SELECT over ranges of a column, each in a snapshot of its own.

    The SELECT has ``{column}`` for each column that is to be within the range, written ``{mailbox_no}``, and returns
    the values of ``example``, a format with numbered fields.
    """

    def __init__(
        self,
        kind: DamageKind,
        ranges: str,
        select: str,
        example: str,
        *,
        judge: Callable[[Row], bool] | None = None,
        slice_rows: int = SLICE_ROWS,
        even_empty: bool = False,
    ) -> None:
        """``ranges``: ``table.column`` whose rows bound a slice, several joined by spaces.

        ``judge`` decides in Python whether a row that was selected is damaged; ``even_empty``: the SELECT finds damage
        also where the tables have no rows.
        """
        self.kinds = (kind,)
        self.title = f"{ranges.partition('.')[0]}: {kind.code}"
        self._ranges = [tuple(each.split(".")) for each in ranges.split()]
        self._select = select
        self._example = example
        self._judge = judge
        self._slice_rows = slice_rows
        self._even_empty = even_empty

    def run(self, installation: Installation, progress: Progress) -> Iterator[Damage]:
        """See :class:`VerifyCheck`."""
        after = last = -1
        while True:
            with installation.database.open() as ask:
                if last < 0:
                    last = max(self._last(ask, *each) for each in self._ranges)
                    if not last and not self._even_empty:
                        return
                until = min(self._until(ask, after, *each) for each in self._ranges)
                rows = self._rows(ask, after, until)
            if rows:
                found = Damage(self.kinds[0])
                found.add(len(rows), [self._example.format(*row) for row in rows[:EXAMPLES]])
                yield found
            if until == _LAST:
                return
            after = until
            progress(min(1.0, after / max(last, 1)))

    def _last(self, ask: Ask, table: str, column: str) -> int:
        return int(ask(f"SELECT coalesce(max({column}), 0) FROM {table}", ())[0][0])

    def _until(self, ask: Ask, after: int, table: str, column: str) -> int:
        sql = f"SELECT {column} FROM {table} WHERE {column} > ? ORDER BY {column} LIMIT 1 OFFSET ?"
        found = ask(sql, (after, self._slice_rows))
        return int(found[0][0]) if found else _LAST

    def _rows(self, ask: Ask, after: int, until: int) -> list[Row]:
        parts = self._select.split("{")
        sql = parts[0]
        for part in parts[1:]:
            column, _, rest = part.partition("}")
            sql += f"{column} > ? AND {column} <= ?{rest}"
        rows = ask(sql, (after, until) * (len(parts) - 1))
        return rows if self._judge is None else [row for row in rows if self._judge(row)]


def orphans(kind: DamageKind, table: str, column: str, parent: str, key: str = "no", where: str = "") -> RowCheck:
    """Return a check for rows whose ``column`` names no row of ``parent``."""
    return RowCheck(
        kind,
        f"{table}.{column}",
        f"SELECT {column}, count(*) FROM {table} WHERE {{{column}}}{where}"
        f" AND NOT EXISTS (SELECT 1 FROM {parent} WHERE {parent}.{key} = {table}.{column}) GROUP BY {column}",
        f"{table}: {{1}} of {parent} {{0}}",
    )
