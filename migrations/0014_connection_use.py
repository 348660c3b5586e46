"""What is counted of each DIDComm connection, and of all of them by the hour."""

from peewee import PostgresqlDatabase

COUNTS = ("queued", "queued_bytes", "delivered", "delivered_bytes", "acknowledged", "acknowledged_bytes")


def up(migrator, db):
    postgres = isinstance(db, PostgresqlDatabase)
    given = "BIGINT PRIMARY KEY" if postgres else "INTEGER PRIMARY KEY"
    facts = "transport TEXT NOT NULL, pickup TEXT NOT NULL, client TEXT NOT NULL"
    counts = ", ".join(f"{name} BIGINT NOT NULL" for name in COUNTS)
    db.execute_sql(f"CREATE TABLE connection_use (connection_no {given}, seen_at BIGINT NOT NULL, {facts}, {counts})")
    db.execute_sql(f"CREATE TABLE didcomm_hour (began_at {given}, {counts})")


def down(migrator, db):
    for table in ("didcomm_hour", "connection_use"):
        db.execute_sql(f"DROP TABLE {table}")
