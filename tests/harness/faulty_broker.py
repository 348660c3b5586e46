"""A broker that is broken on purpose: a proxy before a real one that changes what passes on the NATS wire."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

PREFIX = "$mq9.AI."
MESSAGES = {b"PUB": 1, b"HPUB": 2, b"MSG": 1, b"HMSG": 2}
"""Operations with a payload, and how many sizes end their lines."""


@dataclass(slots=True)
class Frame:
    """A request of a client, its reply, a message that is pushed, or a subscription."""

    kind: str
    """``request``, ``reply``, ``push`` or ``sub``."""
    verb: str
    """The subject without its prefix; that of the request for a reply."""
    words: list[str]
    """What stands between the operation and the sizes."""
    payload: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return dict(json.loads(self.payload or b"{}"))

    @body.setter
    def body(self, fields: dict[str, Any]) -> None:
        self.payload = json.dumps(fields).encode()

    def answer(self, **fields: Any) -> "Frame":
        """Return a reply to this request that the broker never sees."""
        return Frame("reply", self.verb, self.words, json.dumps(fields).encode())

    def encode(self, operation: str) -> bytes:
        """Write it as the wire has it."""
        if self.kind == "sub":
            return f"SUB {' '.join(self.words)}\r\n".encode()
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        headers = f"NATS/1.0\r\n{lines}\r\n".encode() if self.headers else b""
        sizes = [len(headers)] if headers else []
        sizes.append(len(headers) + len(self.payload))
        line = " ".join(["H" + operation if headers else operation, *self.words, *map(str, sizes)])
        return line.encode() + b"\r\n" + headers + self.payload + b"\r\n"


Fault = Callable[[Frame], "list[Frame] | None"]
"""Changes a frame, or returns what goes on in its place; an ``answer`` goes back to the client."""


class Connection:
    """A client's connection and its own one to the real broker."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.verbs: dict[str, str] = {}
        """The verbs of requests under way, by their reply subjects."""
        self.sids: dict[str, str] = {}
        """The first subscription of the client to each subject, by the subject."""

    async def pump(
        self, reader: asyncio.StreamReader, onward: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        """Pass on what one side says."""
        while line := await reader.readline():
            operation, *words = line.split()
            operation = operation.upper()
            if operation == b"SUB":
                onward.write(b"".join(frame.encode("SUB") for frame in self._passed(self._subscription(words))))
            elif sizes := MESSAGES.get(operation):
                content = (await reader.readexactly(int(words[-1]) + 2))[:-2]
                split = int(words[-2]) if sizes > 1 else 0
                frame = self._message(operation, [word.decode() for word in words[:-sizes]], content, split)
                if frame is None:
                    onward.write(line + content + b"\r\n")
                    continue
                for each in self._passed(frame):
                    answered = frame.kind == "request" and each.kind == "reply"
                    if answered:
                        reply = each.words[1]
                        sid = next(sid for subject, sid in self.sids.items() if _matches(subject, reply))
                        back.write(replace(each, words=[reply, sid]).encode("MSG"))
                    else:
                        onward.write(each.encode("PUB" if frame.kind == "request" else "MSG"))
            else:
                onward.write(line)
            await onward.drain()

    def _passed(self, frame: Frame) -> list[Frame]:
        changed = self.fault(frame)
        return [frame] if changed is None else changed

    def _subscription(self, words: list[bytes]) -> Frame:
        said = [word.decode() for word in words]
        self.sids.setdefault(said[0], said[-1])
        return Frame("sub", said[0].removeprefix(PREFIX), said)

    def _message(self, operation: bytes, words: list[str], content: bytes, split: int) -> Frame | None:
        """Read a message of mq9; None for all others."""
        headers = {}
        for line in content[:split].decode().split("\r\n")[1:]:
            name, colon, value = line.partition(":")
            if colon:
                headers[name] = value.strip()
        subject, payload = words[0], content[split:]
        if operation in (b"PUB", b"HPUB"):
            if not subject.startswith(PREFIX):
                return None
            if len(words) > 1:
                self.verbs[words[1]] = subject.removeprefix(PREFIX)
            return Frame("request", subject.removeprefix(PREFIX), words, payload, headers)
        if subject.startswith(PREFIX):
            return Frame("push", subject.removeprefix(PREFIX), words, payload, headers)
        if (verb := self.verbs.pop(subject, None)) is not None and payload:
            return Frame("reply", verb, words, payload, headers)
        return None


def _matches(pattern: str, subject: str) -> bool:
    return pattern == subject or (pattern.endswith("*") and subject.startswith(pattern[:-1]))


@contextlib.asynccontextmanager
async def faulty_broker(port: int, fault: Fault) -> AsyncIterator[str]:
    """Stand before the broker on a port of this machine, and return the URL of the faulty one."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        real_reader, real_writer = await asyncio.open_connection("127.0.0.1", port)
        connection = Connection(fault)
        pumps = [
            asyncio.ensure_future(connection.pump(reader, real_writer, writer)),
            asyncio.ensure_future(connection.pump(real_reader, writer, real_writer)),
        ]
        tasks.update(pumps)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for each in (writer, real_writer):
            each.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
