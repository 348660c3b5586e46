"""Statements on a connection to PostgreSQL that wait until an answer is needed."""

from collections.abc import Callable, Iterator

import psycopg
import pytest

from mediator.store.wire import Wire
from tests.harness.postgres import Server

pytestmark = pytest.mark.postgres

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"


@pytest.fixture
def connect(postgres: Server) -> Iterator[Callable[[], "psycopg.Connection"]]:
    with postgres.database() as url:
        yield lambda: psycopg.connect(url, autocommit=True)


@pytest.fixture
def wire(connect) -> Iterator[Wire]:
    wire = Wire(connect)
    wire.begin(BEGIN)
    wire.tell("CREATE TABLE item (no BIGINT, name TEXT, body BYTEA, small SMALLINT)")
    assert wire.commit()
    yield wire
    wire.close()


def test_what_was_told_is_there_for_the_next_question(wire):
    wire.begin(BEGIN)
    for number in range(3):
        wire.tell("INSERT INTO item (no) VALUES (?)", (number,))
    assert wire.ask("SELECT no FROM item ORDER BY no") == [(0,), (1,), (2,)]
    wire.roll_back()
    wire.begin(BEGIN)
    assert wire.ask("SELECT no FROM item") == []
    assert wire.commit()


def test_null_takes_any_type_before_and_after_a_value(wire):
    insert = "INSERT INTO item (no, name, body, small) VALUES (?, ?, ?, ?)"
    kept = [(None, None, b"x", None), (1, None, None, None), (None, "a", None, 3), (2, "b", b"y", None)]
    wire.begin(BEGIN)
    for row in kept:
        wire.tell(insert, row)
    assert wire.ask("SELECT no, name, body, small FROM item") == kept


def test_a_failure_shows_at_the_next_question(wire):
    wire.begin(BEGIN)
    wire.tell("INSERT INTO item (no) VALUES (1 / ?)", (0,))
    wire.tell("INSERT INTO item (no) VALUES (2)")
    with pytest.raises(psycopg.errors.DivisionByZero):
        wire.ask("SELECT no FROM item")
    assert wire.failed
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        wire.ask("SELECT 1")
    assert not wire.commit()
    # Statements that were passed over are prepared anew.
    wire.begin(BEGIN)
    wire.tell("INSERT INTO item (no) VALUES (2)")
    assert wire.ask("SELECT no FROM item") == [(2,)]


def test_a_failure_shows_at_the_commit(wire):
    wire.begin(BEGIN)
    wire.tell("INSERT INTO nowhere (no) VALUES (1)")
    with pytest.raises(psycopg.errors.UndefinedTable):
        wire.commit()
    assert wire.failed
    wire.roll_back()
    wire.begin(BEGIN)
    assert wire.ask("SELECT 1::bigint") == [(1,)]


def test_more_than_the_socket_holds_goes_both_ways_at_once(wire):
    wire.begin(BEGIN)
    body = bytes(1 << 20)
    for _ in range(32):
        # Each has an answer as large as itself, which nobody reads until all are sent.
        wire.tell("SELECT ?::bytea", (body,))
    assert wire.ask("SELECT length(?::bytea)", (body,)) == [(1 << 20,)]
