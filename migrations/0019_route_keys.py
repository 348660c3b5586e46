"""The keys inside the DIDs that holders registered: mail may name its recipient by one of them."""

from peewee import PostgresqlDatabase

PAGE = 1000


def up(migrator, db):
    postgres = isinstance(db, PostgresqlDatabase)
    text, place = ('TEXT COLLATE "C"', "%s") if postgres else ("TEXT", "?")
    clustered = "" if postgres else "WITHOUT ROWID"
    db.execute_sql(
        f"CREATE TABLE route_key (tenant {text} NOT NULL, key {text} NOT NULL, created_at BIGINT NOT NULL,"
        f" route {text} NOT NULL, PRIMARY KEY (tenant, key, created_at, route)) {clustered}"
    )
    db.execute_sql("CREATE INDEX route_key_route ON route_key (tenant, route)")
    # A did:peer:2 has its keys in plain sight: .Ez6LS…, .Vz6Mk… The document of a did:peer:4 is not there.
    insert = f"INSERT INTO route_key (tenant, key, created_at, route) VALUES ({', '.join([place] * 4)})"
    after = ("", "did:peer:2")
    while True:
        rows = db.execute_sql(
            f"SELECT tenant, key, created_at FROM route WHERE (tenant, key) > ({place}, {place})"
            f" AND key >= 'did:peer:2' AND key < 'did:peer:3' ORDER BY tenant, key LIMIT {PAGE}",
            after,
        ).fetchall()
        for tenant, did, created_at in rows:
            keys = {part[1:] for part in did.split(".") if part.startswith(("Ez6LS", "Vz6Mk")) and len(part) < 64}
            for key in sorted(keys):
                db.execute_sql(insert, (tenant, f"did:key:{key}", created_at, did))
        if len(rows) < PAGE:
            break
        after = rows[-1][:2]


def down(migrator, db):
    db.execute_sql("DROP TABLE route_key")
