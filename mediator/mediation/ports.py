"""What mediation needs kept, beside mailboxes and messages, in the same transaction; ``mediator.store`` implements it.

The rules of :mod:`mediator.mailboxes.ports` hold here too. Where several instances share a database mailboxes are
locked before connections: who will ask for both names the place of the mailbox when the transaction begins.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mediator.mailboxes import ports as mailboxes
from mediator.mediation.records import Connection, Invitation, KeptIdentity, NewConnection, Route


class SeenPlace(NamedTuple):
    """Where a connection stands among all by when it was last seen."""

    seen_at: int
    no: int


class Connections(Protocol):
    """Peers that are connected."""

    def get(self, no: int) -> Connection | None:
        """Return a connection, locked until the transaction ends."""

    def called(self, tenant: str, caller: str) -> Connection | None:
        """Return the connection whose envelopes this canonical key or DID packs, locked."""

    def of_mailbox(self, mailbox_no: int) -> Connection | None:
        """Return the connection that was granted the mailbox."""

    def add(self, new: NewConnection) -> Connection | None:
        """Keep a new connection; None when one of its callers was taken in the meantime."""

    def save(self, connection: Connection) -> None:
        """Keep the connection as it is now, its callers too; nothing of one that was removed.

        :class:`UnavailableError` when another has one of its callers by now: done again, the verb sees it.
        """

    def remove(self, connection: Connection) -> None:
        """Forget a connection with its callers and its routes; its mailbox is not touched."""

    def list(self, tenant: str, after: int, limit: int) -> list[Connection]:
        """Return connections of a tenant behind a number, in order."""

    def unseen(self, since: int, after: SeenPlace, limit: int) -> Sequence[Connection]:
        """Return connections of all tenants last seen at ``since`` or before, behind a place, in order of places."""

    def count(self, tenant: str) -> int:
        """Return how many connections a tenant has; that takes longer the more there are."""

    def about(self, tenant: str) -> int:
        """Return about how many: what other instances changed in the last seconds may not be counted yet."""


class Routes(Protocol):
    """The keylists of all connections, and what an operator attached (D8, D11)."""

    def find(self, tenant: str, key: str) -> Route | None:
        """Return where mail for a canonical key goes."""

    def put(self, route: Route) -> None:
        """Keep a route, new or changed.

        :class:`UnavailableError` when it is of another connection by now: done again, the verb sees it.
        """

    def used(self, route: Route, at: int) -> None:
        """Note that mail came for a route, if it still leads to the same mailbox; it is not locked, so it may not."""

    def remove(self, route: Route) -> None:
        """Forget a route, if it is still of the same connection."""

    def of(self, connection: Connection, offset: int, limit: int) -> list[Route]:
        """Return routes of a connection in order of creation, then key."""

    def count(self, connection: Connection) -> int:
        """Return how many routes a connection has, without reading them all."""

    def last_used(self, connection: Connection) -> int:
        """Return when mail last came for any key of a connection, or the last was registered; 0 when it has none."""

    def attached(self, tenant: str, limit: int) -> list[Route]:
        """Return what an operator attached, in order of creation, then key."""


class Invitations(Protocol):
    """Invitations of ours."""

    def get(self, id: str) -> Invitation | None:
        """Return an invitation, locked until the transaction ends."""

    def keyed(self, key: str) -> Invitation | None:
        """Return the invitation that has the canonical key."""

    def put(self, invitation: Invitation) -> None:
        """Keep an invitation, new or changed."""

    def remove(self, invitation: Invitation) -> None:
        """Forget an invitation; connections that came by it stay."""

    def list(self, tenant: str, limit: int) -> list[Invitation]:
        """Return invitations of a tenant, the newest first."""


class Identities(Protocol):
    """The mediator's own keys."""

    def all(self) -> list[KeptIdentity]:
        """Return the identities of all tenants, retired ones too, in order of their numbers."""

    def add(self, tenant: str, sealed: bytes, dids: Sequence[str], now: int) -> KeptIdentity:
        """Keep a new identity and retire the tenant's others.

        :class:`UnavailableError` when another instance adds one at the same time: done again, the verb sees it.
        """

    def save(self, identity: KeptIdentity) -> None:
        """Keep the identity as it is now; one that another instance retired stays retired."""


class Replays(Protocol):
    """Envelopes that were taken already, by whichever instance (D13)."""

    def add(self, sender: bytes, mark: bytes, until: int, limit: int) -> bool:
        """Remember an envelope of a sender; False when it is remembered already.

        Of one sender the newest ``limit`` are kept, each until :meth:`collect` comes after its time.
        """

    def remove(self, sender: bytes, mark: bytes) -> None:
        """Forget an envelope that changed nothing."""

    def collect(self, now: int, limit: int) -> int:
        """Forget envelopes whose time is over; return how many."""


class Tables(Protocol):
    """What a transaction has for mediation."""

    @property
    def connections(self) -> Connections: ...  # noqa: D102
    @property
    def routes(self) -> Routes: ...  # noqa: D102
    @property
    def invitations(self) -> Invitations: ...  # noqa: D102
    @property
    def identities(self) -> Identities: ...  # noqa: D102
    @property
    def replays(self) -> Replays: ...  # noqa: D102


class Transaction(mailboxes.Transaction, Tables, Protocol):
    """Everything a verb of mediation may touch."""
