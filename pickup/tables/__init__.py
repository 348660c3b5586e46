"""The tables of mediation in SQL: connections, routes, invitations, identities, replays, access lists, use."""

from mediator.store.session import table
from mediator.store.transaction import Transaction
from pickup.tables.access import AccessRules
from pickup.tables.connections import Connections, Routes
from pickup.tables.identities import Identities, Invitations
from pickup.tables.replays import Replays
from pickup.tables.uses import Uses


class MediationTables(Transaction):
    """A transaction with the tables of mediation; see :class:`pickup.mediation.ports.MediationTransaction`."""

    connections = table(Connections)
    routes = table(Routes)
    invitations = table(Invitations)
    identities = table(Identities)
    replays = table(Replays)
    access_rules = table(AccessRules)
    uses = table(Uses)
