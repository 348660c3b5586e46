"""Sessions of operators that a sign-out ended, until their time would have been over."""


def up(migrator, db):
    db.execute_sql("CREATE TABLE ended_session (digest TEXT PRIMARY KEY, ends_at BIGINT NOT NULL)")


def down(migrator, db):
    db.execute_sql("DROP TABLE ended_session")
