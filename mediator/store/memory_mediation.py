"""What mediation keeps, in memory: connections, routes, invitations and identities."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from mediator.errors import UnavailableError
from mediator.mediation.ports import SeenPlace
from mediator.mediation.records import Connection, Invitation, KeptIdentity, NewConnection, Route
from mediator.store.memory_table import Undo, Undoable


@dataclass
class Mediation:
    """All tables of mediation."""

    connections: dict[int, Connection] = field(default_factory=dict)
    callers: dict[tuple[str, str], int] = field(default_factory=dict)
    routes: dict[tuple[str, str], Route] = field(default_factory=dict)
    invitations: dict[str, Invitation] = field(default_factory=dict)
    identities: dict[int, KeptIdentity] = field(default_factory=dict)
    replays: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    """Until when each mark of a sender is kept, in order of arrival."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class _Table(Undoable):
    def __init__(self, data: Mediation, undo: Undo) -> None:
        super().__init__(undo)
        self._data = data


class Connections(_Table):
    """See :class:`mediator.mediation.ports.Connections`."""

    def get(self, no: int) -> Connection | None:
        return self._data.connections.get(no)

    def called(self, tenant: str, caller: str) -> Connection | None:
        no = self._data.callers.get((tenant, caller))
        return None if no is None else self._data.connections[no]

    def of_mailbox(self, mailbox_no: int) -> Connection | None:
        found = (kept for kept in self._data.connections.values() if kept.mailbox_no == mailbox_no)
        return next(found, None)

    def add(self, new: NewConnection) -> Connection | None:
        if any((new.tenant, caller) in self._data.callers for caller in new.callers):
            return None
        connection = Connection(no=next(self._data.numbers), **asdict(new))
        self._set(self._data.connections, connection.no, connection)
        for caller in connection.callers:
            self._set(self._data.callers, (connection.tenant, caller), connection.no)
        return connection

    def save(self, connection: Connection) -> None:
        before = self._data.connections.get(connection.no)
        if before is None:
            return
        for caller in set(before.callers) - set(connection.callers):
            self._pop(self._data.callers, (before.tenant, caller))
        for caller in connection.callers:
            if self._data.callers.get((before.tenant, caller), before.no) != before.no:
                raise UnavailableError("another connection has the caller")
            self._set(self._data.callers, (before.tenant, caller), before.no)
        self._set(self._data.connections, before.no, connection)

    def remove(self, connection: Connection) -> None:
        for caller in [caller for caller, no in self._data.callers.items() if no == connection.no]:
            self._pop(self._data.callers, caller)
        for key in [key for key, route in self._data.routes.items() if route.connection_no == connection.no]:
            self._pop(self._data.routes, key)
        if connection.no in self._data.connections:
            self._pop(self._data.connections, connection.no)

    def list(self, tenant: str, after: int, limit: int) -> list[Connection]:
        found = (kept for no, kept in self._data.connections.items() if no > after and kept.tenant == tenant)
        return list(itertools.islice(found, limit))

    def unseen(self, since: int, after: SeenPlace, limit: int) -> Sequence[Connection]:
        places = sorted(SeenPlace(kept.seen_at, kept.no) for kept in self._data.connections.values())
        found = [self._data.connections[place.no] for place in places if place > after and place.seen_at <= since]
        return found[:limit]

    def count(self, tenant: str) -> int:
        return sum(1 for kept in self._data.connections.values() if kept.tenant == tenant)

    def about(self, tenant: str) -> int:
        return self.count(tenant)


class Routes(_Table):
    """See :class:`mediator.mediation.ports.Routes`."""

    def find(self, tenant: str, key: str) -> Route | None:
        return self._data.routes.get((tenant, key))

    def put(self, route: Route) -> None:
        before = self._data.routes.get((route.tenant, route.key))
        if before is not None and before.connection_no != route.connection_no:
            raise UnavailableError("another connection has the key")
        self._set(self._data.routes, (route.tenant, route.key), route)

    def used(self, route: Route, at: int) -> None:
        kept = self._data.routes.get((route.tenant, route.key))
        if kept is not None and kept.mailbox_no == route.mailbox_no:
            self._set(self._data.routes, (route.tenant, route.key), replace(kept, used_at=at))

    def remove(self, route: Route) -> None:
        kept = self._data.routes.get((route.tenant, route.key))
        if kept is not None and kept.connection_no == route.connection_no:
            self._pop(self._data.routes, (route.tenant, route.key))

    def of(self, connection: Connection, offset: int, limit: int) -> list[Route]:
        found = [route for route in self._data.routes.values() if route.connection_no == connection.no]
        return sorted(found, key=lambda route: (route.created_at, route.key))[offset : offset + limit]

    def count(self, connection: Connection) -> int:
        return sum(1 for route in self._data.routes.values() if route.connection_no == connection.no)

    def last_used(self, connection: Connection) -> int:
        used = (route.used_at for route in self._data.routes.values() if route.connection_no == connection.no)
        return max(used, default=0)

    def attached(self, tenant: str, limit: int) -> list[Route]:
        found = [r for r in self._data.routes.values() if r.tenant == tenant and r.connection_no is None]
        return sorted(found, key=lambda route: (route.created_at, route.key))[:limit]

    def detach(self, mailbox_no: int) -> None:
        """Forget what an operator attached to a mailbox that is dropped."""
        for key, route in list(self._data.routes.items()):
            if route.mailbox_no == mailbox_no and route.connection_no is None:
                self._pop(self._data.routes, key)


class Invitations(_Table):
    """See :class:`mediator.mediation.ports.Invitations`."""

    def get(self, id: str) -> Invitation | None:
        return self._data.invitations.get(id)

    def keyed(self, key: str) -> Invitation | None:
        return next((kept for kept in self._data.invitations.values() if kept.key == key), None)

    def put(self, invitation: Invitation) -> None:
        self._set(self._data.invitations, invitation.id, invitation)

    def remove(self, invitation: Invitation) -> None:
        if invitation.id in self._data.invitations:
            self._pop(self._data.invitations, invitation.id)

    def list(self, tenant: str, limit: int) -> list[Invitation]:
        found = [kept for kept in self._data.invitations.values() if kept.tenant == tenant]
        return sorted(found, key=lambda kept: (-kept.created_at, kept.id))[:limit]


class Identities(_Table):
    """See :class:`mediator.mediation.ports.Identities`."""

    def all(self) -> list[KeptIdentity]:
        return list(self._data.identities.values())

    def add(self, tenant: str, sealed: bytes, dids: Sequence[str], now: int) -> KeptIdentity:
        for kept in self.all():
            if kept.tenant == tenant and kept.retired_at is None:
                self.save(replace(kept, retired_at=now))
        identity = KeptIdentity(next(self._data.numbers), tenant, sealed, tuple(dids), now)
        self._set(self._data.identities, identity.no, identity)
        return identity

    def save(self, identity: KeptIdentity) -> None:
        before = self._data.identities.get(identity.no)
        if before is not None:
            retired_at = identity.retired_at if before.retired_at is None else before.retired_at
            self._set(self._data.identities, identity.no, replace(identity, retired_at=retired_at))


class Replays(_Table):
    """See :class:`mediator.mediation.ports.Replays`."""

    def add(self, sender: bytes, mark: bytes, until: int, limit: int) -> bool:
        if (sender, mark) in self._data.replays:
            return False
        self._set(self._data.replays, (sender, mark), until)
        kept = [key for key in self._data.replays if key[0] == sender]
        for key in kept[:-limit]:
            self._pop(self._data.replays, key)
        return True

    def remove(self, sender: bytes, mark: bytes) -> None:
        if (sender, mark) in self._data.replays:
            self._pop(self._data.replays, (sender, mark))

    def collect(self, now: int, limit: int) -> int:
        over = [key for key, until in self._data.replays.items() if until <= now][:limit]
        for key in over:
            self._pop(self._data.replays, key)
        return len(over)
