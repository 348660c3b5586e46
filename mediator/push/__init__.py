"""Subscriptions to stored mail: replay, then live mail; queue groups and broadcasts (E6, E7, E9, E10).

How a SUB travels:

1. The client's bytes reach the gateway (`gateway/connections.py`), whose session (`gateway/session.py`) looks at the
   few frames that matter. Most bytes pass on to nats-server as they came.
2. A SUB to stored mail goes on to nats-server under a secret subject, `$mq9.PUSH.<token>.…`, followed by an OPEN on the
   client's own connection, so that nats-server vouches for the tenant. The client's PONG waits for the reply.
3. The NATS door of one instance takes the OPEN (`subscriptions.py`), finds the source of its subject (`sources.py`,
   `broadcasts.py`) and replies to the gateway on a control subject (`protocol.py`).
4. Without a queue group the mailbox's feed (`live_feed.py`) replays what is stored, then pushes what comes; with one,
   a queue group does (`queue_groups.py`). Both read through the broker, encode (`encoding.py`), write
   (`push_writer.py`).
5. The gateway cuts the secret off each push and sends the client a PING behind it. The PONG confirms what was read;
   the gateway's heartbeats report it (`gateway/instances.py`), which makes room in the window (`subscriber.py`).
6. If the gateway or the instance dies, the other side misses its heartbeats: pushes that were not confirmed go to
   another member, or the gateway opens the subscription at another instance from where it stood.
"""
