"""What has expired in one mailbox or tenant, told from the index alone."""


def up(migrator, db):
    replace(db, "expire_at, mailbox_no, msg_id, size")


def down(migrator, db):
    replace(db, "expire_at")


def replace(db, columns):
    db.execute_sql("DROP INDEX message_expiry")
    db.execute_sql(f"CREATE INDEX message_expiry ON message ({columns}) WHERE expire_at IS NOT NULL")
