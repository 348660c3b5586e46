"""The operator's allow and deny lists, in SQL."""

import orjson

from mediator.store.session import Table
from pickup.mediation.records import AccessRule, Verdict


class AccessRules(Table):
    """See :class:`pickup.mediation.ports.AccessRules`."""

    def all(self) -> list[AccessRule]:
        rows = self._execute("SELECT name, verdict, note, created_at FROM access_rule ORDER BY created_at, name")
        return [AccessRule(name, Verdict(verdict), orjson.loads(note), at) for name, verdict, note, at in rows]

    def count(self) -> int:
        return int(self._session.one("SELECT count(*) FROM access_rule")[0])

    def put(self, rule: AccessRule) -> None:
        self._execute(
            "INSERT INTO access_rule (name, verdict, note, created_at) VALUES (?, ?, ?, ?) ON CONFLICT (name)"
            " DO UPDATE SET verdict = excluded.verdict, note = excluded.note, created_at = excluded.created_at",
            (rule.name, rule.verdict.value, orjson.dumps(rule.note), rule.created_at),
        )

    def remove(self, name: str, verdict: Verdict) -> bool:
        return bool(
            self._execute(
                "DELETE FROM access_rule WHERE name = ? AND verdict = ? RETURNING name", (name, verdict.value)
            )
        )
