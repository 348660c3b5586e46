"""Keylists: which keys and DIDs lead to whose mailbox, changed and shown by their holder (D8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mediator.mediation.ports import Transaction
from mediator.mediation.records import Connection, Route, Rules


class Result(StrEnum):
    """What became of one change."""

    SUCCESS = "success"
    NO_CHANGE = "no_change"
    CLIENT_ERROR = "client_error"
    SERVER_ERROR = "server_error"


@dataclass(frozen=True, slots=True)
class Change:
    """One wish, as the peer wrote it: ``add`` or ``remove`` a key or DID in any form."""

    key: str
    action: str


def update(
    tx: Transaction,
    rules: Rules,
    connection: Connection,
    changes: Sequence[Change],
    proven: frozenset[str],
    now: int,
) -> list[Result]:
    """Change a keylist, each wish on its own and in order; return what became of each (D8).

    ``proven`` are the canonical keys and DIDs that sealed the envelope this came in: they are taken over from whoever
    has them. Any other key that somebody else holds, or an operator attached, is ``client_error``, until its holder has
    been idle. :class:`NotEnrolledError` without mediation.
    """
    raise NotImplementedError


def query(tx: Transaction, connection: Connection, offset: int, limit: int) -> tuple[list[Route], int]:
    """Return a page of a keylist, oldest first, and how many keys it has in all."""
    raise NotImplementedError
