"""The NATS door: any NATS client speaks mq9 to the mailboxes, each tenant in a NATS account of its own.

How a SEND travels: nats-server delivers it on `mq9.<account>.$mq9.AI.MSG.SEND.<address>`, and the client (`client.py`)
parses it with `frames.py`; or the gateway hands it over in memory. The door (`door.py`) finds the tenant
(`accounts.py`), admits the request within the tenant's share (`admission.py`), and has its verb (`verbs.py`) read the
headers (`protocol.py`) and give the message to the broker. After the commit the reply waits in the queue
(`admission.py`) for the next write, or goes back in memory. ACK, NACK and EXTEND go the same way; each request to
another verb is a task. Older editions have verbs of their own (`editions.py`).

Instances talk to each other in control messages (`control_messages.py`). `opening.py` puts it all together,
with a managed nats-server (`server.py`) or an external one.
"""
