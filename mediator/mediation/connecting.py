"""How peers become connected, are recognised, and go again (D8)."""

from mediator.mediation.ports import Transaction
from mediator.mediation.records import Connection, NewConnection


def connect(tx: Transaction, new: NewConnection, now: int) -> Connection:
    """Keep a peer that introduced itself by a handshake, and return its connection.

    Every caller must have been proven by the handshake's envelopes and signatures (D8): one that another connection
    has moves here. The connection that one of the callers has already is the same peer again, and is updated.
    Counts a use of the invitation; :class:`NoSuchInvitationError` when that is not open, but a connection that came by
    it may repeat.
    """
    raise NotImplementedError


def meet(
    tx: Transaction, tenant: str, caller: str, their_did: str, my_did: str, invitation: str | None, now: int
) -> Connection:
    """Return the connection of a v2 peer by its canonical ``caller``, a new one the first time.

    ``invitation`` is what it names as parent thread: a use is counted when that is an open invitation of ours and the
    connection came by none before; else it says nothing. Whether the peer is given mediation is asked by the grant.
    """
    raise NotImplementedError


def seen(tx: Transaction, connection: Connection, now: int) -> Connection:
    """Note that a connection asked for something, at most once an hour; return it as it is then."""
    raise NotImplementedError


def disconnect(tx: Transaction, no: int, now: int) -> None:
    """End a connection: its keys are free, its mailbox is unreachable at once and collected later (D8, M4).

    :class:`NoSuchConnectionError` when it is not there.
    """
    raise NotImplementedError
