"""The tables that the rules of mediation need, in the same transaction as mailboxes and messages.

The rules of :mod:`mediator.mailboxes.transaction` hold here too. Where several instances share a database mailboxes are
locked before connections: a change of both names the place of the mailbox when the transaction begins.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from mediator.mailboxes.transaction import Transaction
from pickup.rules.records import (
    AccessRule,
    Connection,
    ConnectionUse,
    Invitation,
    NewConnection,
    Route,
    StoredIdentity,
    Traffic,
    Verdict,
)


class ConnectionCursor(NamedTuple):
    """The position of a connection in the order of when they were last seen."""

    seen_at: int
    no: int


class ConnectionRow(NamedTuple):
    """What connections are compared by; times are 0 where there was nothing."""

    no: int
    label: str
    seen_at: int
    """When it was last in use, or was made; what was counted in the last minute may be missing."""
    address: str
    """That of its mailbox, empty without one."""
    messages: int
    bytes: int
    oldest_at: int
    """When the message came that waits longest."""


class Connections(Protocol):
    """The connections of all tenants."""

    def get(self, no: int) -> Connection | None:
        """Return a connection, locked until the transaction ends."""

    def called(self, tenant: str, caller: str) -> Connection | None:
        """Return the connection whose envelopes this canonical key or DID seals, locked."""

    def of_mailbox(self, mailbox_no: int) -> Connection | None:
        """Return the connection that was granted the mailbox."""

    def add(self, new: NewConnection) -> Connection | None:
        """Add a connection; None when another connection has one of its callers by now."""

    def save(self, connection: Connection) -> None:
        """Save the connection with its callers; does nothing when it was removed.

        Raises :class:`UnavailableError` when another connection has one of its callers by now; a retry finds it.
        """

    def remove(self, connection: Connection) -> None:
        """Remove a connection with its callers and its routes; its mailbox stays."""

    def list(self, tenant: str, after: int, limit: int) -> list[Connection]:
        """Return connections of a tenant behind a number, in order."""

    def newest(self, tenant: str, limit: int) -> Sequence[int]:
        """Return the numbers of the connections of a tenant that came last, in falling order."""

    def named(self, tenant: str, prefix: str, limit: int) -> Sequence[int]:
        """Return the numbers of connections that have a caller, or a key in the keylist, whose name begins so."""

    def survey(self, numbers: Sequence[int]) -> Sequence[ConnectionRow]:
        """Return what these connections are compared by, of those that are there, in no order."""

    def unseen(self, since: int, after: ConnectionCursor, limit: int) -> Sequence[Connection]:
        """Return connections of all tenants last seen at ``since`` or before, behind a place, in order of places."""

    def count(self, tenant: str) -> int:
        """Count the connections of a tenant; the time grows with their number."""

    def about(self, tenant: str) -> int:
        """Return about how many; recent changes of other instances may be missing."""


class Routes(Protocol):
    """The keylists of all connections, and the keys that operators attached (D8, D11)."""

    def find(self, tenant: str, key: str) -> Route | None:
        """Return where mail for a canonical key goes."""

    def resolve(self, tenant: str, name: str) -> Route | None:
        """Do as :meth:`find`, and for a key without a route return that of the DID it is inside of, the oldest one."""

    def add_keys(self, route: Route, keys: Sequence[str]) -> None:
        """Let the canonical keys inside the DID of a route lead to it too, until it is removed."""

    def put(self, route: Route) -> None:
        """Save a route, new or changed.

        Raises :class:`UnavailableError` when another connection has it by now; a retry finds it.
        """

    def used(self, route: Route, at: int) -> None:
        """Note that mail came for a route, unless it leads to another mailbox by now; it is not locked."""

    def remove(self, route: Route) -> None:
        """Remove a route, if it is still of the same connection."""

    def of(self, connection: Connection, offset: int, limit: int) -> list[Route]:
        """Return routes of a connection in order of creation, then key."""

    def count(self, connection: Connection) -> int:
        """Return how many routes a connection has, without reading them all."""

    def last_used(self, connection: Connection) -> int:
        """Return when mail last came for a key of a connection, or a key was registered; 0 without keys."""

    def remove_attached(self, mailbox_no: int) -> None:
        """Forget the keys that an operator attached to a mailbox, which is gone (D11)."""

    def attached(self, tenant: str, limit: int) -> list[Route]:
        """Return the keys that operators attached, in order of creation, then key."""


class Invitations(Protocol):
    """The invitations of all tenants."""

    def get(self, id: str) -> Invitation | None:
        """Return an invitation, locked until the transaction ends."""

    def keyed(self, key: str) -> Invitation | None:
        """Return the invitation that has the canonical key."""

    def put(self, invitation: Invitation) -> None:
        """Save an invitation, new or changed."""

    def remove(self, invitation: Invitation) -> None:
        """Remove an invitation; connections that came by it stay."""

    def list(self, tenant: str, limit: int) -> list[Invitation]:
        """Return invitations of a tenant, the newest first."""


class Identities(Protocol):
    """The mediator's own keys."""

    def all(self) -> list[StoredIdentity]:
        """Return the identities of all tenants, retired ones too, in order of their numbers."""

    def add(self, tenant: str, sealed: bytes, dids: Sequence[str], now: int) -> StoredIdentity:
        """Add an identity and retire the tenant's others.

        Raises :class:`UnavailableError` when another instance adds one at the same time; a retry finds it.
        """

    def save(self, identity: StoredIdentity) -> None:
        """Save an identity; one that another instance retired stays retired."""


class Replays(Protocol):
    """Envelopes that were handled already, by any instance (D13)."""

    def add(self, sender: bytes, mark: bytes, until: int, limit: int) -> bool:
        """Store an envelope of a sender; False when it is stored already.

        The newest ``limit`` of each sender are kept, until :meth:`collect` after ``until``.
        """

    def remove(self, sender: bytes, mark: bytes) -> None:
        """Remove an envelope whose change failed."""

    def collect(self, now: int, limit: int) -> int:
        """Remove expired envelopes; return how many."""


class AccessRules(Protocol):
    """The operator's allow and deny lists; a name is on one of them at most."""

    def all(self) -> list[AccessRule]:
        """Return both lists, the oldest first."""

    def count(self) -> int:
        """Return how many names they have."""

    def put(self, rule: AccessRule) -> None:
        """Put a name on a list, and take it off the other."""

    def remove(self, name: str, verdict: Verdict) -> bool:
        """Take a name off a list; False when it is not there."""


class Uses(Protocol):
    """What was counted of connections."""

    def holders(self, mailbox_nos: Sequence[int]) -> dict[int, int]:
        """Return the connections that were granted these mailboxes, by mailbox."""

    def add(self, uses: Sequence[ConnectionUse]) -> None:
        """Add to the counts of connections that are still there; ``uses`` are in order of their numbers."""

    def of(self, nos: Sequence[int]) -> dict[int, ConnectionUse]:
        """Return the counts of these connections, of those that have any."""

    def add_hours(self, hours: Mapping[int, Traffic], forget_before: int) -> None:
        """Add to the counts of hours, which are given by their beginnings, and forget old ones."""

    def hours(self, since: int) -> list[tuple[int, Traffic]]:
        """Return the counts of the hours from ``since`` on, in order."""


class MediationTransaction(Transaction):
    """All tables that a rule of mediation may use."""

    @property
    @abstractmethod
    def connections(self) -> Connections: ...  # noqa: D102
    @property
    @abstractmethod
    def routes(self) -> Routes: ...  # noqa: D102
    @property
    @abstractmethod
    def invitations(self) -> Invitations: ...  # noqa: D102
    @property
    @abstractmethod
    def identities(self) -> Identities: ...  # noqa: D102
    @property
    @abstractmethod
    def replays(self) -> Replays: ...  # noqa: D102
    @property
    @abstractmethod
    def access_rules(self) -> AccessRules: ...  # noqa: D102
    @property
    @abstractmethod
    def uses(self) -> Uses: ...  # noqa: D102
