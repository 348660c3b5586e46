"""What each instance did by minute for a day, and by ten minutes for a week."""

from peewee import PostgresqlDatabase


def up(migrator, db):
    postgres = isinstance(db, PostgresqlDatabase)
    blob = "BYTEA" if postgres else "BLOB"
    text = 'TEXT COLLATE "C"' if postgres else "TEXT"
    clustered = "" if postgres else "WITHOUT ROWID"
    db.execute_sql(f"""
    CREATE TABLE activity (
        instance {text} NOT NULL,
        step BIGINT NOT NULL,
        at BIGINT NOT NULL,
        means {blob} NOT NULL,
        PRIMARY KEY (instance, step, at)
    ) {clustered}
    """)
    db.execute_sql("CREATE INDEX activity_at ON activity (step, at)")


def down(migrator, db):
    db.execute_sql("DROP TABLE activity")
