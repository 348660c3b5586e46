"""A PostgreSQL under a service that is tested, and what may go wrong with it while the service lives."""

import contextlib
import os
import signal
from collections.abc import Callable

from tests.postgres import PrivateServer, Server


def ask(url: str, statement: str) -> list[tuple[int, ...]]:
    """Ask the database itself."""
    import psycopg

    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        return connection.execute(statement).fetchall()


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
