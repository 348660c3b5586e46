"""What DIDComm brings to the service: its settings, commands, clean-up and door."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from mediator.parts import Part

if TYPE_CHECKING:
    import typer

    from mediator.cleanup.collector import CleanupStep
    from mediator.host import Host
    from mediator.settings.settings import Settings
    from mediator.settings.types import PartSettings
    from mediator.store.base import Transaction
    from mediator.verify.checks import VerifyCheck


class DidcommPart(Part):
    """Wallets and agents use the mediator as their mailbox, over HTTP and WebSocket."""

    name = "didcomm"
    # Push notifications name connections by their numbers.
    known_numbers = ("connection",)

    def settings(self) -> "type[PartSettings]":
        """Return the options of the DIDComm door."""
        from pickup.settings import DidcommSettings

        return DidcommSettings

    def add_commands(self, app: "typer.Typer") -> None:
        """Add invite, invitations, connections, keys, identity, didcomm and try."""
        from pickup import cli

        app.add_typer(cli.app)

    key_files = ("didcomm.key",)

    def keys(self, settings: "Settings") -> Mapping[str, bytes]:
        """Return the key of the vault, if there is one yet."""
        from pickup.dids.identities import KEY_FILE
        from pickup.settings import DidcommSettings

        path, key = settings.data_dir / KEY_FILE, settings.section(DidcommSettings).key
        if key is not None:
            return {KEY_FILE: key.get_secret_value().encode() + b"\n"}
        return {KEY_FILE: path.read_bytes()} if path.exists() else {}

    def cleanup_steps(self, settings: "Settings") -> "Sequence[CleanupStep]":
        """Forget unused connections and old envelopes."""
        from pickup.maintenance import OldReplays, UnusedConnections
        from pickup.settings import DidcommSettings

        return UnusedConnections(settings.section(DidcommSettings).forget_after), OldReplays()

    def forget_address(self, tx: "Transaction", tenant: str, address: str, now: int) -> Mapping[str, int]:
        """End the connection that the mailbox was granted to, with its keys."""
        from pickup.rules import connecting
        from pickup.rules.tables import MediationTransaction

        tables = tx.table(MediationTransaction)
        mailbox = tx.mailboxes.find(tenant, address)
        connection = None if mailbox is None else tables.connections.of_mailbox(mailbox.id)
        if connection is None:
            return {}
        keys = tables.routes.count(connection)
        connecting.disconnect(tables, connection, now)
        return {"connections": 1, "keys": keys}

    def verify_checks(self, settings: "Settings") -> "Sequence[VerifyCheck]":
        """Check connections, keylists and identities."""
        from pickup.maintenance import mediation_checks

        return mediation_checks()

    @asynccontextmanager
    async def open(self, host: "Host") -> AsyncIterator[None]:
        """Open the DIDComm door on the HTTP application."""
        from mediator.mailboxes.mailbox import Kind
        from pickup.broker import MEDIATION_HOOKS
        from pickup.settings import DidcommSettings

        host.broker.hooks[Kind.MEDIATION] = MEDIATION_HOOKS
        if not host.settings.section(DidcommSettings).enabled:
            yield
            return
        from pickup.door import didcomm_door
        from pickup.operate.console import add_pages

        add_pages(host.console)
        common = host.settings, host.http_port, host.broker, host.metrics.registry, host.operations
        async with didcomm_door(*common, host.app, host.announcer, host.tenants) as context:
            host.add_doctor_check(context.metrics.dropped.examine)
            if host.settings.section(DidcommSettings).public_url is not None:
                host.surroundings.watch_url("didcomm.public_url", f"{context.public_url}/did", context.own_did)
            yield


part = DidcommPart()
