"""A backup has every row, and restores into either kind of database; what is damaged or in the way is refused."""

import contextlib
import hashlib
import io
import itertools
import json
import re
import resource
import shutil
import sqlite3
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from mediator.backup import MIN_SKIP, backup, migrate_to, restore
from mediator.cli import main
from mediator.errors import SchemaError, SetupError, StoreDamagedError, StoreHeldError, UnavailableError
from mediator.journal import FOLDER as JOURNAL
from mediator.journal.segments import encode
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.fetching import Deliver
from mediator.mailboxes.lanes import Lane
from mediator.parts import backup_scope
from mediator.settings.settings import Settings
from mediator.store.base import Store
from mediator.store.opening import DATABASE_FILE, open_store
from tests.harness.agents import SPACE, Agency, registration
from tests.harness.broker import Broker
from tests.harness.core import make_settings
from tests.harness.mediation import Mediation, key
from tests.harness.postgres import Server
from tests.integration.test_cli_json import check_shape, shapes

KEY_FILE = "didcomm.key"
KEY = b"A" * 43 + b"=\n"
LARGE = b"x" * 5000
BOXES = ("orders", "bills")
COUNTERS = {"next_id", "messages", "bytes", "last_at"}
FILLED = {
    *("mailbox", "body", "message", "held", "delayed", "dedup", "consumer", "lease", "outbox", "send_only_key"),
    *("connection", "caller", "route", "invitation"),
    *("agent", "agent_card", "agent_count", "agent_removed", "agent_vectors", "registry_clock"),
}
"""Tables that the test fills; others are a running service's."""


def quiet(_what: str, _done: int, _total: int) -> None:
    """Show no progress."""


Place = Callable[..., Settings]


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Make settings of a data directory, and of an empty database where it is PostgreSQL."""
    with ExitStack() as stack:

        def make(name: str, kind: str = "sqlite", **options: Any) -> Settings:
            if kind == "postgres":
                server: Server = request.getfixturevalue("postgres")
                options["database_url"] = stack.enter_context(server.database())
            return make_settings(data_dir=tmp_path / name, **options)

        yield make


@contextlib.contextmanager
def opened(settings: Settings) -> Iterator[Store]:
    store = open_store(settings.data_dir, settings.store_url, settings.migrations_of_parts)
    try:
        yield store
    finally:
        store.close()


def fill(store: Store) -> None:
    """Put something into every table that mail, wallets and agents fill."""
    mail = Mediation(store)
    for box in (*BOXES, "gone"):
        mail.create(box, tags=("a", "b"))
    for number in range(20):
        lane = list(Lane)[number % 4]
        mail.send(b"\0\xff%d" % number, to="orders", lane=lane, tags=("t",), headers={"h": "ü"}, ttl=10**9)
    for _ in range(2):
        mail.send(b"later", to="orders", delay=10**8, dedup_id="once", archive=True)
        mail.send(b"twice", to="orders", key="k", dedup_id=f"d{_}", archive=True, reply_to="bills")
    mail.take(box="orders", num_msgs=5, deliver=Deliver.EARLIEST, ack_wait=60_000)
    mail.take("others", box="orders", num_msgs=7, deliver=Deliver.EARLIEST)
    mail.ack(*mail.take("others", box="orders", num_msgs=7), group="others", box="orders")
    mail.delete_mailbox("gone")
    wallet = mail.holder(1, key(7), key(8))
    mail.invite()
    mail.forward([key(7), key(8)], LARGE, b"small")
    assert len(mail.deliver(wallet)) == 4
    agents = Agency(store)
    agents.register("agent.one", "One", "bakes bread")
    agents.take((registration("agent.two", "Two"), b"vectors"), space=SPACE)
    agents.unregister("agent.one")
    mail.create("last")
    mail.delete_mailbox("last")
    mail.clean_up()


def content(settings: Settings) -> dict[str, list[Any]]:
    """Return all rows of the database, but for counters, which SQLite writes now and then only."""
    if settings.store_url is not None:
        import psycopg
        from psycopg.rows import dict_row

        with psycopg.connect(settings.store_url) as connection:
            names = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            cursor = connection.cursor(row_factory=dict_row)
            return {name: shown(cursor.execute(f'SELECT * FROM "{name}"')) for (name,) in names if has_data(name)}
    with closing(sqlite3.connect(settings.data_dir / DATABASE_FILE)) as file:
        names = file.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        ).fetchall()
        file.row_factory = sqlite3.Row
        return {name: shown(map(dict, file.execute(f'SELECT * FROM "{name}"'))) for (name,) in names if has_data(name)}


def has_data(table: str) -> bool:
    return not table.startswith("schema_migration")


def shown(rows: Iterable[dict[str, Any]]) -> list[Any]:
    """Put rows in order, without what a restore changes or SQLite counts anew."""
    found = []
    for row in rows:
        hidden = COUNTERS if "next_id" in row else {"id"}
        found.append(sorted((name, value) for name, value in row.items() if name not in hidden))
    return sorted(found, key=repr)


def counters(store: Store) -> list[Any]:
    boxes = [Broker(store).mailbox(box) for box in BOXES]
    return [(box.messages, box.bytes, box.last_at) for box in boxes if box is not None]


def sent(settings: Settings) -> list[int]:
    """Send to each mailbox and return the msg_ids; then create one and return its number."""
    with opened(settings) as store:
        mail = Broker(store)
        ids = [mail.send(b"", to=box) for box in BOXES]
        return [*ids, mail.create("new").mailbox.id]


def write(settings: Settings, file: Path, *, with_keys: bool = False) -> Path:
    backup(settings, backup_scope(settings), file, with_keys=with_keys, on_progress=quiet)
    return file


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a data directory with a little of everything, and its key."""
    settings = make_settings(data_dir=tmp_path_factory.mktemp("template") / "data")
    with opened(settings) as store:
        fill(store)
    put_key(settings.data_dir, KEY)
    return settings.data_dir


@pytest.fixture
def filled(template: Path, tmp_path: Path) -> Settings:
    """A stopped service's data directory of the test's own."""
    return make_settings(data_dir=shutil.copytree(template, tmp_path / "filled"))


def put_key(data_dir: Path, key: bytes) -> None:
    data_dir.mkdir(exist_ok=True)
    (data_dir / KEY_FILE).write_bytes(key)
    (data_dir / KEY_FILE).chmod(0o600)


# What a backup keeps.


# From PostgreSQL to PostgreSQL: tests/slow/test_backup.py.
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("sqlite", "sqlite"),
        pytest.param("sqlite", "postgres", marks=pytest.mark.postgres),
        pytest.param("postgres", "sqlite", marks=pytest.mark.postgres),
    ],
)
def test_every_row_comes_back_in_either_database(source, target, place, tmp_path):
    old, new = place("old", source), place("new", target)
    with opened(old) as store:
        fill(store)
        write(old, tmp_path / "b.tar")
        was, counted = content(old), counters(store)
    restored = restore(new, backup_scope(new), tmp_path / "b.tar", on_progress=quiet)
    assert content(new) == was
    assert {name for name, rows in was.items() if rows} >= FILLED
    with opened(new) as store:
        assert counters(store) == counted
    assert sent(new) == [number + restored.skipped for number in sent(old)]
    assert restored.skipped >= MIN_SKIP


@pytest.mark.postgres
def test_migrate_to_keeps_every_row_and_number(filled, place):
    new = place("new", "postgres")
    was = content(filled)
    rows = migrate_to(filled, new.store_url or "", on_progress=quiet)
    assert content(new) == was == content(filled)
    assert rows == {name: len(found) for name, found in was.items()}
    # The highest mailbox is gone: its number is not given again.
    assert sent(new) == sent(filled)


@pytest.mark.postgres
def test_migrate_to_leaves_nothing_when_it_fails(filled, place):
    with closing(sqlite3.connect(filled.data_dir / DATABASE_FILE)) as file, file:
        file.execute("UPDATE message SET key = char(0) WHERE msg_id = 1")
    new = place("new", "postgres")
    with pytest.raises(SetupError, match="table message: PostgreSQL refuses a value"):
        migrate_to(filled, new.store_url or "", on_progress=quiet)
    assert content(new) == {}
    with opened(new) as store:
        assert Broker(store).create("first").mailbox.id == 1
    with pytest.raises(SetupError, match="tables already"):
        migrate_to(filled, new.store_url or "", on_progress=quiet)


def test_migrate_to_is_for_a_stopped_service_on_sqlite(filled, place):
    url = "postgresql://127.0.0.1:1/none"
    with opened(filled), pytest.raises(StoreHeldError):
        migrate_to(filled, url, on_progress=quiet)
    with pytest.raises(SetupError, match="no database"):
        migrate_to(place("nothing"), url, on_progress=quiet)
    with pytest.raises(SetupError, match="is PostgreSQL already"):
        migrate_to(place("other", database_url=url), url, on_progress=quiet)
    with pytest.raises(UnavailableError):
        migrate_to(filled, url, on_progress=quiet)


@pytest.mark.postgres
def test_an_empty_postgresql_database_is_no_mediators(place, tmp_path):
    with pytest.raises(SetupError, match="no mediator's"):
        write(place("empty", "postgres"), tmp_path / "b.tar")
    assert list(tmp_path.glob("*.tar")) == []


def test_a_backup_says_how_much_came_after_it(filled, tmp_path):
    file = write(filled, tmp_path / "b.tar")
    new = make_settings(data_dir=tmp_path / "new")
    folder = new.data_dir / JOURNAL
    folder.mkdir(parents=True)
    now = time.time_ns() // 1_000_000 + 60_000
    for number, (at, what) in enumerate([(1, 4), (now, 4), (now, 6), (now, 5)]):
        event = Event(EventType(what), at, "default", 1, 2, number, 1, at)
        lines, _ = encode([event], instance="one", seqs=itertools.count(number + 1), after=None, mark=None)
        (folder / f"{number + 1:020d}-one.jsonl").write_bytes(lines)
    assert restore(new, backup_scope(new), file, on_progress=quiet).later == 2


# Keys.


@pytest.mark.parametrize("with_keys", [False, True])
def test_keys_are_in_it_only_when_asked_for(with_keys, filled, tmp_path):
    file = write(filled, tmp_path / "b.tar", with_keys=with_keys)
    assert file.stat().st_mode & 0o777 == 0o600
    assert (KEY in file.read_bytes()) == with_keys
    new = make_settings(data_dir=tmp_path / "new")
    restored = restore(new, backup_scope(new), file, on_progress=quiet)
    key = new.data_dir / KEY_FILE
    assert (restored.missing_keys, key.exists()) == (([], True) if with_keys else ([KEY_FILE], False))
    if with_keys:
        assert (key.read_bytes(), key.stat().st_mode & 0o777) == (KEY, 0o600)


def test_another_key_in_the_way_is_refused(filled, tmp_path):
    file = write(filled, tmp_path / "b.tar", with_keys=True)
    new = make_settings(data_dir=tmp_path / "new")
    put_key(new.data_dir, KEY.replace(b"A", b"B"))
    with pytest.raises(SetupError, match=r"didcomm\.key here is another key"):
        restore(new, backup_scope(new), file, on_progress=quiet)
    put_key(new.data_dir, KEY)
    assert restore(new, backup_scope(new), file, on_progress=quiet).missing_keys == []


def test_a_key_of_the_settings_is_kept_too(filled, place, tmp_path):
    other = place("filled", didcomm={"key": KEY.decode().strip()})
    (filled.data_dir / KEY_FILE).unlink()
    new = make_settings(data_dir=tmp_path / "new")
    restore(new, backup_scope(new), write(other, tmp_path / "b.tar", with_keys=True), on_progress=quiet)
    assert (new.data_dir / KEY_FILE).read_bytes() == KEY


# What is refused, with nothing changed.


def test_nothing_is_overwritten(filled, tmp_path):
    file = write(filled, tmp_path / "b.tar")
    with pytest.raises(SetupError, match="there already"):
        write(filled, file)
    with pytest.raises(SetupError, match=r"mediator\.db is there already"):
        restore(filled, backup_scope(filled), file, on_progress=quiet)
    with opened(filled), pytest.raises(StoreHeldError):
        restore(filled, backup_scope(filled), file, on_progress=quiet)
    new = make_settings(data_dir=tmp_path / "new")
    new.data_dir.mkdir()
    (new.data_dir / f"{DATABASE_FILE}-wal").touch()
    with pytest.raises(SetupError, match=r"mediator\.db-wal is there already"):
        restore(new, backup_scope(new), file, on_progress=quiet)


def test_no_database_is_no_backup(place, tmp_path):
    with pytest.raises(SetupError, match="no database in"):
        write(place("nothing"), tmp_path / "b.tar")
    assert not (tmp_path / "b.tar").exists()


def test_a_damaged_database_is_no_backup(filled, tmp_path):
    path = filled.data_dir / DATABASE_FILE
    pages = bytearray(path.read_bytes())
    pages[4096 * 3 : 4096 * 12] = bytes(4096 * 9)
    path.write_bytes(pages)
    with pytest.raises(StoreDamagedError):
        write(filled, tmp_path / "b.tar")
    assert list(tmp_path.iterdir()) == [filled.data_dir]


@pytest.mark.parametrize("share", [0.5, 1.001])
def test_a_disk_without_room_leaves_nothing_behind(share, filled, tmp_path):
    room = int((filled.data_dir / DATABASE_FILE).stat().st_size * share)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(UnavailableError):
            write(filled, tmp_path / "b.tar")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [filled.data_dir]
    assert {path.name for path in filled.data_dir.glob("*-*")} == set()


def members(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as tar:
        return {name: found.read() for name in tar.getnames() if (found := tar.extractfile(name)) is not None}


def packed(file: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(file, "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def said(**changes: Any) -> Callable[[Path], None]:
    """Change what the manifest says."""

    def damage(file: Path) -> None:
        files = members(file)
        files["manifest.json"] = json.dumps(json.loads(files["manifest.json"]) | changes).encode()
        packed(file, files)

    return damage


def flipped(at: int) -> Callable[[Path], None]:
    """Change one bit."""

    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return damage


def cut(share: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * share)])

    return damage


def without(name: str) -> Callable[[Path], None]:
    return lambda file: packed(file, {other: data for other, data in members(file).items() if other != name})


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda file: file.write_bytes(b"a letter"), "is no backup"),
        (lambda file: file.write_bytes(b""), "is no backup"),
        (flipped(100), "is no backup"),
        (flipped(50_000), r"mediator\.db is not as the backup was made"),
        (cut(0.5), "is (incomplete|damaged)"),
        (cut(0.0005), "is no backup|is incomplete"),
        (without("manifest.json"), "is incomplete"),
        (without("mediator.db"), "lacks files of its list"),
        (without("keys/didcomm.key"), "lacks files of its list"),
        (said(format=2, version="9.9"), r"newer version, 9\.9"),
        (said(rows={"message": 1}), "other numbers of rows"),
        (said(taken_at="today"), "list of contents cannot be read"),
        (
            said(files={"mediator.db": {"bytes": 1, "sha256": ""}, "keys/../x": {"bytes": 1, "sha256": ""}}),
            "lacks files",
        ),
    ],
)
def test_a_damaged_backup_is_refused(damage, why, filled, tmp_path):
    file = write(filled, tmp_path / "b.tar", with_keys=True)
    damage(file)
    new = make_settings(data_dir=tmp_path / "new")
    with pytest.raises(SetupError, match=why):
        restore(new, backup_scope(new), file, on_progress=quiet)
    assert {path.name for path in new.data_dir.glob("*")} <= {f"{DATABASE_FILE}.lock"}


def crafted(file: Path, *statements: str) -> None:
    """Put other statements into the database of a backup, and make its list agree."""
    files = members(file)
    database = file.with_name("crafted.db")
    database.write_bytes(files["mediator.db"])
    with closing(sqlite3.connect(database)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    manifest = json.loads(files["manifest.json"])
    data = database.read_bytes()
    manifest["files"]["mediator.db"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    packed(file, files | {"mediator.db": data, "manifest.json": json.dumps(manifest).encode()})


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("CREATE TRIGGER leak AFTER UPDATE ON mailbox BEGIN DELETE FROM message; END", "trigger leak"),
        ("CREATE VIEW seen AS SELECT * FROM message", "view seen"),
        ("CREATE TABLE other (no INTEGER)", "table other"),
        ("CREATE INDEX other ON message (abs(id))", "index other"),
        ("CREATE VIRTUAL TABLE schema_migration_x USING fts5(body)", "table schema_migration_x"),
    ],
)
def test_a_backup_with_foreign_objects_is_refused(statement, what, filled, tmp_path):
    file = write(filled, tmp_path / "b.tar")
    crafted(file, statement)
    new = make_settings(data_dir=tmp_path / "new")
    with pytest.raises(SetupError, match=f"its database has a {what}, which no migration makes"):
        restore(new, backup_scope(new), file, on_progress=quiet)
    assert {path.name for path in new.data_dir.glob("*")} <= {f"{DATABASE_FILE}.lock"}


@pytest.mark.parametrize(
    ("table", "before", "after"),
    [
        ("message", "PRIMARY KEY", "PRIMARY KEY ON CONFLICT IGNORE"),
        ("replay", "PRIMARY KEY (sender, mark)", "PRIMARY KEY (sender, mark, seq)"),
        ("audit_log", "NOT NULL", "NOT NULL CHECK (0)"),
    ],
)
def test_a_backup_with_other_declarations_is_refused(table, before, after, filled, tmp_path):
    file = write(filled, tmp_path / "b.tar")
    changed = f"UPDATE sqlite_master SET sql = replace(sql, '{before}', '{after}') WHERE name = '{table}'"
    crafted(file, "PRAGMA writable_schema = on", changed)
    new = make_settings(data_dir=tmp_path / "new")
    with pytest.raises(SetupError, match=f"its table {table} is declared otherwise than migrations do"):
        restore(new, backup_scope(new), file, on_progress=quiet)
    assert {path.name for path in new.data_dir.glob("*")} <= {f"{DATABASE_FILE}.lock"}


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize(
    ("further", "why"),
    [
        (entry("local.token"), "files that are not in its list"),
        (entry("mediator.db"), "files that are not in its list"),
        (entry("keys/didcomm.key", tarfile.SYMTYPE, "/etc/passwd"), "keys/didcomm.key is no ordinary file"),
        (entry("mediator.db", tarfile.LNKTYPE, "manifest.json"), "mediator.db is no ordinary file"),
        (entry("mediator.db", tarfile.GNUTYPE_SPARSE), "is no ordinary file|list of contents cannot be read"),
        (entry("pipe", tarfile.FIFOTYPE), "pipe is no ordinary file"),
    ],
)
def test_only_listed_ordinary_files_are_restored(further, why, filled, tmp_path):
    file = write(filled, tmp_path / "b.tar", with_keys=True)
    with tarfile.open(file, "a") as tar:
        tar.addfile(further)
    with pytest.raises(SetupError, match=why):
        restore(chosen := make_settings(data_dir=tmp_path / "new"), backup_scope(chosen), file, on_progress=quiet)


def extended(**records: str) -> bytes:
    """A header of POSIX with records about the file behind it."""
    about = tarfile.TarInfo("mediator.db")
    about.pax_headers = records
    return about.tobuf(tarfile.PAX_FORMAT)[: -tarfile.BLOCKSIZE]


@pytest.mark.parametrize(
    "headers",
    [
        extended(size="-1536"),
        extended(size="-2048"),
        extended(comment="x") * 3000,
        extended(path="keys/didcomm.key"),
        extended(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "99"}),
    ],
    ids=["back to itself", "back to another", "thousands", "another name", "sparse"],
)
def test_extended_headers_are_refused_at_once(headers, filled, tmp_path):
    file = write(filled, tmp_path / "b.tar")
    whole = file.read_bytes()
    with tarfile.open(file) as tar:
        at = tar.getmember("manifest.json").offset
    file.write_bytes(whole[:at] + headers + whole[at:])
    with pytest.raises(SetupError, match="is no ordinary file"):
        restore(chosen := make_settings(data_dir=tmp_path / "new"), backup_scope(chosen), file, on_progress=quiet)


def test_a_key_has_few_bytes(filled, tmp_path):
    file = write(filled, tmp_path / "b.tar", with_keys=True)
    files, large = members(file), bytes(1 << 20)
    manifest = json.loads(files["manifest.json"])
    manifest["files"]["keys/didcomm.key"] = {"bytes": len(large), "sha256": hashlib.sha256(large).hexdigest()}
    packed(file, files | {"keys/didcomm.key": large, "manifest.json": json.dumps(manifest).encode()})
    with pytest.raises(SetupError, match="a key has more than 65536 bytes"):
        restore(chosen := make_settings(data_dir=tmp_path / "new"), backup_scope(chosen), file, on_progress=quiet)


@pytest.mark.parametrize("size", [1, 1 << 40])
def test_the_size_of_a_file_is_that_of_the_list(size, filled, tmp_path):
    file = write(filled, tmp_path / "b.tar")
    files = members(file)
    manifest = json.loads(files["manifest.json"])
    manifest["files"]["mediator.db"]["bytes"] = size
    packed(file, files | {"manifest.json": json.dumps(manifest).encode()})
    with pytest.raises(SetupError, match="another size than its list says"):
        restore(chosen := make_settings(data_dir=tmp_path / "new"), backup_scope(chosen), file, on_progress=quiet)


@pytest.mark.parametrize("name", ["local.token", "mediator.db-wal", "mediator.toml"])
def test_a_key_that_no_part_has_is_not_written(name, filled, tmp_path):
    file = write(filled, tmp_path / "b.tar", with_keys=True)
    files = members(file)
    manifest = json.loads(files["manifest.json"])
    manifest["files"][f"keys/{name}"] = manifest["files"]["keys/didcomm.key"]
    packed(file, files | {f"keys/{name}": files["keys/didcomm.key"], "manifest.json": json.dumps(manifest).encode()})
    new = make_settings(data_dir=tmp_path / "new")
    with pytest.raises(SetupError, match=f"lists a key that no part of this program has: {name}"):
        restore(new, backup_scope(new), file, on_progress=quiet)
    assert not (new.data_dir / name).exists()


def test_a_key_may_not_have_the_name_of_a_path(filled, tmp_path):
    file = write(filled, tmp_path / "b.tar", with_keys=True)
    files = members(file)
    manifest = json.loads(files["manifest.json"])
    for evil in ("keys/../evil", "keys/.hidden", "keys/mediator.db/x"):
        manifest["files"][evil] = manifest["files"]["keys/didcomm.key"]
        packed(file, files | {evil: KEY, "manifest.json": json.dumps(manifest).encode()})
        with pytest.raises(SetupError, match="name of a path"):
            restore(chosen := make_settings(data_dir=tmp_path / "new"), backup_scope(chosen), file, on_progress=quiet)
        del manifest["files"][evil]


def test_a_backup_of_a_newer_schema_is_refused(filled, tmp_path):
    with closing(sqlite3.connect(filled.data_dir / DATABASE_FILE)) as file, file:
        file.execute("INSERT INTO schema_migration (name, applied) VALUES ('9999_future', 0)")
    new = make_settings(data_dir=tmp_path / "new")
    written = write(filled, tmp_path / "b.tar")
    with pytest.raises(SchemaError, match="newer than this program"):
        restore(new, backup_scope(new), written, on_progress=quiet)
    assert not (new.data_dir / DATABASE_FILE).exists()


# The commands.


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["mediator", *map(str, arguments)])
        with contextlib.suppress(SystemExit):
            main()
        said = capsys.readouterr()
        return said.out + said.err

    return run


def test_the_commands_say_what_they_did(command, filled, tmp_path):
    file, there, new = tmp_path / "b.tar", ("--data-dir", filled.data_dir), ("--data-dir", tmp_path / "new")
    assert re.fullmatch(
        r"wrote \S+b\.tar: [\d.]+ KiB, 3 mailboxes with 26 messages, as of \S+ \S+\n"
        r"didcomm\.key is not in it: keep a copy of it elsewhere, or use --with-keys\n",
        command("backup", file, *there),
    )
    assert command("backup", file, *there) == f"mediator: {file} is there already; nothing was written\n"
    said = command("restore", file, *new)
    assert said.startswith("restored 3 mailboxes with 26 messages, as of ")
    assert "\nput didcomm.key into " in said


@pytest.mark.postgres
def test_migrate_to_says_what_to_do_next(command, filled, place):
    said = command("migrate-to", place("new", "postgres").store_url, "--data-dir", filled.data_dir)
    assert re.match(r"copied \d+ rows of \d+ tables; the file in \S+ stays as it is\nnow set database_url", said)
    url = place("other", "postgres").store_url
    answer = json.loads(command("migrate-to", url, "--data-dir", filled.data_dir, "--json"))
    assert answer.pop("error") == ""
    check_shape("migrate-to", answer, shapes())
