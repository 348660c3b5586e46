"""The operator's allow and deny lists of the DIDComm door."""

from peewee import PostgresqlDatabase


def up(migrator, db):
    postgres = isinstance(db, PostgresqlDatabase)
    text, blob = ('TEXT COLLATE "C"', "BYTEA") if postgres else ("TEXT", "BLOB")
    db.execute_sql(
        f"CREATE TABLE access_rule (name {text} PRIMARY KEY, verdict {text} NOT NULL, note {blob} NOT NULL,"
        " created_at BIGINT NOT NULL)"
    )


def down(migrator, db):
    db.execute_sql("DROP TABLE access_rule")
