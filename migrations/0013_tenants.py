"""Tenants that are made while the service runs, and the number of the last change to them."""


def up(migrator, db):
    db.execute_sql("CREATE TABLE tenant (name TEXT PRIMARY KEY, state TEXT NOT NULL)")
    db.execute_sql("CREATE TABLE tenant_revision (no INTEGER PRIMARY KEY CHECK (no = 1), revision BIGINT NOT NULL)")
    db.execute_sql("INSERT INTO tenant_revision (no, revision) VALUES (1, 0)")


def down(migrator, db):
    db.execute_sql("DROP TABLE tenant_revision")
    db.execute_sql("DROP TABLE tenant")
