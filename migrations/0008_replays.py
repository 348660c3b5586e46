"""Envelopes that were taken, so that none of them changes anything twice."""

from peewee import PostgresqlDatabase


def up(migrator, db):
    postgres = isinstance(db, PostgresqlDatabase)
    blob, clustered = ("BYTEA", "") if postgres else ("BLOB", "WITHOUT ROWID")
    statements = f"""
    CREATE TABLE replay (
        sender {blob} NOT NULL,
        mark {blob} NOT NULL,
        seq BIGINT NOT NULL,
        until BIGINT NOT NULL,
        PRIMARY KEY (sender, mark)
    ) {clustered};
    CREATE INDEX replay_seq ON replay (sender, seq);
    CREATE INDEX replay_until ON replay (until)
    """
    for statement in statements.split(";"):
        db.execute_sql(statement)


def down(migrator, db):
    db.execute_sql("DROP TABLE replay")
