"""Groups that mail is pushed to, and how far it was pushed."""

from peewee import PostgresqlDatabase


def up(migrator, db):
    clustered = "" if isinstance(db, PostgresqlDatabase) else "WITHOUT ROWID"
    statements = f"""
    ALTER TABLE consumer ADD COLUMN push SMALLINT NOT NULL DEFAULT 0;
    ALTER TABLE consumer ADD COLUMN seen_at BIGINT NOT NULL DEFAULT 0;
    DROP INDEX consumer_name;
    CREATE UNIQUE INDEX consumer_name ON consumer (mailbox_no, name, push);
    CREATE INDEX consumer_unseen ON consumer (seen_at) WHERE push = 1;
    CREATE TABLE pushed (
        mailbox_no BIGINT NOT NULL,
        lane SMALLINT NOT NULL,
        msg_id BIGINT NOT NULL,
        PRIMARY KEY (mailbox_no, lane)
    ) {clustered}
    """
    for statement in statements.split(";"):
        db.execute_sql(statement)


def down(migrator, db):
    # A FETCH group keeps the name it shares with a group of this kind.
    for statement in (
        "DROP TABLE pushed",
        "DROP INDEX consumer_unseen",
        "DROP INDEX consumer_name",
        "DELETE FROM lease WHERE group_no IN (SELECT no FROM consumer WHERE push = 1)",
        "DELETE FROM consumer WHERE push = 1",
        "CREATE UNIQUE INDEX consumer_name ON consumer (mailbox_no, name)",
        "ALTER TABLE consumer DROP COLUMN push",
        "ALTER TABLE consumer DROP COLUMN seen_at",
    ):
        db.execute_sql(statement)
