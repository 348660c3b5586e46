"""A PostgreSQL server for tests: the one of MEDIATOR_TEST_POSTGRES, else a private cluster of the installed programs.

The URL in MEDIATOR_TEST_POSTGRES must belong to a role that may create databases. Where neither is there a test is
skipped, but fails where CI is set. Import the fixture ``postgres``; one server serves the whole run.
"""

import contextlib
import functools
import itertools
import os
import pwd
import re
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.harness.disk import small_disk
from tests.harness.service import free_port

STARTS_WITHIN = 60
PROGRAMS = "/usr/lib/postgresql"
RAM_DISK = Path("/dev/shm")
ROOM = 2 << 30


KEEP = """
DO $$ DECLARE name text; filled boolean; BEGIN
    CREATE SCHEMA kept;
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM public.%I)', name) INTO filled;
        IF filled THEN EXECUTE format('CREATE TABLE kept.%I AS TABLE public.%I', name, name); END IF;
    END LOOP;
END $$
"""
"""Remembers the rows that a new database has."""
EMPTY = """
DO $$ DECLARE name text; filled boolean; names text; BEGIN
    PERFORM pg_terminate_backend(pid, 10000) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid();
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM public.%I)', name) INTO filled;
        IF filled THEN names := concat_ws(', ', names, format('public.%I', name)); END IF;
    END LOOP;
    EXECUTE 'TRUNCATE ' || names || ' CASCADE';
    FOR name IN SELECT sequencename FROM pg_sequences WHERE schemaname = 'public' AND last_value IS NOT NULL
        AND NOT EXISTS (SELECT FROM pg_tables WHERE schemaname = 'kept' AND starts_with(sequencename, tablename)) LOOP
        EXECUTE format('ALTER SEQUENCE public.%I RESTART', name);
    END LOOP;
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'kept' LOOP
        EXECUTE format('INSERT INTO public.%I OVERRIDING SYSTEM VALUE TABLE kept.%I', name, name);
    END LOOP;
END $$
"""
"""Makes a database as it was when it was new, whoever is still connected."""


class Server:
    """A running server in which databases can be made and dropped."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._names = (f"mediator_test_{os.getpid()}_{number}" for number in itertools.count())
        self._made: list[str] = []
        """Databases that are dropped at the end."""
        self._emptied: list[tuple[str, Any]] = []
        """Those of them that are as new, each with a connection to it."""

    @contextlib.contextmanager
    def database(self, *, migrated: bool = False) -> Iterator[str]:
        """Make an empty database, yield its URL, and drop it whoever is still connected.

        ``migrated``: with the service's tables in it, copied, which takes half as long as making them.
        """
        name = next(self._names)
        self.run(f'CREATE DATABASE "{name}" TEMPLATE "{self._template if migrated else "template1"}"')
        try:
            yield self._at(name)
        finally:
            self._drop(name)

    @contextlib.contextmanager
    def emptied(self) -> Iterator[str]:
        """Yield the URL of a database that has the service's tables, as when it was new.

        It may have served other tests, which must leave its tables as they are: only rows are removed, in a tenth of
        the time in which a database is made and dropped.
        """
        name, connection = self._emptied.pop() if self._emptied else self._prepared()
        yield self._at(name)
        connection.execute(EMPTY)
        self._emptied.append((name, connection))

    def _prepared(self) -> tuple[str, Any]:
        import psycopg

        name = next(self._names)
        self.run(f'CREATE DATABASE "{name}" TEMPLATE "{self._template}"')
        self._made.append(name)
        connection = psycopg.connect(self._at(name), autocommit=True, connect_timeout=10)
        connection.execute(KEEP)
        return name, connection

    @functools.cached_property
    def _template(self) -> str:
        """A database that is copied, and otherwise left alone."""
        from mediator.store.postgres import PostgresStore

        name = next(self._names)
        self.run(f'CREATE DATABASE "{name}"')
        self._made.append(name)
        PostgresStore(self._at(name)).close()
        return name

    def _at(self, name: str) -> str:
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    def _drop(self, name: str) -> None:
        self.run(f'DROP DATABASE "{name}" WITH (FORCE)')

    def run(self, statement: str) -> None:
        """Execute one statement outside of any transaction."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True, connect_timeout=10) as connection:
            connection.execute(statement)

    def stop(self) -> None:
        """Leave the server as it was before."""
        for name in self._made:
            self._drop(name)


class PrivateServer(Server):
    """A cluster in a temporary directory, on a loopback port, with a password of its own and fsync on.

    The port is a free one unless given. The folder is on a RAM disk with room: a database for each test is made there
    in a third of the time.
    """

    def __init__(self, programs: Path, *, in_memory: bool = True, port: int | None = None) -> None:
        self._owner = _owner()
        self._home = Path(tempfile.mkdtemp(prefix="mediator-pg-", dir=_ram_disk() if in_memory else None))
        self._as_owner: dict[str, Any] = {}
        if self._owner is not None:
            os.chown(self._home, self._owner.pw_uid, self._owner.pw_gid)
            self._as_owner = {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}
        self._process: subprocess.Popen[bytes] | None = None
        try:
            port = port or free_port()
            super().__init__(f"postgresql://postgres:{self._initialise(programs)}@127.0.0.1:{port}/postgres")
            self._start(programs, port)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The server's first process."""
        assert self._process is not None
        return self._process.pid

    @contextlib.contextmanager
    def small_database(self, size: str) -> Iterator[str]:
        """Make an empty database on a disk of its own that is no larger; the server's log is elsewhere."""
        name = next(self._names)
        owner = f",mode=700,uid={self._owner.pw_uid},gid={self._owner.pw_gid}" if self._owner else ""
        with small_disk(self._home / name, f"size={size}{owner}") as folder:
            self.run(f"CREATE TABLESPACE {name} LOCATION '{folder}'")
            try:
                self.run(f"CREATE DATABASE {name} TABLESPACE {name}")
                yield self._at(name)
            finally:
                self._drop(name)
                self.run(f"DROP TABLESPACE {name}")

    def stop(self) -> None:
        """Stop at once and forget the data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(30)
        shutil.rmtree(self._home)

    def _initialise(self, programs: Path) -> str:
        """Make the data directory, and return the password of the superuser."""
        password = secrets.token_hex(16)
        secret = self._home / "password"
        secret.write_text(password)
        if self._owner is not None:
            os.chown(secret, self._owner.pw_uid, self._owner.pw_gid)
        command = [programs / "initdb", "-D", self._home / "data", "-U", "postgres", "-A", "scram-sha-256"]
        command += [f"--pwfile={secret}", "--encoding=UTF8", "--locale=C", "--no-sync"]
        # In a language's collation "a.b" does not stand where its bytes do: a store must not depend on it.
        collated = ["--locale-provider=icu", "--icu-locale=en"] if self._major(programs) >= 15 else []
        self._run_program([*command, *collated])
        secret.unlink()
        return password

    def _run_program(self, command: Sequence[str | Path]) -> None:
        done = subprocess.run(command, cwd=self._home, check=False, capture_output=True, text=True, **self._as_owner)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed: {done.stderr}")

    def _major(self, programs: Path) -> int:
        shown = subprocess.run([programs / "initdb", "--version"], check=True, capture_output=True, text=True).stdout
        found = re.search(r"(\d+)", shown)
        return int(found[1]) if found else 0

    def _start(self, programs: Path, port: int) -> None:
        options = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": self._home, "fsync": "on"}
        # What a killed server leaves of its memory goes with its folder.
        options |= {"max_wal_size": "256MB", "dynamic_shared_memory_type": "mmap"}
        log = self._home / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [programs / "postgres", "-D", self._home / "data", *(f"--{k}={v}" for k, v in options.items())],
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                **self._as_owner,
            )
        import psycopg

        deadline = time.monotonic() + STARTS_WITHIN
        while True:
            try:
                return self.run("SELECT 1")
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL did not start: {log.read_text()[-2000:]}") from None
            time.sleep(0.05)


_SERVER = pytest.StashKey[Server]()


@pytest.fixture(scope="session")
def postgres(pytestconfig: pytest.Config) -> Server:
    """The server of this run, whichever test module asks first."""
    if _SERVER not in pytestconfig.stash:
        server = _find()
        pytestconfig.add_cleanup(server.stop)
        pytestconfig.stash[_SERVER] = server
    return pytestconfig.stash[_SERVER]


def _find() -> Server:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        missing("psycopg is not installed")
    given = os.environ.get("MEDIATOR_TEST_POSTGRES")
    if given:
        return Server(given)
    programs = programs_found()
    if programs is None:
        missing(f"no PostgreSQL: MEDIATOR_TEST_POSTGRES is not set, and initdb is neither in PATH nor in {PROGRAMS}")
    return PrivateServer(programs)


def missing(why: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{why}; in CI that is a failure")
    pytest.skip(why)


def programs_found() -> Path | None:
    in_path = shutil.which("initdb")
    if in_path is not None:
        # Packages put a link into PATH; the other programs stand beside what it points to.
        return Path(in_path).resolve().parent
    versions = sorted(Path(PROGRAMS).glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    return versions[-1].parent if versions else None


def _ram_disk() -> Path | None:
    return RAM_DISK if RAM_DISK.is_dir() and shutil.disk_usage(RAM_DISK).free > ROOM else None


def _owner() -> pwd.struct_passwd | None:
    """Whose the cluster is: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        missing("PostgreSQL does not run as root, and there is no user postgres")


class Cluster(PrivateServer):
    """A private server with an off switch; its data and its port stay."""

    def __init__(self, programs: Path) -> None:
        super().__init__(programs)
        self._programs = programs

    @property
    def place(self) -> str:
        """Host and port, as in a URL."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def halt(self) -> None:
        """Kill all its processes at once, as a power cut would: it recovers at its next start."""
        assert self._process is not None
        # Stopped, it makes no new processes while the list of them is read.
        self._process.send_signal(signal.SIGSTOP)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._process.kill()
        dying = []
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                dying.append(os.pidfd_open(int(child)))
                signal.pidfd_send_signal(dying[-1], signal.SIGKILL)
        self._process.wait(30)
        # As long as one of them lives, the next server finds its memory in use, and ends.
        for handle in dying:
            assert select.select([handle], [], [], 30)[0]
            os.close(handle)
        _, segment = (self._home / "data" / "postmaster.pid").read_text().splitlines()[6].split()
        subprocess.run(["ipcrm", "-m", segment], check=True)

    def resume(self) -> None:
        """Start it again and wait until it answers."""
        port = urlsplit(self.url).port
        assert port is not None
        self._start(self._programs, port)


class Standby(Cluster):
    """A copy of a primary, whose commits wait for it from now on."""

    def __init__(self, programs: Path, primary: Cluster) -> None:
        self._primary = urlsplit(primary.url)
        super().__init__(programs)
        primary.run("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
        primary.run("SELECT pg_reload_conf()")

    def _initialise(self, programs: Path) -> str:
        url = urlunsplit(self._primary._replace(query="application_name=standby"))
        command = [programs / "pg_basebackup", "-D", self._home / "data", "-d", url, "--checkpoint=fast", "--no-sync"]
        self._run_program([*command, "--write-recovery-conf", "--create-slot", "--slot=standby"])
        assert self._primary.password is not None
        return self._primary.password

    def promote(self) -> None:
        """Make it the primary."""
        self.run("SELECT pg_promote()")


def cluster() -> Cluster:
    """Make one; without the programs the test is skipped, but fails where CI is set."""
    programs = programs_found()
    if programs is None:
        missing("a PostgreSQL that can be stopped needs its programs, and initdb was not found")
    return Cluster(programs)


def ask(url: str, statement: str) -> list[tuple[int, ...]]:
    """Ask the database itself."""
    import psycopg

    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        return connection.execute(statement).fetchall()


def terminate_all(url: str) -> None:
    """End every other connection to the database, and wait until its process is gone, which closes the socket."""
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    ask(url, f"SELECT pg_terminate_backend(pid, {1000 * STARTS_WITHIN}) {others}")
    deadline = time.monotonic() + STARTS_WITHIN
    while ask(url, f"SELECT count(*) {others}") != [(0,)]:
        assert time.monotonic() < deadline


def answers(url: str) -> bool:
    """Whether the database takes connections."""
    import psycopg

    with contextlib.suppress(psycopg.OperationalError):
        return bool(ask(url, "SELECT 1"))
    return False


def disturbing(server: Server, url: str) -> Callable[[int], None]:
    """Return what is done to the service's connections in each of its lives: in most of them nothing."""

    def disturb(life: int) -> None:
        if life % 4 == 1:
            ask(url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'mediator'")
        elif life in (6, 14) and isinstance(server, PrivateServer):
            # One killed backend makes the server throw all out and recover from its log.
            for (pid,) in ask(url, "SELECT pid FROM pg_stat_activity WHERE application_name = 'mediator' LIMIT 1"):
                os.kill(pid, signal.SIGKILL)

    return disturb
