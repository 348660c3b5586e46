"""Subscriptions to stored mail: replay, then live mail; queue groups and broadcasts (E6, E7, E9, E10).

How a SUB travels:

1. The client's bytes reach the gateway (`gateway/connections.py`), whose session (`gateway/session.py`) looks at the
   few frames that matter. Most bytes pass on to nats-server as they came.
2. In place of a SUB to stored mail, nats-server is asked whether the client may subscribe, and the service once who the
   client is (`gateway/identities.py`), both on the client's own connection. The client's PONG waits until that is
   decided.
3. The gateway opens the subscription (`gateway/subscriptions.py`) at the source of its subject (`sources.py`,
   `broadcasts.py`).
4. Without a queue group the mailbox's feed (`live_feed.py`) replays what is stored, then pushes what comes; with one,
   a queue group does (`queue_groups.py`). Both read through the broker and encode (`encoding.py`).
5. The session writes the pushes to the client's socket, and a PING behind them. The PONG confirms what was read, which
   makes room in the window (`subscriber.py`). While the socket takes nothing, nothing more is pushed.

A request to the service takes the short way to the NATS door in memory where the client cannot tell
(`gateway/short_way.py`), and nats-server otherwise.
"""
