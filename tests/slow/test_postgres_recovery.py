"""A PostgreSQL store outlives its server: what fails says so, what was committed is there, nobody reopens anything."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import psycopg
import pytest

from mediator.errors import BusyError, SetupError, UnavailableError, UncertainError
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import NewMailbox
from mediator.mailboxes.message import HIDDEN_ID, Delayed, Filter, Message
from mediator.store import postgres as store_module
from mediator.store.base import Store
from mediator.store.postgres import PostgresStore
from mediator.system.extras import install_command
from tests.harness.postgres import Cluster, Server, ask, cluster, terminate_all
from tests.harness.waiting import block_until

pytestmark = pytest.mark.postgres

DEADLINE = 30
PLACE = ("default", "box")


@pytest.fixture
def url(postgres: Server) -> Iterator[str]:
    with postgres.database() as url:
        yield url


@pytest.fixture
def open_store() -> Iterator[Callable[[str], PostgresStore]]:
    opened: list[PostgresStore] = []

    def make(url: str) -> PostgresStore:
        opened.append(PostgresStore(url))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def restartable() -> Iterator[Cluster]:
    server = cluster()
    yield server
    server.stop()


def create(store: Store, *addresses: str) -> None:
    with store.transaction() as tx:
        for address in addresses or (PLACE[1],):
            assert tx.mailboxes.add(NewMailbox(tenant=PLACE[0], address=address, created_at=1)) is not None


def send(
    store: Store, payload: bytes, address: str = PLACE[1], before_commit: Callable[[], object] = lambda: None
) -> int:
    """Send one message; what is returned was committed."""
    with store.transaction([(PLACE[0], address)]) as tx:
        mailbox = tx.mailboxes.find(PLACE[0], address)
        assert mailbox is not None
        message = Message(mailbox.next_id, Lane.NORMAL, payload, len(payload), 1, 1)
        tx.messages.append(mailbox, message)
        before_commit()
        return message.msg_id


def kept(store: Store, address: str = PLACE[1]) -> dict[int, bytes]:
    with store.reading() as tx:
        mailbox = tx.mailboxes.find(PLACE[0], address)
        assert mailbox is not None
        found = tx.messages.newest(mailbox, Filter(), 1_000_000, 1_000_000_000, 1)
        assert (mailbox.messages, mailbox.next_id) == (len(found), max(m.msg_id for m in found) + 1 if found else 0)
        return {message.msg_id: bytes(message.payload) for message in found}


@pytest.mark.rule("A8", "A9")
def test_a_lost_connection_fails_only_its_transaction(url, open_store):
    store = open_store(url)
    create(store)
    assert send(store, b"before") == 0
    with pytest.raises(UnavailableError):
        send(store, b"lost", before_commit=lambda: terminate_all(url))
    assert send(store, b"after") == 1
    assert kept(store) == {0: b"before", 1: b"after"}


@pytest.mark.rule("A9")
def test_a_statement_on_a_dead_connection_fails_once(url, open_store):
    store = open_store(url)
    create(store)

    def ask() -> None:
        with store.transaction([PLACE]) as tx:
            terminate_all(url)
            tx.mailboxes.find("default", "other")

    with pytest.raises(UnavailableError):
        ask()
    assert send(store, b"after") == 0


def test_a_connection_dead_before_its_first_question_is_renewed(url, open_store):
    store = open_store(url)
    create(store)
    with store.reading() as tx:
        terminate_all(url)
        assert tx.mailboxes.find(*PLACE) is not None
    with store.transaction() as tx:
        tx.write_heartbeat(1)
        terminate_all(url)
        assert tx.session.dialect.execute("SELECT at FROM heartbeat") == [(1,)]


def test_a_connection_dead_at_the_commit_leaves_it_uncertain(url, open_store):
    store = open_store(url)

    def write() -> None:
        with store.transaction() as tx:
            tx.write_heartbeat(1)
            terminate_all(url)

    with pytest.raises(UncertainError):
        write()


def test_dead_idle_connections_are_hidden_from_callers(url, open_store):
    store = open_store(url)
    create(store)
    send(store, b"1")
    assert len(kept(store)) == 1
    terminate_all(url)
    assert send(store, b"2") == 1
    terminate_all(url)
    assert kept(store) == {0: b"1", 1: b"2"}


@pytest.mark.rule("A9")
def test_a_snapshot_on_a_dead_connection_fails_once(url, open_store):
    store = open_store(url)
    create(store)

    def ask() -> None:
        with store.reading() as tx:
            tx.mailboxes.find(*PLACE)
            terminate_all(url)
            tx.delays.next_due()

    with pytest.raises(UnavailableError):
        ask()
    assert kept(store) == {}


@pytest.mark.rule("A8", "A9")
def test_senders_outlive_a_server_that_goes_and_comes_back(restartable, open_store):
    with restartable.database() as url:
        store = open_store(url)
        create(store)
        answered: dict[int, bytes] = {}
        failures = 0
        stop = threading.Event()
        progress = threading.Condition()

        def sender() -> None:
            nonlocal failures
            number = 0
            while not stop.is_set():
                payload = f"{number}".encode()
                number += 1
                try:
                    msg_id = send(store, payload)
                except UnavailableError:
                    failures += 1
                else:
                    assert msg_id not in answered
                    answered[msg_id] = payload
                with progress:
                    progress.notify_all()

        def wait(condition: Callable[[], bool]) -> None:
            with progress:
                assert progress.wait_for(condition, DEADLINE)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(sender)
            try:
                for _ in range(3):
                    reached, failed = len(answered), failures
                    wait(lambda reached=reached: len(answered) > reached + 50)
                    restartable.halt()
                    wait(lambda failed=failed: failures > failed)
                    with pytest.raises(UnavailableError), store.reading() as tx:
                        tx.delays.next_due()
                    restartable.resume()
                reached = len(answered)
                wait(lambda: len(answered) > reached + 50)
            finally:
                stop.set()
            running.result(DEADLINE)
        found = kept(store)
        assert {msg_id: found.get(msg_id) for msg_id in answered} == answered
        # A commit whose answer was lost may be there as well, once for each time the server went.
        assert len(found) - len(answered) <= 3


@pytest.mark.rule("A8")
def test_a_cancelled_wait_for_a_standby_is_uncertain(restartable, open_store):
    store = open_store(restartable.url)
    create(store)
    restartable.run("ALTER SYSTEM SET synchronous_standby_names = 'absent'")
    restartable.run("SELECT pg_reload_conf()")
    block_until(lambda: ask(restartable.url, "SHOW synchronous_standby_names") == [("absent",)])
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, store, b"here alone")
        cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        block_until(lambda: ask(restartable.url, cancel))
        with pytest.raises(UncertainError):
            sending.result(DEADLINE)
    assert kept(store) == {0: b"here alone"}
    restartable.run("ALTER SYSTEM RESET synchronous_standby_names")
    restartable.run("SELECT pg_reload_conf()")
    assert send(store, b"after") == 1


@pytest.mark.rule("A9")
def test_an_absent_server_is_said_at_once(restartable):
    with restartable.database() as url:
        restartable.halt()
        try:
            with pytest.raises(UnavailableError, match="cannot open the database"):
                PostgresStore(url)
        finally:
            restartable.resume()


@pytest.mark.parametrize("url", ["postgresql://u:se%zzcret@host/db", "nonsense", "mysql://u@h/d"])
def test_a_wrong_url_is_refused_without_repeating_it(url):
    with pytest.raises(SetupError) as refused:
        PostgresStore(url)
    assert "cret" not in str(refused.value)


def test_a_missing_driver_is_named():
    blocked = "import sys; sys.modules['psycopg'] = None; import mediator.store.postgres"
    done = subprocess.run(
        [sys.executable, "-c", blocked], check=False, capture_output=True, text=True, timeout=DEADLINE
    )
    assert "SetupError" in done.stderr
    assert install_command("postgres") in done.stderr


@pytest.mark.rule("A8")
@pytest.mark.parametrize(("default", "used"), [("off", "on"), ("local", "on"), ("remote_apply", "remote_apply")])
def test_a_weaker_default_of_the_operator_does_not_count(url, open_store, postgres, default, used):
    name = urlsplit(url).path[1:]
    postgres.run(f'ALTER DATABASE "{name}" SET synchronous_commit = {default}')
    postgres.run(f'ALTER DATABASE "{name}" SET default_transaction_isolation = serializable')
    store = open_store(url)
    create(store)
    with store.transaction() as tx:
        assert tx.session.dialect.execute("SHOW synchronous_commit") == [(used,)]
        assert tx.session.dialect.execute("SHOW transaction_isolation") == [("read committed",)]


@pytest.mark.rule("A9")
def test_a_database_that_takes_no_writes_is_not_opened(url, postgres):
    postgres.run(f'ALTER DATABASE "{urlsplit(url).path[1:]}" SET default_transaction_read_only = on')
    with pytest.raises(UnavailableError, match="read-only"):
        PostgresStore(url)


@pytest.mark.rule("A8")
def test_a_statement_that_failed_unnoticed_does_not_commit(url, open_store):
    store = open_store(url)
    create(store)

    def send_behind_a_failure() -> None:
        with store.transaction([PLACE]) as tx:
            mailbox = tx.mailboxes.find(*PLACE)
            with suppress(psycopg.Error):
                tx.session.dialect.execute("SELECT 1 / 0")
            tx.messages.append(mailbox, Message(mailbox.next_id, Lane.NORMAL, b"lost", 4, 1, 1))

    with pytest.raises(UnavailableError):
        send_behind_a_failure()
    with pytest.raises(UnavailableError), store.transaction() as tx, suppress(psycopg.Error):
        tx.session.dialect.execute("SELECT 1 / 0")
    assert kept(store) == {}


def test_a_question_that_takes_too_long_is_ended(url, open_store, monkeypatch):
    monkeypatch.setattr(store_module, "READ_SECONDS", 1)
    store = open_store(url)
    with pytest.raises(UnavailableError, match="narrow it with since or before_id"), store.reading() as tx:
        tx.session.dialect.execute("SELECT pg_sleep(60)")
    create(store)
    assert kept(store) == {}


def test_readers_are_bounded(url, open_store, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "READ_SECONDS", 0.01)
        store = open_store(url)
    create(store)
    with ExitStack() as taken:
        for _ in range(store_module.READERS):
            taken.enter_context(store.reading())
        with pytest.raises(BusyError), store.reading():
            pass
    assert kept(store) == {}


def test_nothing_can_be_changed_in_a_snapshot(url, open_store):
    store = open_store(url)
    with pytest.raises(UnavailableError), store.reading() as tx:
        tx.mailboxes.add(NewMailbox(tenant="default", address="x", created_at=1))


@pytest.mark.rule("A9")
def test_a_mailbox_locked_too_long_is_an_error(url, open_store, monkeypatch):
    monkeypatch.setattr(store_module, "LOCK_SECONDS", 0.2)
    store, other = open_store(url), open_store(url)
    create(store)
    with other.transaction([PLACE]):
        with pytest.raises(UnavailableError, match="another session of the database holds a lock"):
            send(store, b"x")
        with pytest.raises(UnavailableError, match="another session"), store.transaction() as tx:
            tx.mailboxes.find(*PLACE)
    assert send(store, b"y") == 0


@pytest.mark.rule("A9")
def test_a_frozen_session_that_holds_a_lock_is_ended(url, open_store):
    store, frozen = open_store(url), open_store(url)
    create(store)
    numbers = []
    # It finds out when it goes on.
    with pytest.raises(UnavailableError):
        send(frozen, b"lost", before_commit=lambda: numbers.append(send(store, b"x")))
    assert numbers == [0]
    assert send(frozen, b"y") == 1
    assert kept(store) == {0: b"x", 1: b"y"}


@pytest.mark.rule("A9")
def test_a_session_at_work_that_holds_a_lock_is_not_ended(url, open_store):
    store, busy = open_store(url), open_store(url)
    create(store)
    with ThreadPoolExecutor() as pool, busy.transaction([PLACE]) as tx:
        sent = pool.submit(send, store, b"x")
        block_until(lambda: store.waits_for, what="the writer knows who holds the lock")
        [(pid,)] = tx.session.dialect.execute("SELECT pg_backend_pid()")
        assert store.waits_for == (
            f"another session of the database (process {pid} of the server) holds a lock that the service waits for"
        )
        # At work in the server for longer than a client may be silent.
        tx.session.dialect.execute(f"SELECT pg_sleep({store_module.HOLDER_SECONDS + 1})::text")
    assert sent.result(DEADLINE) == 0
    assert store.waits_for is None


def test_a_lock_of_another_program_is_left_alone(url, open_store):
    store = open_store(url)
    create(store)
    with psycopg.connect(url) as person:
        person.execute("SELECT 1 FROM mailbox FOR UPDATE")
        with pytest.raises(UnavailableError, match=f"process {person.info.backend_pid} of the server"):
            send(store, b"x")
        person.rollback()
    assert send(store, b"y") == 0


def test_the_server_notices_a_machine_that_lost_power(url, open_store):
    store = open_store(url)
    names = "'tcp_keepalives_idle', 'tcp_keepalives_interval', 'tcp_keepalives_count', 'tcp_user_timeout'"
    sql = f"SELECT setting::bigint FROM pg_settings WHERE name IN ({names}) ORDER BY name"
    with store.transaction() as tx:
        assert tx.session.dialect.execute(sql) == [(3,), (5,), (2,), (10_000,)]


def test_a_deadlock_fails_one_of_the_two_and_both_can_go_on(url, open_store):
    first, second = open_store(url), open_store(url)
    create(first, "a", "b")
    both = threading.Barrier(2)

    def cross(store: Store, one: str, other: str) -> bool:
        try:
            with store.transaction() as tx:
                tx.mailboxes.find("default", one)
                both.wait(DEADLINE)
                tx.mailboxes.find("default", other)
        except UnavailableError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(cross, first, "a", "b"), pool.submit(cross, second, "b", "a")]
        assert sorted(outcome.result(DEADLINE) for outcome in outcomes) == [False, True]
    assert [send(first, b"x", "a"), send(second, b"x", "a")] == [0, 1]


@pytest.mark.rule("S4")
def test_only_one_instance_releases_a_delayed_message(url, open_store):
    first, second = open_store(url), open_store(url)
    create(first)
    with first.transaction([PLACE]) as tx:
        mailbox = tx.mailboxes.find(*PLACE)
        tx.delays.add(Delayed(0, mailbox.id, 5, False, Message(HIDDEN_ID, Lane.NORMAL, b"x", 1, 1, 1)))
    with ThreadPoolExecutor(1) as pool:
        with first.transaction() as tx:
            due = tx.delays.due(5, 10, 1024)
            assert len(due) == 1
            asked = threading.Event()

            def ask() -> int:
                with second.transaction() as late:
                    asked.set()
                    return len(late.delays.due(5, 10, 1024))

            answer = pool.submit(ask)
            assert asked.wait(DEADLINE)
            tx.delays.remove(due)
        assert answer.result(DEADLINE) == 0
