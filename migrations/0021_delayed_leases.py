"""Which messages a group gave back with a delay: they take no room among its leases (F6)."""


def up(migrator, db):
    db.execute_sql("ALTER TABLE lease ADD COLUMN delayed SMALLINT NOT NULL DEFAULT 0")
    db.execute_sql("DROP INDEX lease_due")
    # Whole, with the dead: SQLite reads no count from an index that leaves rows out by a column it does not hold.
    db.execute_sql("CREATE INDEX lease_state ON lease (group_no, dead, delayed, lane, until, msg_id)")


def down(migrator, db):
    db.execute_sql("DROP INDEX lease_state")
    db.execute_sql("CREATE INDEX lease_due ON lease (group_no, until) WHERE dead = 0")
    db.execute_sql("ALTER TABLE lease DROP COLUMN delayed")
