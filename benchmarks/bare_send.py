"""The floor under a SEND: a NATS responder that commits what has arrived, then answers, and does nothing else.

`python -m benchmarks.bare_send DATABASE PORT` serves the mailboxes of a database that the store made. It promises what
a SEND does: the message is in the same table, committed and synced to disk, before its msg_id is answered; a msg_id is
given once. It speaks as much of the NATS protocol as a client needs that has one subscription, to its replies.
"""

import asyncio
import sqlite3
import sys
import time
from pathlib import Path
from typing import cast

import uvloop

from mediator.store.sqlite import LOG_BYTES, PAGE_BYTES
from mediator.store.sqlite_file import lengthen

INFO = b'INFO {"server_id":"floor","version":"2.15.1","proto":1,"headers":true,"max_payload":1048576}\r\n'
SUBJECT = "$mq9.AI.MSG.SEND."
LANE = 2
INSERT = "INSERT INTO message (mailbox_no, msg_id, lane, size, created_at, payload) VALUES (?, ?, ?, ?, ?, ?)"


class Mailboxes:
    """Gives msg_ids, and commits all that has arrived in one transaction, on the event loop."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA synchronous = full")
        self._database.execute(f"PRAGMA wal_autocheckpoint = {LOG_BYTES // PAGE_BYTES}")
        found = self._database.execute("SELECT address, no, next_id FROM mailbox").fetchall()
        # As the store's log after some time: to overwrite it takes a disk fewer steps than to append.
        lengthen(f"{path}-wal", LOG_BYTES, LOG_BYTES)
        self._numbers = {f"{SUBJECT}{address}".encode(): no for address, no, _ in found}
        self._next_ids = {no: next_id for _, no, next_id in found}
        self._arrived: list[tuple[_Client, bytes, int, bytes]] = []

    def send(self, client: "_Client", subject: bytes, reply: bytes, payload: bytes) -> None:
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._commit)
        self._arrived.append((client, reply, self._numbers[subject], payload))

    def _commit(self) -> None:
        arrived, self._arrived = self._arrived, []
        now = time.time_ns() // 1_000_000
        rows, replies = [], dict[_Client, list[bytes]]()
        for client, reply, mailbox_no, payload in arrived:
            msg_id = self._next_ids[mailbox_no]
            self._next_ids[mailbox_no] = msg_id + 1
            rows.append((mailbox_no, msg_id, LANE, len(payload), now, payload))
            answer = b'{"error":"","msg_id":%d}' % msg_id
            frame = b"MSG %b %b %d\r\n%b\r\n" % (reply, client.subscription, len(answer), answer)
            replies.setdefault(client, []).append(frame)
        self._database.execute("BEGIN IMMEDIATE")
        self._database.executemany(INSERT, rows)
        self._database.execute("COMMIT")
        for client, frames in replies.items():
            client.transport.write(b"".join(frames))


class _Client(asyncio.Protocol):
    """A connection of a client."""

    transport: asyncio.Transport
    subscription = b""

    def __init__(self, mailboxes: Mailboxes) -> None:
        self._mailboxes = mailboxes
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of it.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(INFO)

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while (end := data.find(b"\r\n", at)) >= 0:
            after = end + 2
            line = data[at:end].split(b" ")
            if line[0] == b"PUB":
                _, subject, reply, size = line
                after += int(size) + 2
                if after > len(data):
                    break
                self._mailboxes.send(self, subject, reply, data[end + 2 : after - 2])
            elif line[0] == b"SUB":
                self.subscription = line[-1]
            elif line[0] == b"PING":
                self.transport.write(b"PONG\r\n")
            at = after
        self._rest = data[at:]


async def _serve(path: Path, port: int) -> None:
    mailboxes = Mailboxes(path)
    server = await asyncio.get_running_loop().create_server(lambda: _Client(mailboxes), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
