"""Tries a mediator as a wallet would, step by step: connect, get mediation, send oneself a message and pick it up."""

from collections.abc import Callable

from pickup.client.errors import ClientError
from pickup.client.holder import Holder
from pickup.client.records import Grant
from pickup.client.sender import Sender
from pickup.client.wallet import Wallet
from pickup.rules.records import Generation

LABEL = "mediator try"
TEXT = "hello from mediator try"
STEPS = ("connected", "granted", "registered", "sent", "waiting", "picked up", "acknowledged", "removed")
"""What :func:`attempt` tells of, in order."""


async def attempt(
    invitation: str, done: Callable[[str, str], None], *, wallet: Wallet | None = None, seconds: float = 10.0
) -> None:
    """Try the mediator of an invitation; ``done`` is called after each of :data:`STEPS`, with what came of it.

    ``seconds`` is the timeout of each answer. Raises :class:`ClientError` at the step that fails; the mediator keeps
    the connection, without keys or mail unless it failed.
    """
    async with await Holder.connect(invitation, wallet=wallet, label=LABEL, seconds=seconds) as holder:
        done("connected", f"DIDComm {holder.generation}, {holder.link.endpoints[0]}")
        grant = await holder.mediate()
        done("granted", grant.endpoint)
        key = await holder.add_key()
        done("registered", _short(key))
        await _send(holder, grant, key, seconds)
        done("sent", f'"{TEXT}", sealed, in a forward to the mediator')
        status = await holder.status()
        done("waiting", f"{status.count} message")
        mails = await holder.fetch()
        if not mails:
            raise ClientError("the message did not come back")
        letter = await holder.open(mails[0])
        message = letter.message
        content = message["content"] if "content" in message else message["body"]["content"]
        done("picked up", f'"{content}" from {_short(letter.sender or "nobody")}')
        status = await holder.received([mail.id for mail in mails])
        if status.count:
            raise ClientError("the message did not leave the queue")
        done("acknowledged", f"{status.count} left")
        await holder.remove_key(key)
        done("removed", _short(key))


async def _send(holder: Holder, grant: Grant, key: str, seconds: float) -> None:
    async with Sender(seconds=seconds) as sender:
        if holder.generation is Generation.V1:
            type = "https://didcomm.org/basicmessage/1.0/message"
            message = {"@type": type, "@id": "hello", "content": TEXT}
            await sender.send_v1(key, grant.routing, grant.endpoint, message)
        else:
            type = "https://didcomm.org/basicmessage/2.0/message"
            body = {"content": TEXT}
            await sender.send_v2(key, grant.routing[0], grant.endpoint, {"id": "hello", "type": type, "body": body})


def _short(name: str) -> str:
    return name if len(name) <= 64 else f"{name[:56]}…"
