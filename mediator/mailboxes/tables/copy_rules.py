"""The rules by which mail is copied, in SQL; a store remembers them between transactions (C1)."""

from collections.abc import Sequence
from typing import Literal

from mediator.mailboxes.copy_rule import UNREAD, CopyCounts, CopyRule, decode, encode
from mediator.mailboxes.session import Session, Table

Outcome = Literal["matched", "copied", "dropped", "refused"]


class CopyRules(Table):
    """The rules that were made while a service ran, and those of the settings."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._cache = session.copy_rules
        self._counted: list[tuple[CopyCounts, Outcome]] = []
        if session.copy_revision is None:
            self._follow("")
        elif session.copy_revision != self._cache.revision:
            self._cache.load(session.copy_revision, self.stored())

    def lock(self) -> None:
        """Keep other instances from changing rules until the transaction ends."""
        self._follow(self._dialect.lock())

    def _follow(self, lock: str) -> None:
        revision = int(self._session.one(f"SELECT revision FROM copy_revision WHERE no = 1 {lock}")[0])
        if revision != self._cache.revision:
            self._cache.load(revision, self.stored())

    def of(self, tenant: str) -> Sequence[CopyRule]:
        """Return the rules of a tenant in order of their names; most services have none, so it reads nothing."""
        return self._cache.by_tenant.get(tenant, ())

    def stored(self) -> list[CopyRule]:
        """Read those that are not in the settings."""
        return [decode(*row) for row in self._execute("SELECT tenant, name, state FROM copy_rule ORDER BY 1, 2")]

    def add(self, rule: CopyRule) -> None:
        """Keep a new rule."""
        values = rule.tenant, rule.name, encode(rule)
        self._execute("INSERT INTO copy_rule (tenant, name, state) VALUES (?, ?, ?)", values)
        self._revise()

    def remove(self, rules: Sequence[CopyRule]) -> None:
        """Remove rules."""
        for rule in rules:
            self._execute("DELETE FROM copy_rule WHERE tenant = ? AND name = ?", (rule.tenant, rule.name))
        self._revise()

    def _revise(self) -> None:
        """Count a change, so that other instances read the rules again with their next transaction."""
        cache = self._cache

        def forget() -> None:
            cache.revision = UNREAD

        self._session.on_rollback.append(forget)
        sql = "UPDATE copy_revision SET revision = revision + 1 WHERE no = 1 RETURNING revision"
        cache.load(int(self._session.one(sql)[0]), self.stored())

    def count(self, rule: CopyRule, outcome: Outcome) -> None:
        """Count what became of a message that a rule matched."""
        counts = self._cache.counts[rule.tenant, rule.name]
        setattr(counts, outcome, getattr(counts, outcome) + 1)
        if not self._counted:
            self._session.on_rollback.append(self._take_back)
        self._counted.append((counts, outcome))

    def _take_back(self) -> None:
        for counts, outcome in self._counted:
            setattr(counts, outcome, getattr(counts, outcome) - 1)
