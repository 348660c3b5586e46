"""An agent's side of the protocol: the verbs over a plain NATS client and the public subjects alone."""

import asyncio
import base64
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import nats
import orjson
from nats.aio.client import Client as NatsClient
from nats.errors import Error as NatsError

PREFIX = "$mq9.AI."
ANSWERS_WITHIN = 6.0
"""Seconds until an answer is given up, on top of what a FETCH waits."""
PAUSE = 0.05
"""Seconds before a request is made once more."""


class Unanswered(Exception):
    """No answer came, or one that says to ask again; only its ``code`` says whether anything may have happened."""

    def __init__(self, why: str, code: str = "") -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply and when it was asked for; times are Unix seconds."""

    body: dict[str, Any]
    asked_at: float
    """When the attempt that was answered was made."""
    first_at: float
    """When the first attempt was made."""
    answered_at: float
    attempts: int

    @property
    def error(self) -> str:
        """What went wrong; empty when nothing did."""
        return str(self.body["error"])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of FETCH and QUERY."""
        messages: list[dict[str, Any]] = self.body["messages"]
        return messages


class Client:
    """Asks over one or several connections in turn; a request without an answer is made again ``tries`` times.

    A group stays on one connection, as a consumer does that acknowledges where it fetched (K2, F9).
    """

    def __init__(self, connections: Sequence[NatsClient], tries: int, within: float) -> None:
        self._connections = list(connections)
        self._next = itertools.cycle(self._connections).__next__
        self._tries = tries
        self._within = within

    @classmethod
    async def connect(
        cls,
        url: str | list[str],
        *,
        connections: int = 1,
        tries: int = 1,
        within: float = ANSWERS_WITHIN,
        **options: Any,
    ) -> "Client":
        """Connect; a connection that breaks is made again for as long as the client lives."""

        async def silent(_error: Exception) -> None:
            """Breaks are part of these tests; what they cost is told by the answers."""

        made = [
            await nats.connect(
                url,
                connect_timeout=20,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.05,
                error_cb=silent,
                **options,
            )
            for _ in range(connections)
        ]
        return cls(made, tries, within)

    async def close(self) -> None:
        """End the connections."""
        for connection in self._connections:
            # The library would write what is left to a server that may have been killed, and give up half closed.
            connection._pending, connection._pending_data_size = [], 0
            await connection.close()

    async def ask(
        self,
        subject: str,
        body: bytes | Mapping[str, Any] = b"",
        headers: dict[str, str] | None = None,
        wait: float = 0.0,
    ) -> Answer:
        """Make a request, again where no answer came or the service could not; :class:`Unanswered` in the end.

        ``wait`` is the seconds the service may take on purpose.
        """
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        first_at = time.time()
        why = code = ""
        for attempt in range(1, self._tries + 1):
            asked_at = time.time()
            try:
                connection = self._connection_of(subject, body)
                reply = await connection.request(PREFIX + subject, data, wait + self._within, headers=headers)
            except (NatsError, OSError) as error:
                why, code = type(error).__name__, ""
            else:
                answer = Answer(orjson.loads(reply.data), asked_at, first_at, time.time(), attempt)
                if not answer.error.startswith(("unavailable: ", "server busy: ")):
                    return answer
                why, code = answer.error, answer.body["error_code"]
            if attempt < self._tries:
                await asyncio.sleep(PAUSE)
        raise Unanswered(f"{subject.split('.')[1]}: {why}", code)

    def _connection_of(self, subject: str, body: bytes | Mapping[str, Any]) -> NatsClient:
        group = None if isinstance(body, bytes) else body.get("group_name")
        if group is None:
            return self._next()
        consumer = f"{subject.split('.', 2)[2]} {group}".encode()
        return self._connections[crc32(consumer) % len(self._connections)]

    # The verbs.

    async def create(self, **fields: Any) -> Answer:
        """MAILBOX.CREATE."""
        return await self.ask("MAILBOX.CREATE", fields)

    async def send(self, address: str, payload: bytes, **headers: object) -> Answer:
        """MSG.SEND; ``priority="urgent"`` becomes the header ``mq9-priority``."""
        ours = {f"mq9-{name.replace('_', '-')}": str(value) for name, value in headers.items()}
        return await self.ask(f"MSG.SEND.{address}", payload, ours or None)

    async def fetch(self, address: str, group: str | None = None, **fields: Any) -> Answer:
        """MSG.FETCH; the names of ``config`` are given like all others."""
        config = {
            name: fields.pop(name)
            for name in ("num_msgs", "max_wait_ms", "ack_wait_ms", "max_deliver")
            if name in fields
        }
        if group is not None:
            fields["group_name"] = group
        wait = config.get("max_wait_ms", 500) / 1000
        return await self.ask(f"MSG.FETCH.{address}", {**fields, "config": config}, wait=wait)

    async def ack(self, address: str, group: str, ids: Sequence[int]) -> Answer:
        """MSG.ACK."""
        return await self.ask(f"MSG.ACK.{address}", {"group_name": group, "mail_address": address, "msg_ids": ids})

    async def nack(self, address: str, group: str, ids: Sequence[int], delay_ms: int) -> Answer:
        """MSG.NACK."""
        return await self.ask(f"MSG.NACK.{address}", {"group_name": group, "msg_ids": ids, "delay_ms": delay_ms})

    async def extend(self, address: str, group: str, ids: Sequence[int], ack_wait_ms: int) -> Answer:
        """MSG.EXTEND."""
        fields = {"group_name": group, "msg_ids": ids, "ack_wait_ms": ack_wait_ms}
        return await self.ask(f"MSG.EXTEND.{address}", fields)

    async def query(self, address: str, **fields: Any) -> Answer:
        """MSG.QUERY."""
        return await self.ask(f"MSG.QUERY.{address}", fields)

    async def query_all(self, address: str, **fields: Any) -> list[dict[str, Any]]:
        """MSG.QUERY page by page until there is no older one; oldest first (Q1)."""
        found: list[dict[str, Any]] = []
        before: dict[str, int] = {}
        while True:
            answer = await self.query(address, limit=1000, **fields, **before)
            assert not answer.error, answer.error
            if not answer.messages:
                return found
            found = answer.messages + found
            before = {"before_id": answer.messages[0]["msg_id"]}

    async def delete(self, address: str, msg_id: int) -> Answer:
        """MSG.DELETE."""
        return await self.ask(f"MSG.DELETE.{address}.{msg_id}")


def payload_of(item: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message in a list (N6)."""
    if "encoding" in item:
        assert item["encoding"] == "base64"
    return base64.b64decode(item["payload"], validate=True)
