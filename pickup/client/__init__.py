"""A DIDComm client for scripts, tests and measurements: get mediation, pick mail up, send through mediators.

A holder connects by an invitation (`mediator invite` prints one), registers a key, and picks up its mail::

    import asyncio
    from pickup.client import Holder, Sender

    async def main(invitation: str) -> None:
        async with await Holder.connect(invitation) as holder, Sender() as sender:
            grant = await holder.mediate()
            key = await holder.add_key()

            # Another agent, which has the key and the grant from an invitation of the holder.
            message = {"@type": "https://didcomm.org/basicmessage/1.0/message", "@id": "1", "content": "hello"}
            await sender.send_v1(key, grant.routing, grant.endpoint, message)

            for mail in await holder.fetch(limit=10):
                print((await holder.open(mail)).message["content"])
                await holder.received([mail.id])

            # What waits, and then new mail as it arrives:
            async for mail in holder.mail():
                print(await holder.open(mail))
                await holder.received([mail.id])

    asyncio.run(main("http://127.0.0.1:8080/didcomm?oob=…"))

With an out-of-band 2.0 invitation, or a mediator's DID, all this is DIDComm v2: ``add_key`` makes a DID, and the
sender uses ``send_v2(did, grant.routing[0], grant.endpoint, message)``. Keys are kept in memory unless
``wallet=Wallet.load(Path("wallet.json"))`` is given; ``Holder.resume(wallet)`` then continues later.

A refusal of the mediator raises :class:`ProblemError` with the report's ``code`` and ``text``.
"""

from pickup.client.handshake import MediatorInvitation
from pickup.client.holder import Holder
from pickup.client.plaintext import (
    ClientError,
    DeliveredMessage,
    Grant,
    HttpStatusError,
    NoAnswerError,
    OpenedMessage,
    PickupStatus,
    ProblemError,
)
from pickup.client.sender import Sender
from pickup.client.wallet import Wallet

__all__ = [
    "ClientError",
    "DeliveredMessage",
    "Grant",
    "Holder",
    "HttpStatusError",
    "MediatorInvitation",
    "NoAnswerError",
    "OpenedMessage",
    "PickupStatus",
    "ProblemError",
    "Sender",
    "Wallet",
]
