"""Publishes copies to a NATS server, and takes JetStream's acknowledgement for the confirmation (C7).

Anybody at that server who reads the subject may answer as well; but only what looks like an acknowledgement counts, and
the server is the operator's. Nothing is confirmed by a server that merely took the bytes.
"""

import asyncio
import secrets
from collections.abc import Mapping
from itertools import count
from typing import Any, Final

import orjson
from nats.errors import Error as NatsError

from mediator.errors import SetupError
from mediator.forwarding.copy_headers import describe
from mediator.login import Login
from mediator.mailboxes.copy_rule import CopyRule
from mediator.mailboxes.forwarding import MAX_BATCH, Attempt, Batch, OutgoingCopy
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection, Upstreams, connect
from mediator.nats.frames import encode_headers, encode_request

ACK_SECONDS: Final = 20.0
"""Time for all acknowledgements of a batch, on a slow link too; below the lease."""
_TOO_LARGE: Final = 10054
"""JetStream's code for a message above the limit of its stream."""
_SERVERS_OWN: Final = "nats-"
_RENAMED: Final = "mq9-header-"
"""What stands before a header of a sender that a server would obey: ``Nats-Rollup`` empties a stream."""


class JetStream:
    """A connection to the NATS server of the operator, made when it is first needed."""

    max_batch = MAX_BATCH
    max_delay = 30_000

    def __init__(self, login: Login, name: str) -> None:
        """``name`` is what the connection is called at the server."""
        self._upstreams = Upstreams(login.server.split(","), login) if login.server else None
        self._name = name
        self._connection: NatsConnection | None = None
        self._connecting = asyncio.Lock()
        self._inbox = f"_INBOX.{secrets.token_hex(16)}"
        self._numbers = count()
        self._answers: dict[str, asyncio.Future[bytes]] = {}

    async def send(self, rule: CopyRule, batch: Batch) -> Attempt:
        """Publish a batch with one write, and wait for the acknowledgements."""
        try:
            connection = await self._connect()
        except SetupError as error:
            return Attempt(problem=str(error))
        if not connection.connected:
            return Attempt(problem="the NATS server for forwarding is not reached")
        frames, waiting, refused = [], {}, []
        for copy in batch.copies:
            headers = encode_headers(_headers(copy))
            if len(headers) + len(copy.message.payload) > connection.max_payload:
                # The server would close the connection.
                refused.append(copy.message.msg_id)
                continue
            answer = f"{self._inbox}.{next(self._numbers)}"
            waiting[copy.message.msg_id] = answer
            self._answers[answer] = asyncio.get_running_loop().create_future()
            frames.append(encode_request(rule.to_subject.encode(), answer.encode(), headers, copy.message.payload))
        try:
            await connection.write(frames)
            answers = [self._answers[answer] for answer in waiting.values()]
            if answers:
                await asyncio.wait(answers, timeout=ACK_SECONDS)
        except NatsError as error:
            return Attempt(refused=refused, problem=f"NATS: {error}")
        finally:
            answered = {msg_id: self._answers.pop(answer) for msg_id, answer in waiting.items()}
        return _read_answers(answered, refused)

    async def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            await self._connection.close()

    async def _connect(self) -> NatsConnection:
        async with self._connecting:
            if self._connection is None:
                if self._upstreams is None:
                    raise SetupError("no NATS server to forward to: set forwarding.nats_url")
                connection = await connect(self._upstreams, self._name)
                await connection.subscribe(f"{self._inbox}.*", "", self._receive)
                self._connection = connection
            return self._connection

    def _receive(self, message: Request) -> None:
        answer = self._answers.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message.data)


def _headers(copy: OutgoingCopy) -> Mapping[str, str]:
    message = copy.message
    headers = {
        _RENAMED + name if name.lower().startswith(_SERVERS_OWN) else name: value
        for name, value in message.headers.items()
    }
    return headers | describe(message) | {"Nats-Msg-Id": copy.id}


def _read_answers(answered: Mapping[int, asyncio.Future[bytes]], refused: list[int]) -> Attempt:
    confirmed = []
    problem = ""
    for msg_id, answer in answered.items():
        found = _find_problem(answer.result()) if answer.done() else (f"no answer within {ACK_SECONDS:g} s", 0)
        if found is None:
            confirmed.append(msg_id)
        elif found[1] == _TOO_LARGE:
            refused.append(msg_id)
        else:
            problem = found[0]
    return Attempt(confirmed, refused, problem=problem)


def _find_problem(data: bytes) -> tuple[str, int] | None:
    """Return why an answer is no acknowledgement, with JetStream's code; None if it is one."""
    try:
        answer: Any = orjson.loads(data) if data else {}
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict) or not answer:
        return ("no JetStream stream takes this subject", 0)
    error = answer.get("error")
    if isinstance(error, dict):
        text = "".join(filter(str.isprintable, str(error.get("description", ""))))[:200]
        code = error.get("err_code")
        return (f"JetStream: {text}", code if isinstance(code, int) else 0)
    if isinstance(answer.get("stream"), str) and isinstance(answer.get("seq"), int):
        return None
    return ("the answer is not JetStream's", 0)
