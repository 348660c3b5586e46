"""The plainest queue on PostgreSQL, a table: one INSERT a message, and one DELETE of what no other reader has locked.

`python -m benchmarks.postgres_table NAME '{"url": …}'` runs a load in a process of its own; :class:`Table` starts it.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg
import uvloop

from benchmarks.nats_clients import Result, closed
from benchmarks.prefill import PAYLOAD
from mediator.system.usage import cpu_seconds

MAX_CONNECTIONS = 32
"""More of them only take turns on the server's cores."""
MAKE = "CREATE TABLE IF NOT EXISTS queue (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload BYTEA NOT NULL)"
INSERT = "INSERT INTO queue (payload) VALUES (%b) RETURNING id"
FILL = "INSERT INTO queue (payload) SELECT %b FROM generate_series(1, %s)"
DELETE = (
    "DELETE FROM queue WHERE id IN (SELECT id FROM queue ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED)"
    " RETURNING id, payload"
)

Connection: TypeAlias = "psycopg.AsyncConnection[tuple[Any, ...]]"
Connections: TypeAlias = "asyncio.Queue[Connection]"


@dataclass(frozen=True, slots=True)
class Table:
    """A table in a database, and the server's process."""

    url: str
    pid: int

    def run(self, name: str, **spec: Any) -> Result:
        """Run a load in a process of its own and return its results."""
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.postgres_table", name],
            input=json.dumps(spec | {"url": self.url, "pid": self.pid}),
            text=True,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"load {name} failed: {done.stderr.strip()[-2000:]}")
        return dict(json.loads(done.stdout))


async def insert(free: Connections, spec: Result) -> Result:
    """Insert messages, each in a transaction of its own."""

    async def once(_number: int) -> None:
        connection = await free.get()
        await (await connection.execute(INSERT, (PAYLOAD,), binary=True)).fetchone()
        free.put_nowait(connection)

    return await closed(once, spec["in_flight"], spec["seconds"], spec["pid"])


async def delete(free: Connections, spec: Result) -> Result:
    """Take ``count`` messages out, 100 with each DELETE."""
    connections = [free.get_nowait() for _ in range(spec["in_flight"])]
    await connections[0].execute("TRUNCATE queue")
    await connections[0].execute(FILL, (PAYLOAD, spec["count"]))

    async def take(connection: Connection) -> int:
        seen = 0
        while found := await (await connection.execute(DELETE, binary=True)).fetchall():
            seen += len(found)
        return seen

    cpu, started = cpu_seconds(spec["pid"]), time.perf_counter()
    seen = sum(await asyncio.gather(*(take(connection) for connection in connections)))
    seconds = time.perf_counter() - started
    return {"rate": seen / seconds, "cpu_us": (cpu_seconds(spec["pid"]) - cpu) / seen * 1e6}


LOADS: dict[str, Callable[[Connections, Result], Awaitable[Result]]] = {
    load.__name__: load for load in (insert, delete)
}


async def _main(name: str, spec: Result) -> None:
    free: Connections = asyncio.Queue()
    async with AsyncExitStack() as stack:
        for _ in range(min(spec["in_flight"], MAX_CONNECTIONS)):
            connection = await psycopg.AsyncConnection.connect(spec["url"], autocommit=True)
            free.put_nowait(await stack.enter_async_context(connection))
        first = await free.get()
        await first.execute(MAKE)
        free.put_nowait(first)
        print(json.dumps(await LOADS[name](free, spec)), flush=True)


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], json.load(sys.stdin)))
