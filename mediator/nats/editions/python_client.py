"""The shapes that ``robustmq-mq9-python`` expects; clients that have its name in CONNECT get them (E11)."""

from binascii import b2a_base64

import orjson

from mediator.nats.client import Request

NAME = "robustmq-mq9-python"
"""What the names of such clients begin with."""
LANE_WORDS = ("high", "high", "normal", "low")
"""The word for each lane in the edition of questions and answers, which this client speaks (E1)."""
_SUCCESS = b'{"error":""'


def speaks(request: Request) -> bool:
    """Whether the client that asks is one; False where the server does not describe its clients."""
    return request.client.name.startswith(NAME)


def encode_reply(answer: bytes) -> bytes:
    """Return a reply, on success without ``error``: this client takes the key itself for a failure."""
    if not answer.startswith(_SUCCESS):
        return answer
    return b"{" + answer[len(_SUCCESS) :].removeprefix(b",")


def push(msg_id: int, payload: bytes) -> bytes:
    """Return the body of a pushed message; an empty one goes as it is, since the client would show the object."""
    if not payload:
        return b""
    return orjson.dumps({"msg_id": msg_id, "payload": b2a_base64(payload, newline=False).decode("ascii")})
