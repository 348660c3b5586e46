"""The gateway: the public NATS port, which adds subscriptions to stored mail to nats-server (E6, E7, E9, E10, N10).

How a SUB travels:

1. The client's bytes reach its connection (`server.py`), whose protocol (`protocol.py`) looks at the few frames
   that matter. Most bytes pass on to nats-server as they came.
2. In place of a SUB to stored mail, nats-server is asked whether the client may subscribe, and the service once who the
   client is (`identity.py`), both on the client's own connection. The client's PONG waits until that is decided
   (`session.py`).
3. The gateway opens the subscription (`subscriptions.py`) at the source of its subject: a mailbox, the list of public
   mailboxes, or a pattern of broadcasts.
4. Without a queue group the mailbox's feed (`feed.py`) replays what is stored, then pushes what comes; with one, a
   queue group does (`queue_groups.py`). Both read through the broker. Broadcasts that are not stored come from other
   instances (`broadcasts.py`).
5. The pushes go to the client's socket, and a PING behind them. The PONG confirms what was read, which makes room in
   the window of the subscription (`subscription.py`). While the socket takes nothing, nothing more is pushed.

A request to the service takes the short way to the NATS door in memory where the client cannot tell, and nats-server
otherwise (`inboxes.py` says where its answer may go). `opening.py` opens all of this.
"""
