"""The key that send-only addresses are made with."""

import secrets

from peewee import PostgresqlDatabase


def up(migrator, db):
    postgres = isinstance(db, PostgresqlDatabase)
    binary, place = ("BYTEA", "%s") if postgres else ("BLOB", "?")
    db.execute_sql(f"CREATE TABLE send_only_key (no INTEGER PRIMARY KEY CHECK (no = 1), key {binary} NOT NULL)")
    db.execute_sql(f"INSERT INTO send_only_key (no, key) VALUES (1, {place})", (secrets.token_bytes(32),))


def down(migrator, db):
    db.execute_sql("DROP TABLE send_only_key")
