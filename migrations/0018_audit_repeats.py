"""How often a refused act was repeated, and no whole addresses and ids of invitations in entries of before (A7)."""

import hashlib
import json

_NAMED = ("mail_address", "mailbox", "id")
"""Fields by which operations name a mailbox, an agent or an invitation."""
_PAGE = 1000


def up(migrator, db):
    db.execute_sql("ALTER TABLE audit_log ADD COLUMN times BIGINT NOT NULL DEFAULT 1")
    db.execute_sql("ALTER TABLE audit_log ADD COLUMN last_at BIGINT")
    read = f"SELECT no, fields FROM audit_log WHERE no > {db.param} ORDER BY no LIMIT {_PAGE}"
    change = f"UPDATE audit_log SET fields = {db.param} WHERE no = {db.param}"
    after = 0
    while rows := db.execute_sql(read, (after,)).fetchall():
        for no, text in rows:
            fields = json.loads(text)
            shorter = {name: _shorten(name, value) for name, value in fields.items()}
            if shorter != fields:
                db.execute_sql(change, (json.dumps(shorter, ensure_ascii=False, separators=(",", ":")), no))
        after = rows[-1][0]


def _shorten(name, value):
    if name not in _NAMED or not isinstance(value, str) or "…" in value:
        return value
    return f"{value[: min(4, len(value) // 2)]}…{hashlib.sha256(value.encode()).hexdigest()[:8]}"


def down(migrator, db):
    db.execute_sql("ALTER TABLE audit_log DROP COLUMN last_at")
    db.execute_sql("ALTER TABLE audit_log DROP COLUMN times")
