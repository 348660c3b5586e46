"""The key that authenticates what services on one database and their gateways tell each other over NATS."""

from peewee import PostgresqlDatabase


def up(migrator, db):
    binary = "BYTEA" if isinstance(db, PostgresqlDatabase) else "BLOB"
    db.execute_sql(f"CREATE TABLE control_key (no INTEGER PRIMARY KEY CHECK (no = 1), key {binary} NOT NULL)")


def down(migrator, db):
    db.execute_sql("DROP TABLE control_key")
