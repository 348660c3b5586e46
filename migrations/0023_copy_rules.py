"""Rules by which mail is copied, and the number of the last change to them."""

from peewee import PostgresqlDatabase


def up(migrator, db):
    text = 'TEXT COLLATE "C"' if isinstance(db, PostgresqlDatabase) else "TEXT"
    db.execute_sql(
        f"CREATE TABLE copy_rule (tenant {text} NOT NULL, name {text} NOT NULL, state TEXT NOT NULL,"
        " PRIMARY KEY (tenant, name))"
    )
    db.execute_sql("CREATE TABLE copy_revision (no INTEGER PRIMARY KEY CHECK (no = 1), revision BIGINT NOT NULL)")
    db.execute_sql("INSERT INTO copy_revision (no, revision) VALUES (1, 0)")


def down(migrator, db):
    db.execute_sql("DROP TABLE copy_revision")
    db.execute_sql("DROP TABLE copy_rule")
