"""The shapes that ``robustmq-mq9-python`` expects; the name a client gave in CONNECT says that it is one (E11)."""

from binascii import b2a_base64

import orjson

from mediator.nats.client import Request

NAME = "robustmq-mq9-python"
"""What the names of such clients begin with."""
_MARK = NAME.encode()
_SUCCESS = b'{"error":""'


def speaks(request: Request) -> bool:
    """Whether the client that asks is one; nobody knows where the server tells nothing of its clients."""
    return _MARK in request.block and request.client_name.startswith(NAME)


def reply(answer: bytes) -> bytes:
    """Return an answer without ``error`` if it is a success: this client takes the key itself for a failure."""
    if not answer.startswith(_SUCCESS):
        return answer
    return b"{" + answer[len(_SUCCESS) :].removeprefix(b",")


def push(msg_id: int, payload: bytes) -> bytes:
    """Return the body of a pushed message; an empty one goes as it is, since the client would show the object."""
    if not payload:
        return b""
    return orjson.dumps({"msg_id": msg_id, "payload": b2a_base64(payload, newline=False).decode("ascii")})
