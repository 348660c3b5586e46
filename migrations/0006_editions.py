"""Messages that the next start of a service removes, and the list of public mailboxes."""


def up(migrator, db):
    # Columns rather than a table beside: a message that goes for any other reason takes its mark along.
    for statement in (
        "ALTER TABLE message ADD COLUMN volatile TEXT",
        "CREATE INDEX message_volatile ON message (volatile) WHERE volatile IS NOT NULL",
        "ALTER TABLE delayed ADD COLUMN volatile TEXT",
        "CREATE INDEX delayed_volatile ON delayed (volatile) WHERE volatile IS NOT NULL",
        "CREATE INDEX mailbox_public ON mailbox (tenant, address) WHERE public = 1 AND address IS NOT NULL",
    ):
        db.execute_sql(statement)


def down(migrator, db):
    for statement in (
        "DROP INDEX mailbox_public",
        "DROP INDEX delayed_volatile",
        "ALTER TABLE delayed DROP COLUMN volatile",
        "DROP INDEX message_volatile",
        "ALTER TABLE message DROP COLUMN volatile",
    ):
        db.execute_sql(statement)
