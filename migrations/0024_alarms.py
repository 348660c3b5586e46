"""The problems of each instance, with when they began and ended, for a week."""

from peewee import PostgresqlDatabase


def up(migrator, db):
    postgres = isinstance(db, PostgresqlDatabase)
    text = 'TEXT COLLATE "C"' if postgres else "TEXT"
    clustered = "" if postgres else "WITHOUT ROWID"
    db.execute_sql(f"""
    CREATE TABLE alarm (
        instance {text} NOT NULL,
        code {text} NOT NULL,
        began_at BIGINT NOT NULL,
        ended_at BIGINT,
        finding TEXT NOT NULL,
        PRIMARY KEY (instance, code, began_at)
    ) {clustered}
    """)


def down(migrator, db):
    db.execute_sql("DROP TABLE alarm")
