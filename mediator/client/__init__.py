"""The client for agents: mailboxes and the registry of a mediator, over NATS, with nothing of the server.

::

    async with Mailbox.open("nats://127.0.0.1:4222", "agent.inbox", create=True) as box:
        await box.send("translate this", priority="urgent")
        async for message in box.consume(group="workers", lease=30):
            async with message:
                print(message.text)

:mod:`mediator.client.sync` has the same for programs without an event loop. Errors are those of
:mod:`mediator.errors`, each with a stable code.
"""

from mediator.client.client import Client, Delivery, Mailbox
from mediator.client.connection import Reply
from mediator.client.login import LoginOptions
from mediator.client.message import Message, Outgoing
from mediator.client.registry import Agent, Registration

__all__ = ["Agent", "Client", "Delivery", "LoginOptions", "Mailbox", "Message", "Outgoing", "Registration", "Reply"]
