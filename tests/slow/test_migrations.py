"""A database that an earlier version wrote is brought up to date with all that is in it."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import orjson
import pytest
from peewee import Database, PostgresqlDatabase, SqliteDatabase
from playhouse.migrations import Runner

from mediator.errors import SchemaError
from mediator.mailboxes.address import redact
from mediator.mailboxes.message import Filter
from mediator.store import migrate
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from pickup.rules.records import Generation, Invitation, NewConnection, Route
from pickup.rules.tables import MediationTransaction
from registry.records import CardVectors, LastSeenCursor, UpdatedTerms
from registry.tables import RegistryTables
from tests.harness.agents import FIRST, SPACE, registration
from tests.harness.samples import ALL, T0, TENANT, furnish, get, ids, picture

NAMES = [path.stem for path in sorted(migrate.FOLDER.glob("[0-9]*.py"))]
Open = Callable[[], Store]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Open, Database]]:
    """Give the way to open a database as a store, again and again, and the bare database."""
    if request.param == "sqlite":
        yield lambda: SqliteStore(tmp_path / "a.db"), SqliteDatabase(tmp_path / "a.db")
        return
    with request.getfixturevalue("postgres").database() as url:
        from psycopg.conninfo import conninfo_to_dict

        from mediator.store.postgres import PostgresStore

        parameters = conninfo_to_dict(url)
        bare = PostgresqlDatabase(parameters.pop("dbname"), prefer_psycopg3=True, **parameters)
        yield lambda: PostgresStore(url), bare


@pytest.fixture
def open_store(database: tuple[Open, Database]) -> Open:
    """Open the same database again and again."""
    return database[0]


@pytest.fixture
def take_back(database: tuple[Open, Database]) -> Callable[[int], None]:
    """Take the schema back to what the first migrations made of it."""

    def back(count: int) -> None:
        with database[1]:
            Runner(database[1], str(migrate.FOLDER)).down(NAMES[count])

    return back


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the program have the first migrations only, as an earlier one did."""
    shipped = migrate.FOLDER

    def have(count: int) -> None:
        directory = tmp_path / f"migrations {count}"
        directory.mkdir()
        for name in NAMES[:count]:
            shutil.copy(shipped / f"{name}.py", directory)
        monkeypatch.setattr(migrate, "FOLDER", directory)

    return have


def test_migrations_are_numbered_without_a_gap():
    assert [int(name.split("_")[0]) for name in NAMES] == list(range(1, len(NAMES) + 1))


@pytest.mark.rule("A8", "D3", "G1")
def test_a_database_of_the_first_version_is_migrated_whole(open_store, take_back):
    with contextlib.closing(open_store()) as store:
        with store.transaction() as tx:
            furnish(tx)
        with store.transaction() as tx:
            before = deepcopy(picture(tx))
    # This program writes columns that the first version has not, so its schema comes afterwards.
    take_back(1)
    with contextlib.closing(open_store()) as store, store.transaction() as tx:
        assert picture(tx) == before
        # What was there before the index is found by it.
        assert ids(tx.messages.addressed(get(tx), "r", -1, ALL, ALL, T0)) == [0, 1, 2]
        connection = tx.table(MediationTransaction).connections.add(
            NewConnection(TENANT, Generation.V1, "did:x:1", "did:x:me", ("did:x:1",), T0)
        )
        tx.table(MediationTransaction).routes.put(Route(TENANT, "did:x:2", "a", get(tx).id, connection.id, T0, T0))
        [retired] = tx.mailboxes.retired(ALL)
        tx.mailboxes.drop(retired)
        agent = tx.table(RegistryTables).agents.add(registration("a"), 0, T0)
    with contextlib.closing(open_store()) as store, store.reading() as tx:
        assert tx.table(RegistryTables).agents.find(TENANT, "a") == agent
        assert tx.table(MediationTransaction).connections.called(TENANT, "did:x:1") == connection
        assert tx.table(MediationTransaction).routes.find(TENANT, "did:x:2").mailbox_id == get(tx).id


def test_an_older_program_refuses_a_newer_schema(open_store, version):
    open_store().close()
    version(1)
    with pytest.raises(SchemaError, match="newer than this program, which does not know 0002_mediation"):
        open_store()


@pytest.mark.rule("D1")
def test_mediation_never_reads_a_whole_table(tmp_path):
    store = SqliteStore(tmp_path / "a.db")
    said: list[str] = []
    with contextlib.closing(store):
        with store.transaction() as tx:
            furnish(tx)
            [retired] = tx.mailboxes.retired(ALL)
            tx.session.dialect.connection.set_trace_callback(said.append)
            mailbox = get(tx)
            connection = tx.table(MediationTransaction).connections.add(
                NewConnection(TENANT, Generation.V1, "did:x:1", "did:x:me", ("did:x:1",), T0)
            )
            tx.table(MediationTransaction).connections.save(connection)
            tx.table(MediationTransaction).connections.get(connection.id)
            tx.table(MediationTransaction).connections.called(TENANT, "did:x:1")
            tx.table(MediationTransaction).connections.of_mailbox(mailbox.id)
            tx.table(MediationTransaction).connections.list(TENANT, 0, ALL)
            tx.table(MediationTransaction).connections.count(TENANT)
            route = Route(TENANT, "did:x:2", "a", mailbox.id, connection.id, T0, T0)
            tx.table(MediationTransaction).routes.put(route)
            tx.table(MediationTransaction).routes.put(route)
            tx.table(MediationTransaction).routes.used(route, T0)
            tx.table(MediationTransaction).routes.find(TENANT, "did:x:2")
            tx.table(MediationTransaction).routes.add_keys(route, ["did:key:z6MkX"])
            tx.table(MediationTransaction).routes.resolve(TENANT, "did:key:z6MkX")
            tx.table(MediationTransaction).routes.remove_attached(mailbox.id)
            tx.table(MediationTransaction).routes.of(connection, 0, ALL)
            tx.table(MediationTransaction).routes.count(connection)
            tx.table(MediationTransaction).routes.attached(TENANT, ALL)
            tx.table(MediationTransaction).routes.remove(route)
            tx.table(MediationTransaction).connections.remove(connection)
            tx.table(MediationTransaction).invitations.put(Invitation("i", TENANT, "k", b"", "", T0))
            tx.table(MediationTransaction).invitations.get("i")
            tx.table(MediationTransaction).invitations.keyed("k")
            tx.table(MediationTransaction).invitations.list(TENANT, ALL)
            tx.table(MediationTransaction).invitations.remove(Invitation("i", TENANT, "k", b"", "", T0))
            tx.messages.addressed(mailbox, "r", -1, ALL, ALL, T0)
            tx.messages.newest(mailbox, Filter(recipient="r"), 1, 1, T0)
            tx.messages.recipient_usage(mailbox, "r")
            tx.mailboxes.drop(retired)
            tx.session.dialect.connection.set_trace_callback(None)
        searches = [sql for sql in said if sql.startswith(("SELECT", "UPDATE", "DELETE"))]
        assert len(searches) > 25
        for sql in searches:
            assert_goes_by_index(store, sql)


@pytest.mark.rule("G1", "G2", "G3")
def test_the_registry_never_reads_a_whole_table(tmp_path):
    store = SqliteStore(tmp_path / "a.db")
    said: list[str] = []
    with contextlib.closing(store):
        with store.transaction() as tx:
            tx.session.dialect.connection.set_trace_callback(said.append)
            agent = tx.table(RegistryTables).agents.add(registration("a", "n"), 1, T0)
            tx.table(RegistryTables).agents.find(TENANT, "a")
            tx.table(RegistryTables).agents.named(TENANT, "n", ALL)
            tx.table(RegistryTables).agents.replace(agent, registration("a", "n"), 1, T0)
            tx.table(RegistryTables).agents.replace(agent, registration("a", "n", "new"), 1, T0)
            tx.table(RegistryTables).agents.seen(agent, b"", T0)
            tx.table(RegistryTables).agents.count(TENANT)
            tx.table(RegistryTables).agents.pick([agent.id])
            tx.table(RegistryTables).agents.terms([agent.id])
            tx.table(RegistryTables).agents.set_terms([UpdatedTerms(agent.id, 1, b"")])
            tx.table(RegistryTables).agents.revision()
            tx.table(RegistryTables).agents.changes(FIRST, SPACE, ALL)
            tx.table(RegistryTables).agents.unseen(T0, LastSeenCursor(-1, 0), ALL)
            tx.table(RegistryTables).vectors.save(SPACE, [CardVectors(agent.id, 1, b"")])
            tx.table(RegistryTables).vectors.read(SPACE, [agent.id])
            tx.table(RegistryTables).vectors.missing(SPACE, 0, ALL, T0)
            tx.table(RegistryTables).vectors.count(SPACE)
            tx.table(RegistryTables).vectors.spaces()
            tx.table(RegistryTables).vectors.drop(SPACE, ALL)
            tx.table(RegistryTables).agents.remove(agent.id, T0)
            tx.table(RegistryTables).agents.forget_removed(T0, ALL)
            tx.session.dialect.connection.set_trace_callback(None)
        searches = [sql for sql in said if sql.startswith(("SELECT", "UPDATE", "DELETE"))]
        assert len(searches) > 25
        for sql in searches:
            # What has a LIMIT of its own may be sorted.
            sorts = "USE TEMP B-TREE FOR ORDER BY" if " AS there" in sql else ""
            assert_goes_by_index(store, sql, "SCAN there", "SCAN removed", "SCAN first", sorts)


@pytest.mark.rule("E4", "E5", "E10")
def test_older_editions_never_read_a_whole_table(tmp_path):
    store = SqliteStore(tmp_path / "a.db")
    said: list[str] = []
    with contextlib.closing(store):
        with store.transaction() as tx:
            furnish(tx)
            tx.session.dialect.connection.set_trace_callback(said.append)
            mailbox = get(tx)
            tx.mailboxes.public(TENANT, "", ("t",), 1, ALL, T0)
            tx.messages.kept_until_start("here", ALL)
            tx.delays.drop_kept_until_start("here", ALL)
            tx.messages.heads(mailbox, Filter(tags=("t",)), ALL, T0)
            tx.pushed.marks(mailbox)
            tx.pushed.unread(mailbox, T0)
            tx.session.dialect.connection.set_trace_callback(None)
        searches = [sql for sql in said if sql.startswith(("SELECT", "UPDATE", "DELETE"))]
        assert len(searches) >= 9
        for sql in searches:
            assert_goes_by_index(store, sql)


def assert_goes_by_index(store: SqliteStore, sql: str, *limited: str) -> None:
    """Fail when a whole table is read or sorted; ``limited`` are steps that cannot."""
    with store.reading() as tx:
        plan = [row[3] for row in tx.session.dialect.execute(f"EXPLAIN QUERY PLAN {sql}")]
    steps = [step for step in plan if step not in limited]
    assert not any(step.startswith("SCAN") or "TEMP B-TREE" in step for step in steps), (sql, plan)


@pytest.mark.rule("D3")
def test_dids_registered_before_are_found_by_their_keys(open_store, take_back):
    old = "did:peer:2.Ez6LSone.Ez6LStwo.Vz6Mkthree.EzDnaother.SeyJ0IjoiZG0ifQ"
    with contextlib.closing(open_store()) as store, store.transaction() as tx:
        connection = tx.table(MediationTransaction).connections.add(
            NewConnection(TENANT, Generation.V2, old, "did:x:me", (old,), T0)
        )
        for number in range(2500):
            did = f"did:peer:2.Ez6LSkey{number}.SeyJ0IjoiZG0ifQ"
            tx.table(MediationTransaction).routes.put(Route(TENANT, did, "a", 1, connection.id, T0, T0))
        for did in (old, "did:key:z6MkX", "did:peer:4zQm", "did:web:Ez6LSweb.example"):
            tx.table(MediationTransaction).routes.put(Route(TENANT, did, "a", 1, connection.id, T0, T0))
    take_back(NAMES.index("0019_route_keys"))
    with contextlib.closing(open_store()) as store, store.transaction() as tx:
        routes = tx.table(MediationTransaction).routes
        for name in ("z6LSone", "z6LStwo", "z6Mkthree"):
            assert routes.resolve(TENANT, f"did:key:{name}").key == old
        assert all(routes.resolve(TENANT, f"did:key:z6LSkey{number}") for number in range(2500))
        assert routes.resolve(TENANT, "did:key:zDnaother") is routes.resolve(TENANT, "did:key:z6LSweb") is None
        assert routes.resolve("other", "did:key:z6LSone") is None


@pytest.mark.rule("A7")
def test_the_audit_log_of_before_loses_whole_addresses(open_store, take_back, database):
    open_store().close()
    take_back(NAMES.index("0018_audit_repeats"))
    kept = [
        {"mail_address": "agent.inbox", "ack_wait_ms": 1000},
        {"mail_address": redact("agent.inbox")},
        {"mailbox": "k" * 26, "id": "0" * 32, "name": "did:example:1"},
    ]
    with database[1]:
        for number, fields in enumerate(kept):
            row = f"{number}, 'i', 'ada', 'socket', 'act', 'default', {database[1].param}, 'ok'"
            names = "at, instance, actor, via, operation, tenant, fields, result"
            sql = f"INSERT INTO audit_log ({names}) VALUES ({row})"
            database[1].execute_sql(sql, (orjson.dumps(fields).decode(),))
    open_store().close()
    with database[1]:
        rows = database[1].execute_sql("SELECT fields, times, last_at FROM audit_log ORDER BY no").fetchall()
    assert [(orjson.loads(fields), *rest) for fields, *rest in rows] == [
        ({"mail_address": redact("agent.inbox"), "ack_wait_ms": 1000}, 1, None),
        ({"mail_address": redact("agent.inbox")}, 1, None),
        ({"mailbox": redact("k" * 26), "id": redact("0" * 32), "name": "did:example:1"}, 1, None),
    ]


@pytest.mark.rule("D7")
def test_a_batch_of_an_earlier_version_is_not_confirmed(open_store, database):
    """Wallets rejected the ids that were in it, and nothing was kept of that."""
    peer = NewConnection(TENANT, Generation.V1, "did:sov:peer", "did:web:me", ("caller",), T0)
    with contextlib.closing(open_store()) as store, store.transaction() as tx:
        connection = tx.table(MediationTransaction).connections.add(peer)
    with database[1]:
        (state,) = database[1].execute_sql("SELECT state FROM connection").fetchone()
        kept = orjson.loads(bytes(state))
        kept.pop("batch", None)
        database[1].execute_sql(
            f"UPDATE connection SET state = {database[1].param}", (orjson.dumps(kept | {"handed": [0, 1]}),)
        )
    with contextlib.closing(open_store()) as store, store.reading() as tx:
        assert tx.table(MediationTransaction).connections.get(connection.id) == connection
