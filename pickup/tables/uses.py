"""What was counted of connections and hours, in SQL."""

from collections.abc import Mapping, Sequence

from mediator.store.session import Table
from pickup.mediation.records import TRAFFIC, ConnectionUse, Traffic

_COLUMNS = ", ".join(TRAFFIC)
_FACTS = ("transport", "pickup", "client")
_VALUES = ", ".join("?" for _ in TRAFFIC)


def _sums(table: str) -> str:
    return ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in TRAFFIC)


def _row(traffic: Traffic) -> list[int]:
    return [getattr(traffic, name) for name in TRAFFIC]


class Uses(Table):
    """See :class:`pickup.mediation.ports.Uses`."""

    def holders(self, mailbox_nos: Sequence[int]) -> dict[int, int]:
        sql = "SELECT mailbox_no, no FROM connection WHERE {among}"
        return dict(map(tuple, self._for_each(sql, "mailbox_no", mailbox_nos)))

    def add(self, uses: Sequence[ConnectionUse]) -> None:
        there = {
            no for (no,) in self._for_each("SELECT no FROM connection WHERE {among}", "no", [use.no for use in uses])
        }
        # Counts that came without a request change no facts.
        facts = ", ".join(f"{name} = coalesce(nullif(excluded.{name}, ''), connection_use.{name})" for name in _FACTS)
        self._dialect.many(
            f"INSERT INTO connection_use (connection_no, seen_at, {', '.join(_FACTS)}, {_COLUMNS})"
            f" VALUES (?, ?, ?, ?, ?, {_VALUES}) ON CONFLICT (connection_no) DO UPDATE SET"
            f" {_sums('connection_use')}, {facts}, seen_at = CASE WHEN excluded.seen_at > connection_use.seen_at"
            " THEN excluded.seen_at ELSE connection_use.seen_at END",
            [
                (use.no, use.seen_at, use.transport, use.pickup, use.client, *_row(use.traffic))
                for use in uses
                if use.no in there
            ],
        )

    def of(self, nos: Sequence[int]) -> dict[int, ConnectionUse]:
        sql = f"SELECT connection_no, seen_at, {', '.join(_FACTS)}, {_COLUMNS} FROM connection_use WHERE {{among}}"
        return {
            no: ConnectionUse(no, seen_at, transport, pickup, client, Traffic(*counts))
            for no, seen_at, transport, pickup, client, *counts in self._for_each(sql, "connection_no", nos)
        }

    def add_hours(self, hours: Mapping[int, Traffic], forget_before: int) -> None:
        if not hours:
            return
        self._dialect.many(
            f"INSERT INTO didcomm_hour (began_at, {_COLUMNS}) VALUES (?, {_VALUES})"
            f" ON CONFLICT (began_at) DO UPDATE SET {_sums('didcomm_hour')}",
            [(began_at, *_row(hours[began_at])) for began_at in sorted(hours)],
        )
        self._execute("DELETE FROM didcomm_hour WHERE began_at < ?", (forget_before,))

    def hours(self, since: int) -> list[tuple[int, Traffic]]:
        rows = self._execute(
            f"SELECT began_at, {_COLUMNS} FROM didcomm_hour WHERE began_at >= ? ORDER BY began_at", (since,)
        )
        return [(began_at, Traffic(*counts)) for began_at, *counts in rows]
