"""The end of the output of a pipeline run that failed."""

from peewee import PostgresqlDatabase


def up(migrator, db):
    text = 'TEXT COLLATE "C"' if isinstance(db, PostgresqlDatabase) else "TEXT"
    db.execute_sql(f"ALTER TABLE pipeline_run ADD COLUMN log {text} NOT NULL DEFAULT ''")


def down(migrator, db):
    db.execute_sql("ALTER TABLE pipeline_run DROP COLUMN log")
