"""The NATS door: any NATS client speaks mq9 to the mailboxes, each tenant in a NATS account of its own.

How a SEND travels: nats-server delivers it on `mq9.<account>.$mq9.AI.MSG.SEND.<address>`, and the client (`client.py`)
parses it with `frames.py`; or the gateway hands it over in memory. The door (`door.py`) finds the tenant
(`accounts.py`), reads the headers (`requests.py`), admits it within the tenant's share (`admission.py`) and gives it to
the broker. After the commit the reply waits in the queue (`reply_queue.py`) for the next write, or goes back in memory.
All other verbs stand in the table of `verbs.py`, those of older editions in `editions/`, and each request to one is a
task.

Instances talk to each other in control messages (`control_messages.py`, `announcements.py`). `opening.py` puts it all
together, with a managed nats-server (`server.py`) or an external one.
"""
